"""What the kernels share: the tile of a program, its rows of queries, blocks of keys.

A tile has BLOCK_M rows. A row is a token of one query head. The HEADS heads of a key/value head
that share a tile are adjacent: row r is token r // HEADS and head r % HEADS. Where keys have a
bias (KEYED), which differs between heads, a tile has one head.
"""

# Triton compiles these functions, not Python, so a type checker cannot check them.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from mosar.kernels.triton.logits import GEOMETRY


class Job(NamedTuple):
    """The work of a program: some sorted tokens of one part, for one key/value head."""

    part: tl.tensor
    """The label of the queries, or the class of the keys; -1 if there is nothing to do."""
    begin: tl.tensor
    end: tl.tensor
    chunk: tl.tensor
    """The index of the chunk of query heads that share the key/value head."""
    kv_head: tl.tensor
    batch: tl.tensor
    plan_row: tl.tensor
    routing_row: tl.tensor


class Sorted(NamedTuple):
    """The plan's order of queries or of keys.

    It is separate from the tensors that it indexes: torch.compile assumes that a pointer passed to
    a function is written to if the result of the function is part of a store address.
    """

    order: tl.tensor
    places: tl.tensor
    shift: tl.tensor
    """The position of the first token, if there is no `places`."""


class Source(NamedTuple):
    """Keys and values of one head, and the plan's order of them."""

    k: tl.tensor
    v: tl.tensor
    k_token: tl.tensor
    v_token: tl.tensor
    order: tl.tensor
    """Sorted."""
    routing: tl.tensor


class Rows(NamedTuple):
    """The rows of a tile: vectors of BLOCK_M."""

    live: tl.tensor
    place: tl.tensor
    """The index among the sorted queries."""
    token: tl.tensor
    head: tl.tensor
    position: tl.tensor


class Tokens(NamedTuple):
    """The tokens of the rows: each once if HEADS is a power of two, else once per row."""

    live: tl.tensor
    token: tl.tensor
    position: tl.tensor
    routing: tl.tensor
    """Pointers to their routing probabilities."""
    first: tl.tensor
    """Positions of the first and of the last."""
    last: tl.tensor


class Keys(NamedTuple):
    """A block of sorted keys: vectors of BLOCK_N."""

    live: tl.tensor
    place: tl.tensor
    token: tl.tensor
    position: tl.tensor
    routing: tl.tensor
    first: tl.tensor
    last: tl.tensor


class Zones(NamedTuple):
    """Sorted keys [begin, end): `whole` blocks from `stop` to `rest` that all queries read, and the
    edges `before` and `after` them.
    """

    begin: tl.tensor
    stop: tl.tensor
    rest: tl.tensor
    end: tl.tensor
    before: tl.tensor
    whole: tl.tensor
    after: tl.tensor


@triton.jit
def find_part(offsets, tile, SIZE: tl.constexpr, PARTS: tl.constexpr, LATE_FIRST: tl.constexpr):
    """(part, begin, end) of a tile of up to SIZE tokens, or part -1 if there are no more tiles.

    Parts (labels or classes) are cut into tiles one by one, those with a long reach first, so that
    heavy tiles start early. Within a part, late queries and early keys are heavy.
    """
    part, begin, end, seen = -1, 0, 0, 0
    for index in tl.static_range(PARTS):
        first = tl.load(offsets + PARTS - 1 - index)
        last = tl.load(offsets + PARTS - index)
        tiles = tl.cdiv(last - first, SIZE)
        here = (tile >= seen) & (tile < seen + tiles)
        step = tile - seen
        if LATE_FIRST:
            step = tiles - 1 - step
        part = tl.where(here, PARTS - 1 - index, part)
        begin = tl.where(here, first + step * SIZE, begin)
        end = tl.where(here, tl.minimum(first + step * SIZE + SIZE, last), end)
        seen += tiles
    return part, begin, end


@triton.constexpr_function
def heads_of_tile(share, rows, keyed):
    """The number of heads, of `share`, in a tile of `rows` rows: all, or an even chunk of them."""
    if keyed:
        return 1
    chunks = -(-share // rows)
    return -(-share // chunks)


@triton.jit
def find_job(
    offsets, length, kv_heads, groups, plan_batch, plan_group,
    SIZE: tl.constexpr, PARTS: tl.constexpr, CHUNKS: tl.constexpr, LATE_FIRST: tl.constexpr,
):  # fmt: skip
    """The work of this program: a tile of up to SIZE of the `length` sorted tokens."""
    program = tl.program_id(0)
    tiles = tl.cdiv(length, SIZE) + (PARTS - 1)
    kv_head = program // (tiles * CHUNKS) % kv_heads
    batch = (program // (tiles * CHUNKS * kv_heads)).to(tl.int64)
    group = kv_head // (kv_heads // groups)
    plan_row = batch * plan_batch + group * plan_group
    offsets += plan_row * (PARTS + 1)
    part, begin, end = find_part(offsets, program % tiles, SIZE, PARTS, LATE_FIRST)
    return Job(
        part=part,
        begin=begin,
        end=end,
        chunk=program // tiles % CHUNKS,
        kv_head=kv_head,
        batch=batch,
        plan_row=plan_row,
        routing_row=batch * groups + group,
    )


@triton.jit
def advance(pointer, offset):
    """The pointer plus an offset, if there is a pointer."""
    if pointer is None:
        return pointer
    else:
        return pointer + offset


@triton.jit
def order_of(job, order, places, shift, length):
    """The order of the `length` queries, or keys, of a job."""
    return Sorted(
        order=advance(order, job.plan_row * length),
        places=advance(places, job.plan_row * length),
        shift=shift,
    )


@triton.jit
def source_of(
    job, k, v, k_batch, k_head, k_token, v_batch, v_head, v_token, order, routing
):  # fmt: skip
    return Source(
        k=k + job.batch * k_batch + job.kv_head.to(tl.int64) * k_head,
        v=v + job.batch * v_batch + job.kv_head.to(tl.int64) * v_head,
        k_token=k_token,
        v_token=v_token,
        order=order,
        routing=routing,
    )


@triton.jit
def split_zones(begin, inner_begin, inner_end, end, BLOCK: tl.constexpr):
    """Splits [begin, end) into whole blocks of [inner_begin, inner_end) and the rest."""
    inner_begin = tl.minimum(tl.maximum(inner_begin, begin), end)
    whole = tl.maximum(tl.minimum(inner_end, end) - inner_begin, 0) // BLOCK
    stop = tl.where(whole > 0, inner_begin, end)
    rest = stop + whole * BLOCK
    return Zones(
        begin=begin,
        stop=stop,
        rest=rest,
        end=end,
        before=tl.cdiv(stop - begin, BLOCK),
        whole=whole,
        after=tl.cdiv(end - rest, BLOCK),
    )


@triton.jit
def edge_block(index, zones, BLOCK: tl.constexpr):
    """The start of the edge block `index`, and the end of the keys that it may use."""
    is_before = index < zones.before
    after = zones.rest + (index - zones.before) * BLOCK
    first = tl.where(is_before, zones.begin + index * BLOCK, after)
    return first, tl.where(is_before, zones.stop, zones.end)


@triton.jit
def take_run(
    run_lo, run_hi, run_flat, job, rows, c, length,
    CLASSES: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The keys of class c that the queries of a job read: [lo, hi) of each row, and their zones."""
    runs = job.plan_row * length * CLASSES + c
    first = runs + job.begin * CLASSES
    last = runs + (job.end - 1) * CLASSES
    lo_max = tl.load(run_lo + last)
    if BIAS == GEOMETRY:
        lo_max = tl.maximum(lo_max, tl.load(run_flat + last))
    zones = split_zones(
        tl.load(run_lo + first), lo_max, tl.load(run_hi + first), tl.load(run_hi + last), BLOCK_N
    )
    mine = runs + rows.place * CLASSES
    lo = tl.load(run_lo + mine, mask=rows.live, other=0)
    hi = tl.load(run_hi + mine, mask=rows.live, other=0)
    return lo, hi, zones


@triton.jit
def position_of(tokens, index, live):
    """Positions of sorted tokens; without a list they are consecutive."""
    if tokens.places is None:
        return index + tokens.shift
    else:
        return tl.load(tokens.places + index, mask=live, other=0)


@triton.jit
def token_of(tokens, index, live):
    """Tokens at sorted indices, as int64 for offsets; without a list the order does not change."""
    if tokens.order is None:
        return index.to(tl.int64)
    else:
        return tl.load(tokens.order + index, mask=live, other=0).to(tl.int64)


@triton.jit
def take_rows(
    begin, end, first_head, last_head, order,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The rows of the sorted tokens [begin, end) and heads [first_head, last_head)."""
    row = tl.arange(0, BLOCK_M)
    place, head = begin + row // HEADS, first_head + row % HEADS
    live = (row < TOKENS * HEADS) & (place < end) & (head < last_head)
    return Rows(
        live=live,
        place=place,
        token=token_of(order, place, live),
        head=tl.minimum(head, last_head - 1),
        position=position_of(order, place, live),
    )


@triton.jit
def take_tokens(
    begin, end, rows, order, routing,
    SPREAD: tl.constexpr, TOKENS: tl.constexpr, REGIMES: tl.constexpr,
):  # fmt: skip
    """The tokens of the same rows, each once with SPREAD, else once per row."""
    if SPREAD:
        place = begin + tl.arange(0, TOKENS)
        live = place < end
        token = token_of(order, place, live)
        position = position_of(order, place, live)
    else:
        live, token, position = rows.live, rows.token, rows.position
    return Tokens(
        live=live,
        token=token,
        position=position,
        routing=advance(routing, token * REGIMES),
        first=position_of(order, begin, True),
        last=position_of(order, end - 1, True),
    )


@triton.jit
def take_keys(start, limit, order, routing, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The sorted keys [start, limit), at most BLOCK_N."""
    place = start + tl.arange(0, BLOCK_N)
    live = place < limit
    token = token_of(order, place, live)
    end = tl.minimum(start + BLOCK_N, limit)
    return Keys(
        live=live,
        place=place,
        token=token,
        position=position_of(order, place, live),
        routing=advance(routing, token * COLUMNS),
        first=position_of(order, start, True),
        last=position_of(order, end - 1, True),
    )


@triton.jit
def load_keys(
    start, limit, source, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The same for a source, with their matrices of keys and of values."""
    keys = take_keys(start, limit, source.order, source.routing, COLUMNS, BLOCK_N)
    k = load_matrix(source.k, keys.token * source.k_token, keys.live, HEAD_DIM, BLOCK_D)
    v = load_matrix(source.v, keys.token * source.v_token, keys.live, HEAD_DIM, BLOCK_D)
    return keys, k, v


@triton.jit
def load_matrix(base, offset, live, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[len(offset), BLOCK_D]: rows at these offsets; 0 if not live, and beyond the head dim."""
    dim = tl.arange(0, BLOCK_D)
    mask = live[:, None]
    if HEAD_DIM < BLOCK_D:
        mask = mask & (dim < HEAD_DIM)[None, :]
    return tl.load(base + offset[:, None] + dim[None, :], mask=mask, other=0.0)


@triton.jit
def store_matrix(base, offset, live, rows, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    dim = tl.arange(0, BLOCK_D)
    mask = live[:, None]
    if HEAD_DIM < BLOCK_D:
        mask = mask & (dim < HEAD_DIM)[None, :]
    tl.store(base + offset[:, None] + dim[None, :], rows.to(base.dtype.element_ty), mask=mask)
