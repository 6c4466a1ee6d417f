"""The forward pass: a program per tile of queries of one label, online softmax.

Of each key class a tile reads one run of the sorted keys. The whole blocks that lie inside
everybody's run, and on everybody's plateau, go straight from product to exponential; the edges of
the run get bias and mask.
"""

# Triton reads these functions, not Python: its types say little to a checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from mosar.kernels.triton.tiles import (
    GEOMETRY,
    LN2,
    NEVER,
    WORTH,
    Bias,
    at_least,
    edge_block,
    find_part,
    load_matrix,
    make_logits,
    mix_gates,
    split_zones,
    spread_heads,
    store_matrix,
    take_keys,
    take_plateau,
    take_rows,
    take_tokens,
)


class Softmax(NamedTuple):
    """The state of an online softmax."""

    top: tl.tensor
    """[BLOCK_M]: the largest logit so far."""
    total: tl.tensor
    """[BLOCK_M]: sum of exponentials."""
    sums: tl.tensor
    """[BLOCK_M, BLOCK_D]: of values times exponentials."""


class Source(NamedTuple):
    """Keys and values of one head, and the plan's order of them."""

    k: tl.tensor
    v: tl.tensor
    k_token: tl.tensor
    v_token: tl.tensor
    order: tl.tensor
    places: tl.tensor
    routing: tl.tensor


@triton.jit
def attend_block(
    state, queries, rows, tokens, source, start, limit, lo, hi, factor, cap, plateau, bias,
    EDGE: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr, SQUARE: tl.constexpr,
    SPREAD: tl.constexpr, REGIMES: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr,
    PRECISION: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One more block of keys: places [start, limit) of the sorted ones."""
    keys = take_keys(start, limit, source.order, source.places, source.routing, COLUMNS, BLOCK_N)
    k = load_matrix(source.k, keys.token * source.k_token, keys.live, HEAD_DIM, BLOCK_D)
    v = load_matrix(source.v, keys.token * source.v_token, keys.live, HEAD_DIM, BLOCK_D)
    product = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
    score, _ = make_logits(
        product, rows, tokens, keys, lo, hi, factor, cap, plateau, bias,
        EDGE, BIAS, CAPPED, SQUARE, False,
    )  # fmt: skip
    if BIAS == WORTH:
        worth = at_least(mix_gates(tokens, keys, bias, REGIMES, COLUMNS, False), bias.epsilon)
        if SPREAD:
            worth = spread_heads(worth, HEADS, False)
        # The exponent of the worth is nearly its logarithm: weights end up in [0, 2), and half
        # precision does not lose a row whose largest score is worth little.
        about = ((worth.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32)
        top = tl.maximum(state.top, tl.max(score + about, axis=1))
    else:
        top = tl.maximum(state.top, tl.max(score, axis=1))
    # Nothing to read yet: any finite number serves.
    finite = tl.where(top == NEVER, 0.0, top)
    weight = tl.exp2(score - finite[:, None])
    if BIAS == WORTH:
        weight *= worth
    shrink = tl.exp2(state.top - finite)
    sums = tl.dot(weight.to(v.dtype), v, state.sums * shrink[:, None], input_precision=PRECISION)
    return Softmax(top=top, total=state.total * shrink + tl.sum(weight, axis=1), sums=sums)


@triton.jit(do_not_specialize=["length_class"])
def forward_kernel(
    q, k, v, out, lse, row_max, row_sum, pi_q, pi_k,
    query_order, key_order, query_places, key_places, query_offsets, run_lo, run_hi, run_flat,
    plateaus, falls, table, level_until, slopes,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    plan_batch, plan_group, groups, kv_heads, num_queries, num_keys, shift,
    table_stride, table_length, factor, cap, barrier, exponent, epsilon, length_class,
    SHARE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, LABELS: tl.constexpr,
    CLASSES: tl.constexpr, REGIMES: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr,
    CAPPED: tl.constexpr, SQUARE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = (SHARE + BLOCK_M - 1) // BLOCK_M
    HEADS: tl.constexpr = (SHARE + CHUNKS - 1) // CHUNKS
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    SPREAD: tl.constexpr = (BIAS == WORTH) and (HEADS > 1) and (HEADS * TOKENS == BLOCK_M)
    program = tl.program_id(0)
    tiles = tl.cdiv(num_queries, TOKENS) + (LABELS - 1)
    chunk = program // tiles % CHUNKS
    kv_head = program // (tiles * CHUNKS) % kv_heads
    batch = (program // (tiles * CHUNKS * kv_heads)).to(tl.int64)
    group = kv_head // (kv_heads // groups)
    plan_row = batch * plan_batch + group * plan_group
    query_offsets += plan_row * (LABELS + 1)
    label, begin, end = find_part(query_offsets, program % tiles, TOKENS, LABELS, True)
    if label < 0:
        return

    if query_order is not None:
        query_order += plan_row * num_queries
    if query_places is not None:
        query_places += plan_row * num_queries
    if key_order is not None:
        key_order += plan_row * num_keys
    if key_places is not None:
        key_places += plan_row * num_keys
    routing = batch * groups + group
    if BIAS == WORTH:
        pi_q += routing * num_queries * REGIMES
        pi_k += routing * num_keys * COLUMNS
    runs = plan_row * num_queries * CLASSES
    first_head = kv_head * SHARE + chunk * HEADS
    last_head = tl.minimum(first_head + HEADS, kv_head * SHARE + SHARE)
    rows = take_rows(
        begin, end, first_head, last_head, query_order, query_places, shift, HEADS, TOKENS, BLOCK_M
    )
    tokens = take_tokens(
        begin, end, rows, query_order, query_places, shift, pi_q, SPREAD, TOKENS, REGIMES
    )
    source = Source(
        k=k + batch * k_batch + kv_head.to(tl.int64) * k_head,
        v=v + batch * v_batch + kv_head.to(tl.int64) * v_head,
        k_token=k_token,
        v_token=v_token,
        order=key_order,
        places=key_places,
        routing=pi_k,
    )
    bias = Bias(
        barrier=barrier,
        exponent=exponent,
        epsilon=epsilon,
        table=table,
        table_stride=table_stride,
        table_length=table_length,
        level_until=level_until,
        slopes=slopes,
    )
    offset = batch * q_batch + rows.head.to(tl.int64) * q_head + rows.token * q_token
    queries = load_matrix(q, offset, rows.live, HEAD_DIM, BLOCK_D)
    state = Softmax(
        top=tl.full([BLOCK_M], NEVER, tl.float32),
        total=tl.zeros([BLOCK_M], tl.float32),
        sums=tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
    )
    for c in range(CLASSES):
        first = runs + begin * CLASSES + c
        last = runs + (end - 1) * CLASSES + c
        lo_min, lo_max = tl.load(run_lo + first), tl.load(run_lo + last)
        hi_min, hi_max = tl.load(run_hi + first), tl.load(run_hi + last)
        if BIAS == GEOMETRY:
            lo_max = tl.maximum(lo_max, tl.load(run_flat + last))
        plateau = take_plateau(plateaus, falls, label, c, CLASSES, BIAS)
        mine = runs + rows.place * CLASSES + c
        lo = tl.load(run_lo + mine, mask=rows.live, other=0)
        hi = tl.load(run_hi + mine, mask=rows.live, other=0)
        before, stop, whole, rest, after = split_zones(lo_min, lo_max, hi_min, hi_max, BLOCK_N)
        for index in range(0, before + after):
            start, limit = edge_block(index, lo_min, before, stop, rest, hi_max, BLOCK_N)
            state = attend_block(
                state, queries, rows, tokens, source, start, limit, lo, hi,
                factor, cap, plateau, bias,
                True, BIAS, CAPPED, SQUARE, SPREAD, REGIMES, COLUMNS, HEADS, PRECISION,
                HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        for index in range(0, whole):
            start = stop + index * BLOCK_N
            state = attend_block(
                state, queries, rows, tokens, source, start, start + BLOCK_N, lo, hi,
                factor, cap, plateau, bias,
                False, BIAS, CAPPED, SQUARE, SPREAD, REGIMES, COLUMNS, HEADS, PRECISION,
                HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip

    empty = state.total == 0.0
    total = tl.where(empty, 1.0, state.total)
    at = (batch * kv_heads * SHARE + rows.head) * num_queries + rows.token
    store_matrix(out, at * HEAD_DIM, rows.live, state.sums / total[:, None], HEAD_DIM, BLOCK_D)
    found = tl.where(empty, NEVER, (state.top + tl.log2(total)) * LN2)
    tl.store(lse + at, found, mask=rows.live)
    # Both, as the log-sum-exp is too coarse to repeat exponentials from.
    tl.store(row_max + at, tl.where(empty, 0.0, state.top), mask=rows.live)
    tl.store(row_sum + at, state.total, mask=rows.live)
