"""What the kernels share: logits of a block, their biases, and mixtures of gates.

A block is [rows, keys], or [keys, rows] with KEYS_FIRST. A row is a token of one head; some blocks
have tokens instead of rows (`tiles.py`).

Exponentials are in base 2. A mixture of gates multiplies them instead of being added to logits.
"""

# Triton compiles these functions, not Python, so a type checker cannot check them.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from mosar.kernels import autograd

GEOMETRY = tl.constexpr(autograd.GEOMETRY)
WORTH = tl.constexpr(autograd.WORTH)
TABLE = tl.constexpr(autograd.TABLE)

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(float("-inf"))


class Bias(NamedTuple):
    """The data of all kinds of bias; each kind reads its part."""

    barrier: tl.tensor
    exponent: tl.tensor
    epsilon: tl.tensor
    plateaus: tl.tensor
    falls: tl.tensor
    table: tl.tensor
    table_stride: tl.tensor
    table_length: tl.tensor
    level_until: tl.tensor
    slopes: tl.tensor


class KeyBias(NamedTuple):
    """What is added to every pair of a key, of one head: sums of two numbers, in base 2.

    Relative to a row's own key, so that float32 holds it wherever the row stands in the text.
    """

    high: tl.tensor
    """Pointers to those of key 0; None: nothing is added."""
    low: tl.tensor
    own_high: tl.tensor
    """Of each row's own key."""
    own_low: tl.tensor


class Plateau(NamedTuple):
    """The distance where the gate of one regime pair starts to fall, and 1 / the transition."""

    whole: tl.tensor
    fraction: tl.tensor
    inverse: tl.tensor


@triton.jit
def take_plateau(plateaus, falls, label, c, CLASSES: tl.constexpr, BIAS: tl.constexpr):
    """The geometry of a (label, class), if the bias uses it."""
    if BIAS == GEOMETRY:
        return load_plateau(plateaus, falls, label * CLASSES + c)
    else:
        return Plateau(whole=0, fraction=0.0, inverse=0.0)


@triton.jit
def load_plateau(plateaus, falls, pair):
    """The geometry of one pair."""
    return Plateau(
        whole=tl.load(plateaus + pair),
        fraction=tl.load(falls + pair * 2),
        inverse=tl.load(falls + pair * 2 + 1),
    )


@triton.jit
def take_key_bias(high, low, line, rows, num_queries, num_keys):
    """The bias of the keys of one head, whose numbers start at `line`, for rows of that head."""
    if high is None:
        return KeyBias(high=None, low=None, own_high=0.0, own_low=0.0)
    else:
        own = tl.minimum(tl.maximum(rows.token + num_keys - num_queries, 0), num_keys - 1)
        return KeyBias(
            high=high + line,
            low=low + line,
            own_high=tl.load(high + line + own, mask=rows.live, other=0.0),
            own_low=tl.load(low + line + own, mask=rows.live, other=0.0),
        )


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
    """Turns a block over tokens into one over rows."""
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
    """-log2 of one regime pair's gate; the barrier is in base 2."""
    # Subtract integers first, because float32 cannot hold the fraction of a far plateau.
    beyond = (distance - plateau.whole).to(tl.float32) - plateau.fraction
    progress = tl.minimum(tl.maximum(beyond * plateau.inverse, 0.0), 1.0)
    if SQUARE:
        return barrier * progress * progress
    else:
        return barrier * tl.exp2(exponent * tl.log2(progress))


@triton.jit
def is_level(tokens, keys, bias):
    """The table index of the nearest pair of a block, and whether the table is constant from there
    to the farthest pair.
    """
    nearest = tl.minimum(tl.maximum(tokens.first - keys.last, 0), bias.table_length - 1)
    return nearest, tl.load(bias.level_until + nearest) >= tokens.last - keys.first


@triton.jit
def gate_places(tokens, keys, bias, KEYS_FIRST: tl.constexpr):
    """Table indices of the gates of all pairs, of the nearest pair, and whether all are equal.

    Without a table (its length is then 1) these are the distances, and 0.
    """
    nearest, level = is_level(tokens, keys, bias)
    distance = over_rows(tokens.position, KEYS_FIRST) - over_keys(keys.position, KEYS_FIRST)
    distance = tl.maximum(distance, 0)
    if bias.table is not None:
        distance = tl.minimum(distance, bias.table_length - 1)
    return distance, nearest, level


@triton.jit
def take_gates(pair, at, bias, SQUARE: tl.constexpr):
    """The gates of one regime pair at the indices from `gate_places`."""
    if bias.table is not None:
        return tl.load(bias.table + pair * bias.table_length + at)
    else:
        plateau = load_plateau(bias.plateaus, bias.falls, pair)
        return tl.exp2(-fall(at, plateau, bias.barrier, bias.exponent, SQUARE))


@triton.jit
def make_logits(
    product, rows, tokens, keys, lo, hi, factor, cap, plateau, bias, of_key,
    EDGE: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr, SQUARE: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Turns products q·k into logits in base 2; also returns the derivative of the cap.

    Pairs are masked, and gates of one regime pair differ from 1, only at an EDGE.
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
            # This also applies to an infinite logit, because such a pair does not exist.
            score = tl.where(added == NEVER, NEVER, score + added)
    if of_key.high is not None:
        high = tl.load(of_key.high + keys.token, mask=keys.live, other=0.0)
        low = tl.load(of_key.low + keys.token, mask=keys.live, other=0.0)
        high = over_keys(high, KEYS_FIRST) - over_rows(of_key.own_high, KEYS_FIRST)
        low = over_keys(low, KEYS_FIRST) - over_rows(of_key.own_low, KEYS_FIRST)
        score += high + low
    if EDGE:
        if BIAS == GEOMETRY:
            score -= fall(distance, plateau, bias.barrier, bias.exponent, SQUARE)
        place = over_keys(keys.place, KEYS_FIRST)
        inside = (place >= over_rows(lo, KEYS_FIRST)) & (place < over_rows(hi, KEYS_FIRST))
        score = tl.where(inside & over_keys(keys.live, KEYS_FIRST), score, NEVER)
    return score, slope


@triton.jit
def at_least(worth, epsilon):
    """The worth, at least epsilon; NaN propagates."""
    return tl.maximum(worth, epsilon, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def mix_gates(
    tokens, keys, bias, SQUARE: tl.constexpr, REGIMES: tl.constexpr, COLUMNS: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """The worth sum_mn pi_q[m] gate[m][n][d] pi_k[n] of each (token, key).

    If all gates of the block are equal, they are numbers, and the block is a sum of outer products.
    """
    at, nearest, level = gate_places(tokens, keys, bias, KEYS_FIRST)
    worth = tl.zeros(at.shape, tl.float32)
    if level:
        for n in tl.static_range(COLUMNS):
            mixed = tl.zeros(tokens.position.shape, tl.float32)
            for m in tl.static_range(REGIMES):
                gate = take_gates(m * COLUMNS + n, nearest, bias, SQUARE)
                mixed += gate * tl.load(tokens.routing + m, mask=tokens.live, other=0.0)
            share_k = tl.load(keys.routing + n, mask=keys.live, other=0.0)
            worth += over_rows(mixed, KEYS_FIRST) * over_keys(share_k, KEYS_FIRST)
    else:
        for n in tl.static_range(COLUMNS):
            blend = tl.zeros(at.shape, tl.float32)
            for m in tl.static_range(REGIMES):
                gates = take_gates(m * COLUMNS + n, at, bias, SQUARE)
                share_q = tl.load(tokens.routing + m, mask=tokens.live, other=0.0)
                blend += gates * over_rows(share_q, KEYS_FIRST)
            share_k = tl.load(keys.routing + n, mask=keys.live, other=0.0)
            worth += blend * over_keys(share_k, KEYS_FIRST)
    return worth
