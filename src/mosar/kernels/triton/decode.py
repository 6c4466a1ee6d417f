"""Attention of one query per row over the regime cache: in parts of each list, then combined.

`mosar.model.cache.regime_lists` describes how keys are stored: lists per (row, group, class) in
pages of a pool. A program processes one key/value head, one class, and one part of the slice that
the query reads of that list, and computes a partial softmax. A second kernel combines the parts of
a query head.

The number of parts follows from the longest list that fits into the table. The host knows it, so
nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from mosar.core.config import MoSARConfig
from mosar.kernels.plan import whole_reach
from mosar.kernels.tables import on_device
from mosar.kernels.triton.launches import handed_over, in_base_two, keep_whole, launching_on
from mosar.kernels.triton.logits import GEOMETRY, LN2, LOG2E, NEVER, cap_scores, fall, take_plateau
from mosar.kernels.triton.plan import plateaus

# The smallest useful part: with fewer keys, starting and combining it costs more than reading.
_KEYS_PER_PART = 256
_MOST_PARTS = 32
# The bytes of a block of keys, so that several of them fit into 64 KiB of shared memory.
_BLOCK_BYTES = 16 * 1024
# Query heads per program: the sums of more do not fit into registers at wide head dims.
_MOST_ROWS = 32


@triton.jit
def find_page(pages, marks, begin, end, first, PAGE: tl.constexpr):
    """Finds the first page of a list with a key at position `first` or later, by binary search."""
    low, high = begin // PAGE, tl.cdiv(end, PAGE)
    while low < high:
        middle = (low + high) // 2
        at = tl.minimum(middle * PAGE + PAGE, end) - 1
        page = tl.load(pages + middle).to(tl.int64)
        if tl.load(marks + page * (2 * PAGE) + at % PAGE) < first:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def decode_kernel(
    q, k_pool, v_pool, table, marks, biases, newest, labels, positions, reach, plateaus, falls,
    part_max, part_sum, part_out,
    position, width, groups, heads, num_parts, factor, cap, barrier, exponent,
    SHARE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CLASSES: tl.constexpr,
    PAGE: tl.constexpr, CAPPED: tl.constexpr, SQUARE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Partial softmax of the query heads of a key/value head over part of one class's slice.

    part_max, part_sum [B, Hq, C * parts], part_out [.., D]; `heads`: key/value heads of a group.
    """
    program = tl.program_id(0)
    part = program % num_parts
    c = program // num_parts % CLASSES
    CHUNKS: tl.constexpr = (SHARE + BLOCK_M - 1) // BLOCK_M
    chunk = program // (num_parts * CLASSES) % CHUNKS
    head = program // (num_parts * CLASSES * CHUNKS) % heads
    row_group = program // (num_parts * CLASSES * CHUNKS * heads)
    row = row_group // groups
    label = tl.load(labels + row_group).to(tl.int32)
    if positions is not None:
        position = tl.load(positions + row).to(tl.int32)
    entry = table + (row_group * CLASSES + c).to(tl.int64) * width
    begin, end = tl.load(entry), tl.load(entry + 1)
    pages = entry + 2
    # An unlimited reach does not overflow here, because positions are not negative.
    first = position - tl.load(reach + label * CLASSES + c)
    low = find_page(pages, marks, begin, end, first, PAGE) * PAGE
    # Every part starts at a page; if `low` is beyond the end, there is no part.
    size = tl.cdiv(tl.cdiv(tl.maximum(end - low, 0), num_parts), PAGE) * PAGE
    start = low + part * size
    stop = tl.minimum(start + size, end)
    plateau = take_plateau(plateaus, falls, label, c, CLASSES, GEOMETRY)

    share = chunk * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    query_head = (row_group * heads + head) * SHARE + share
    live = share < SHARE
    in_dim = dim < HEAD_DIM
    queries = tl.load(
        q + query_head.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :],
        mask=live[:, None] & in_dim[None, :],
        other=0.0,
    )
    if biases is not None:
        latest = tl.load(newest + query_head, mask=live, other=0.0)
    top = tl.full([BLOCK_M], NEVER, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for block in range(start, stop, BLOCK_N):
        place = block + tl.arange(0, BLOCK_N)
        stored = (place >= begin) & (place < stop)
        page = tl.load(pages + place // PAGE, mask=stored, other=0).to(tl.int64)
        at = place % PAGE
        key_position = tl.load(marks + page * (2 * PAGE) + at, mask=stored, other=0)
        distance = position - key_position
        inside = stored & (key_position >= first) & (distance >= 0)
        line = (page * heads + head) * (HEAD_DIM * PAGE)
        k = tl.load(
            k_pool + line[None, :] + dim[:, None] * PAGE + at[None, :],
            mask=inside[None, :] & in_dim[:, None],
            other=0.0,
        )
        v = tl.load(
            v_pool + line[:, None] + at[:, None] * HEAD_DIM + dim[None, :],
            mask=inside[:, None] & in_dim[None, :],
            other=0.0,
        ).to(queries.dtype)
        product = tl.dot(queries, k.to(queries.dtype), input_precision=PRECISION)
        score, _ = cap_scores(product, factor, cap, CAPPED)
        score -= fall(distance, plateau, barrier, exponent, SQUARE)[None, :]
        if biases is not None:
            # Only the difference fits into float32, far along a text.
            added = tl.load(
                biases
                + ((page * heads + head) * (SHARE * PAGE) + at)[None, :]
                + share[:, None] * PAGE,
                mask=live[:, None] & inside[None, :],
                other=0.0,
            )
            score += (added - latest[:, None]).to(tl.float32) * LOG2E
        score = tl.where(inside[None, :], score, NEVER)
        new = tl.maximum(top, tl.max(score, axis=1))
        finite = tl.where(new == NEVER, 0.0, new)
        weight = tl.exp2(score - finite[:, None])
        shrink = tl.exp2(top - finite)
        total = total * shrink + tl.sum(weight, axis=1)
        sums = tl.dot(
            weight.to(queries.dtype), v, sums * shrink[:, None], input_precision=PRECISION
        )
        top = new
    line = (query_head.to(tl.int64) * CLASSES + c) * num_parts + part
    tl.store(part_max + line, top, mask=live)
    tl.store(part_sum + line, total, mask=live)
    tl.store(
        part_out + line[:, None] * HEAD_DIM + dim[None, :],
        sums,
        mask=live[:, None] & in_dim[None, :],
    )


@triton.jit
def combine_kernel(
    part_max, part_sum, part_out, out, lse, num_parts,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Combines the parts of one query head."""
    head = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    top = tl.full([1], NEVER, tl.float32)
    for block in range(0, num_parts, BLOCK_P):
        part = block + tl.arange(0, BLOCK_P)
        found = tl.load(part_max + head * num_parts + part, mask=part < num_parts, other=NEVER)
        top = tl.maximum(top, tl.max(found, axis=0))
    finite = tl.where(top == NEVER, 0.0, top)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([BLOCK_D], tl.float32)
    for block in range(0, num_parts, BLOCK_P):
        part = block + tl.arange(0, BLOCK_P)
        here = part < num_parts
        line = head * num_parts + part
        weight = tl.exp2(tl.load(part_max + line, mask=here, other=NEVER) - finite)
        total += tl.sum(weight * tl.load(part_sum + line, mask=here, other=0.0), axis=0)
        values = tl.load(
            part_out + line[:, None] * HEAD_DIM + dim[None, :],
            mask=here[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        sums += tl.sum(weight[:, None] * values, axis=0)
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    result = sums / divisor
    tl.store(out + head * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
    only = tl.arange(0, 1)
    tl.store(lse + head + only, tl.where(empty, NEVER, (top + tl.log2(divisor)) * LN2))


@triton_op("mosar::triton_cache_attend", mutates_args={})
def cache_attend(
    q: Tensor,
    labels: Tensor,
    positions: Tensor | None,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    marks: Tensor,
    biases: Tensor | None,
    newest: Tensor | None,
    reach: Tensor,
    plateaus: Tensor,
    falls: Tensor,
    position: int,
    scale: float,
    softcap: float,
    barrier: float,
    exponent: float,
) -> tuple[Tensor, Tensor]:
    """Output [B, Hq, 1, D] and log-sum-exp [B, Hq, 1] of q [B, Hq, 1, D] with labels [B, Gr].

    biases: of the keys, if they have any; newest [B, Hq]: that of the newest key.
    """
    batch, query_heads, _, dim = q.shape
    heads, page = v_pool.shape[1:3]
    groups, classes = labels.shape[1], reach.shape[1]
    share = query_heads // (groups * heads)
    longest = (table.shape[1] - 2) * page
    parts = min(_MOST_PARTS, max(1, -(-longest // _KEYS_PER_PART)))
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    split = (batch, query_heads, classes * parts)
    part_max, part_sum = lse.new_empty(split), lse.new_empty(split)
    part_out = lse.new_empty((*split, dim))
    block_d = max(16, triton.next_power_of_2(dim))
    block_m = min(_MOST_ROWS, max(16, triton.next_power_of_2(share)))
    chunks = -(-share // block_m)
    with launching_on(q):
        wrap_triton(decode_kernel)[(batch * groups * heads * chunks * classes * parts,)](
            q=q,
            k_pool=k_pool,
            v_pool=v_pool,
            table=table,
            marks=marks,
            biases=biases,
            newest=newest,
            labels=labels,
            positions=positions,
            reach=reach,
            plateaus=plateaus,
            falls=falls,
            part_max=part_max,
            part_sum=part_sum,
            part_out=part_out,
            position=position,
            width=table.shape[1],
            groups=groups,
            heads=heads,
            num_parts=parts,
            exponent=exponent,
            SHARE=share,
            HEAD_DIM=dim,
            BLOCK_D=block_d,
            CLASSES=classes,
            PAGE=page,
            SQUARE=exponent == 2,
            PRECISION="ieee",
            BLOCK_M=block_m,
            BLOCK_N=max(16, min(64, _BLOCK_BYTES // (block_d * q.element_size()))),
            **in_base_two(scale, softcap, barrier),
        )
        wrap_triton(combine_kernel)[(batch * query_heads,)](
            part_max=part_max,
            part_sum=part_sum,
            part_out=part_out,
            out=out,
            lse=lse,
            num_parts=classes * parts,
            HEAD_DIM=dim,
            BLOCK_D=block_d,
            BLOCK_P=16,
        )
    return out, lse if newest is None else (lse + newest[..., None]).float()


def _fake_cache_attend(q, *inputs):
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


cache_attend.register_fake(_fake_cache_attend)
keep_whole("triton_cache_attend")


def attend_token(
    q: Tensor,
    labels: Tensor,
    positions: Tensor | None,
    state: tuple[Tensor, ...],
    *,
    position: int,
    window: int | None,
    scale: float,
    softcap: float | None,
    config: MoSARConfig,
    of_key: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of q [B, Hq, 1, D] with labels [B, Gr] over the lists of a cache.

    state: that of `RegimeLists`; position: the position of every row if no positions [B, 1] are
    given. Tensors on the host (table, marks, positions) are copied to the device. of_key [B, Hq]
    float64: that of the newest key, if keys have one.
    """
    k_pool, v_pool, table, marks, _, _, biases = state
    device = q.device
    whole, falls = plateaus(config, device)
    return torch.ops.mosar.triton_cache_attend(
        q.contiguous(),
        labels.contiguous(),
        None if positions is None else handed_over(positions, device).contiguous(),
        k_pool,
        v_pool,
        handed_over(table, device),
        handed_over(marks, device),
        None if of_key is None else biases,
        None if of_key is None else of_key.contiguous(),
        on_device(device, whole_reach, config, window),
        whole,
        falls,
        position,
        scale,
        0.0 if softcap is None else softcap,
        config.barrier,
        config.exponent,
    )
