"""What the kernels share: tiles of rows, blocks of keys, logits and biases.

A tile holds BLOCK_M rows. A row is a token of one query head; the HEADS heads of a key/value head
that share a tile lie side by side: row r is token r // HEADS and head r % HEADS. A block of scores
is [rows, keys], or [keys, rows] where KEYS_FIRST.

Everything is in base 2. A mixture of gates multiplies exponentials instead of entering logits.
"""

# Triton reads these functions, not Python: its types say little to a checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

# Kinds of bias, as in csrc/attention.h.
NONE = tl.constexpr(0)
GEOMETRY = tl.constexpr(1)
WORTH = tl.constexpr(2)
TABLE = tl.constexpr(3)

LN2 = tl.constexpr(0.6931471805599453)
NEVER = tl.constexpr(float("-inf"))


class Rows(NamedTuple):
    """The rows of a tile: vectors of BLOCK_M."""

    live: tl.tensor
    place: tl.tensor
    """Among the sorted queries."""
    token: tl.tensor
    head: tl.tensor
    position: tl.tensor


class Tokens(NamedTuple):
    """The tokens behind the rows, each once where HEADS is a power of two, else once a row."""

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


class Bias(NamedTuple):
    """What the biases are made of; each kind reads its part."""

    barrier: tl.tensor
    exponent: tl.tensor
    epsilon: tl.tensor
    table: tl.tensor
    table_stride: tl.tensor
    table_length: tl.tensor
    level_until: tl.tensor
    slopes: tl.tensor


class Plateau(NamedTuple):
    """Where the gate of one regime pair starts to fall, and 1 / the length of the fall."""

    whole: tl.tensor
    fraction: tl.tensor
    inverse: tl.tensor


@triton.jit
def find_part(offsets, tile, SIZE: tl.constexpr, PARTS: tl.constexpr, LATE_FIRST: tl.constexpr):
    """(part, begin, end) of a tile of up to SIZE places, or part -1 where the tiles are used up.

    Parts (labels, or classes) are cut into tiles one by one, the far-reaching ones first, so that
    the heavy tiles start early; within a part late queries are heavy, and early keys.
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


@triton.jit
def split_zones(begin, inner_begin, inner_end, end, BLOCK: tl.constexpr):
    """[begin, end) as whole blocks of [inner_begin, inner_end), and what is before and after them.

    Returns (blocks before, where they stop, whole blocks, where the rest starts, blocks after).
    """
    inner_begin = tl.minimum(tl.maximum(inner_begin, begin), end)
    whole = tl.maximum(tl.minimum(inner_end, end) - inner_begin, 0) // BLOCK
    stop = tl.where(whole > 0, inner_begin, end)
    rest = stop + whole * BLOCK
    return tl.cdiv(stop - begin, BLOCK), stop, whole, rest, tl.cdiv(end - rest, BLOCK)


@triton.jit
def edge_block(index, begin, before, stop, rest, end, BLOCK: tl.constexpr):
    """Where the edge block `index` starts, and where the places it may use end."""
    is_before = index < before
    first = tl.where(is_before, begin + index * BLOCK, rest + (index - before) * BLOCK)
    return first, tl.where(is_before, stop, end)


@triton.jit
def position_of(places, index, live, shift):
    """Positions of sorted tokens; without a list they count up from `shift`."""
    if places is None:
        return index + shift
    else:
        return tl.load(places + index, mask=live, other=0)


@triton.jit
def token_of(order, index, live):
    """Tokens of sorted places, as int64 for offsets; without a list the order is as it comes."""
    if order is None:
        return index.to(tl.int64)
    else:
        return tl.load(order + index, mask=live, other=0).to(tl.int64)


@triton.jit
def take_rows(
    begin, end, first_head, last_head, order, places, shift,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The rows of places [begin, end) and heads [first_head, last_head)."""
    row = tl.arange(0, BLOCK_M)
    place, head = begin + row // HEADS, first_head + row % HEADS
    live = (row < TOKENS * HEADS) & (place < end) & (head < last_head)
    return Rows(
        live=live,
        place=place,
        token=token_of(order, place, live),
        head=tl.minimum(head, last_head - 1),
        position=position_of(places, place, live, shift),
    )


@triton.jit
def take_tokens(
    begin, end, rows, order, places, shift, routing,
    SPREAD: tl.constexpr, TOKENS: tl.constexpr, REGIMES: tl.constexpr,
):  # fmt: skip
    """The tokens of the same places, once each where SPREAD says so, else those of `rows`."""
    first = position_of(places, begin, True, shift)
    last = position_of(places, end - 1, True, shift)
    if SPREAD:
        place = begin + tl.arange(0, TOKENS)
        live = place < end
        token = token_of(order, place, live)
        position = position_of(places, place, live, shift)
    else:
        live, token, position = rows.live, rows.token, rows.position
    if routing is not None:
        routing += token * REGIMES
    return Tokens(
        live=live,
        token=token,
        position=position,
        routing=routing,
        first=first,
        last=last,
    )


@triton.jit
def take_keys(start, limit, order, places, routing, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The sorted keys [start, limit), at most BLOCK_N."""
    place = start + tl.arange(0, BLOCK_N)
    live = place < limit
    token = token_of(order, place, live)
    end = tl.minimum(start + BLOCK_N, limit)
    if routing is not None:
        routing += token * COLUMNS
    return Keys(
        live=live,
        place=place,
        token=token,
        position=position_of(places, place, live, 0),
        routing=routing,
        first=position_of(places, start, True, 0),
        last=position_of(places, end - 1, True, 0),
    )


@triton.jit
def take_plateau(plateaus, falls, label, c, CLASSES: tl.constexpr, BIAS: tl.constexpr):
    """The geometry of a (label, class), where it is what the bias is made of."""
    if BIAS == GEOMETRY:
        pair = label * CLASSES + c
        return Plateau(
            whole=tl.load(plateaus + pair),
            fraction=tl.load(falls + pair * 2),
            inverse=tl.load(falls + pair * 2 + 1),
        )
    else:
        return Plateau(whole=0, fraction=0.0, inverse=0.0)


@triton.jit
def load_matrix(base, offset, live, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[len(offset), BLOCK_D]: rows at these offsets, 0 where not live and beyond the head dim."""
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


@triton.jit
def over_rows(x, KEYS_FIRST: tl.constexpr):
    """A vector over rows (or tokens), to be broadcast along keys."""
    if KEYS_FIRST:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def over_keys(x, KEYS_FIRST: tl.constexpr):
    """A vector over keys, to be broadcast along rows (or tokens)."""
    if KEYS_FIRST:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def spread_heads(x, HEADS: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """A block over tokens as one over rows."""
    if KEYS_FIRST:
        x = tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], HEADS])
        return tl.reshape(x, [x.shape[0], x.shape[1] * HEADS])
    else:
        x = tl.broadcast_to(x[:, None, :], [x.shape[0], HEADS, x.shape[1]])
        return tl.reshape(x, [x.shape[0] * HEADS, x.shape[2]])


@triton.jit
def sum_heads(x, HEADS: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """A block over rows, summed over the heads of each token."""
    if KEYS_FIRST:
        return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // HEADS, HEADS]), axis=2)
    else:
        return tl.sum(tl.reshape(x, [x.shape[0] // HEADS, HEADS, x.shape[1]]), axis=1)


@triton.jit
def tanh(x):
    """tanh(x) = x P(x²) / Q(x²) within 3 ulp, saturated beyond |x| = 7.95; NaN passes."""
    x = tl.where(x > 7.95, 7.95, x)
    x = tl.where(x < -7.95, -7.95, x)
    u = x * x
    p = u * 1.532881022114907e-8 + 2.1958854631520808e-5
    p = p * u + 3.5752940457314253e-3
    p = p * u + 0.13447558879852295
    p = p * u + 1.0
    q = u * 8.56051542541536e-7 + 3.4174666507169604e-4
    q = q * u + 2.617833949625492e-2
    q = q * u + 0.46780887246131897
    q = q * u + 1.0
    return x * p / q


@triton.jit
def cap_scores(product, factor, cap, CAPPED: tl.constexpr):
    """Scores in base 2, and the derivative of the cap.

    `factor` is scale log2(e), or scale / cap where there is a cap; `cap` is the cap times log2(e).
    """
    score = product * factor
    slope = score
    if CAPPED:
        bent = tanh(score)
        slope = 1.0 - bent * bent
        score = bent * cap
    return score, slope


@triton.jit
def fall(distance, plateau, barrier, exponent, SQUARE: tl.constexpr):
    """-log2 of one regime pair's gate, the barrier being in base 2."""
    # In whole numbers first: float32 holds no fraction of a far plateau.
    beyond = (distance - plateau.whole).to(tl.float32) - plateau.fraction
    progress = tl.minimum(tl.maximum(beyond * plateau.inverse, 0.0), 1.0)
    if SQUARE:
        return barrier * progress * progress
    else:
        return barrier * tl.exp2(exponent * tl.log2(progress))


@triton.jit
def is_level(tokens, keys, bias):
    """The place of the nearest pair of a block in a table by distance, and whether the table holds
    the same from there to the farthest pair.
    """
    nearest = tl.minimum(tl.maximum(tokens.first - keys.last, 0), bias.table_length - 1)
    return nearest, tl.load(bias.level_until + nearest) >= tokens.last - keys.first


@triton.jit
def gate_places(tokens, keys, bias, KEYS_FIRST: tl.constexpr):
    """Where the gates of a block's pairs are in the table, of the nearest, and if all are level."""
    nearest, level = is_level(tokens, keys, bias)
    distance = over_rows(tokens.position, KEYS_FIRST) - over_keys(keys.position, KEYS_FIRST)
    return tl.minimum(tl.maximum(distance, 0), bias.table_length - 1), nearest, level


@triton.jit
def make_logits(
    product, rows, tokens, keys, lo, hi, factor, cap, plateau, bias,
    EDGE: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr, SQUARE: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Products q·k to logits in base 2, and the derivative of the cap.

    Only at an EDGE are pairs masked, and gates of one regime pair different from 1.
    """
    score, slope = cap_scores(product, factor, cap, CAPPED)
    distance = over_rows(rows.position, KEYS_FIRST) - over_keys(keys.position, KEYS_FIRST)
    if BIAS == TABLE:
        if bias.slopes is not None:
            steep = over_rows(tl.load(bias.slopes + rows.head), KEYS_FIRST)
            score -= steep * distance.to(tl.float32)
        if bias.table is not None:
            line = bias.table + rows.head * bias.table_stride
            nearest, level = is_level(tokens, keys, bias)
            added = tl.zeros(score.shape, tl.float32)
            if level:
                added += over_rows(tl.load(line + nearest), KEYS_FIRST)
            else:
                at = tl.minimum(tl.maximum(distance, 0), bias.table_length - 1)
                added += tl.load(over_rows(line, KEYS_FIRST) + at)
            # Also of a logit of infinity: such a pair does not exist.
            score = tl.where(added == NEVER, NEVER, score + added)
    if EDGE:
        if BIAS == GEOMETRY:
            score -= fall(distance, plateau, bias.barrier, bias.exponent, SQUARE)
        place = over_keys(keys.place, KEYS_FIRST)
        inside = (place >= over_rows(lo, KEYS_FIRST)) & (place < over_rows(hi, KEYS_FIRST))
        score = tl.where(inside & over_keys(keys.live, KEYS_FIRST), score, NEVER)
    return score, slope


@triton.jit
def at_least(worth, epsilon):
    """The worth, held at epsilon; what is not a number stays so, and is seen."""
    return tl.maximum(worth, epsilon, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def mix_gates(
    tokens, keys, bias, REGIMES: tl.constexpr, COLUMNS: tl.constexpr, KEYS_FIRST: tl.constexpr
):
    """The worth sum_mn pi_q[m] gate[m][n][d] pi_k[n] of each (token, key).

    Level gates are numbers, and the block a sum of outer products; others are looked up.
    """
    at, nearest, level = gate_places(tokens, keys, bias, KEYS_FIRST)
    worth = tl.zeros(at.shape, tl.float32)
    if level:
        for n in tl.static_range(COLUMNS):
            mixed = tl.zeros(tokens.position.shape, tl.float32)
            for m in tl.static_range(REGIMES):
                gate = tl.load(bias.table + (m * COLUMNS + n) * bias.table_length + nearest)
                mixed += gate * tl.load(tokens.routing + m, mask=tokens.live, other=0.0)
            share_k = tl.load(keys.routing + n, mask=keys.live, other=0.0)
            worth += over_rows(mixed, KEYS_FIRST) * over_keys(share_k, KEYS_FIRST)
    else:
        for n in tl.static_range(COLUMNS):
            blend = tl.zeros(at.shape, tl.float32)
            for m in tl.static_range(REGIMES):
                gates = tl.load(bias.table + (m * COLUMNS + n) * bias.table_length + at)
                share_q = tl.load(tokens.routing + m, mask=tokens.live, other=0.0)
                blend += gates * over_rows(share_q, KEYS_FIRST)
            share_k = tl.load(keys.routing + n, mask=keys.live, other=0.0)
            worth += blend * over_keys(share_k, KEYS_FIRST)
    return worth
