"""The law of each geometry: what it must compute, pair by pair, in float64.

A law says what is added to the score of query i and key j, or that i does not read j. It shares no
code with the geometry but its parameters. A geometry whose entries are no tokens gives a whole
`Answer` of its own. A new geometry adds one line to `LAWS`.

Shapes: B batch, H query heads, T tokens, D head dim, C hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from core.test_positional import rotate_by_definition
from mosar.core.config import MoSARConfig
from mosar.core.positional import alibi_slopes
from mosar.core.regimes import RegimeKernel, support_reach
from mosar.geometries import Geometry
from mosar.geometries.block_selection import draw
from mosar.geometries.reformer import hash_rotations

SCALE = 0.3


class Case(NamedTuple):
    """What a geometry is given: q [B, T, H, D], k and v as the projections give them."""

    geometry: Geometry
    q: Tensor
    k: Tensor
    v: Tensor
    hidden: Tensor
    """[B, T, C]."""
    softcap: float | None
    routing: str


class Answer(NamedTuple):
    out: Tensor
    """[B, T, H, D]."""
    pairs: float
    """Read by a head in all rows, mean over the heads."""


# What is added to the score, a number or [B, H] (-inf: that head does not read it); None: no head.
Bias = Callable[[Case, int, int], "float | Tensor | None"]


def pairwise(bias: Bias, place: Callable[[Case], tuple[Tensor, Tensor]]) -> Callable[..., Answer]:
    """The law of a bias on pairs of tokens."""

    def law(case: Case) -> Answer:
        scores = capped_scores(*place(case), case.softcap)
        logits = torch.full_like(scores, -torch.inf)
        for i in range(scores.shape[2]):
            for j in range(i + 1):
                added = bias(case, i, j)
                if added is not None:
                    logits[:, :, i, j] = scores[:, :, i, j] + added
        return Answer(weigh(logits, case.v), int((logits > -torch.inf).sum()) / scores.shape[1])

    return law


def capped_scores(q: Tensor, k: Tensor, softcap: float | None) -> Tensor:
    """cap(scale q·k), [B, H, T, S]; head h reads the keys of head h // (H / K)."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = SCALE * torch.einsum("bthd,bshd->bhts", q, k)
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def weigh(logits: Tensor, v: Tensor) -> Tensor:
    """softmax(logits) v for logits [B, H, T, S] and v [B, S, K, D] -> [B, T, H, D]."""
    v = v.repeat_interleave(logits.shape[1] // v.shape[2], dim=2)
    return torch.einsum("bhts,bshd->bthd", torch.softmax(logits, dim=-1), v)


def plain(case: Case) -> tuple[Tensor, Tensor]:
    return case.q, case.k


def rotated(case: Case) -> tuple[Tensor, Tensor]:
    attention, half = case.geometry.attention, case.q.shape[-1] // 2
    at, fraction = torch.arange(case.q.shape[1])[None], attention.rope_fraction
    turned = int(fraction * half + 1e-9)
    q, k = (
        rotate_by_definition(x, at, theta=attention.rope_theta, rotated=turned)
        for x in (case.q, case.k)
    )
    return q, k


def no_bias(case: Case, i: int, j: int) -> float:
    return 0.0


def alibi(case: Case, i: int, j: int) -> Tensor:
    return -(i - j) * torch.tensor(alibi_slopes(case.q.shape[2]), dtype=torch.float64)


def faded(case: Case) -> tuple[Tensor, Tensor]:
    """Rotated, and divided by what the other side is multiplied with."""
    own, half, at = case.geometry.own, case.q.shape[-1] // 2, torch.arange(case.q.shape[1])
    zeta = (torch.arange(half).double() / half + own.gamma) / (1 + own.gamma)
    fade = zeta ** (at[:, None] / (own.base * case.geometry.shape.max_length))
    fade = fade.repeat(1, 2)[None, :, None]
    q, k = rotated(case)
    return q * fade, k / fade


def slow_ones_stand(case: Case) -> tuple[Tensor, Tensor]:
    half, length = case.q.shape[-1] // 2, case.geometry.shape.max_length
    at = torch.arange(case.q.shape[1])[None]
    turned = sum(2 * math.pi * 10000 ** (i / half) <= length for i in range(half))
    q, k = (rotate_by_definition(x, at, rotated=turned) for x in (case.q, case.k))
    return q, k


def t5(case: Case, i: int, j: int) -> Tensor:
    table = case.geometry.table.reshape(case.q.shape[2], 32)
    d = i - j
    bucket = d if d < 16 else 16 + int(16 * math.log(d / 16) / math.log(8))
    return table[:, bucket]


def kerple(case: Case, i: int, j: int) -> Tensor:
    rate, power = case.geometry.rate.clamp_min(0.01), case.geometry.power.clamp(0.01, 2)
    return -power * (1 + rate * (i - j)).log()


def fox(case: Case, i: int, j: int) -> Tensor:
    return kept(case, i, j, case.geometry.weight, case.geometry.bias)


def kept(case: Case, i: int, j: int, weight: Tensor, bias: Tensor) -> Tensor:
    """ln of what is not forgotten of token j at token i."""
    return torch.sigmoid(case.hidden[:, j + 1 : i + 1] @ weight.T + bias).log().sum(dim=1)


def ramp(case: Case, span: Tensor, distance: int) -> Tensor:
    length = case.geometry.own.ramp
    return ((length + span - distance) / length).clamp(0, 1).log()


def adaptive_span(case: Case, i: int, j: int) -> Tensor:
    geometry = case.geometry
    return ramp(case, geometry.shape.max_length * geometry.span.clamp(0, 1), i - j)


def dynamic_span(case: Case, i: int, j: int) -> Tensor:
    geometry = case.geometry
    share = torch.sigmoid(case.hidden[:, i] @ geometry.weight.T + geometry.bias)
    return ramp(case, geometry.shape.max_length * share, i - j)


@cache
def gates(config: MoSARConfig) -> Tensor:
    """g_mn(d) of distances up to 63, [64, R, R]."""
    return RegimeKernel(config)(torch.arange(64), torch.float64)


def one_regime(case: Case, i: int, j: int) -> Tensor | None:
    config, regime = case.geometry.config, case.geometry.regime
    if case.routing == "sparse" and i - j > config.regimes[regime].reach:
        return None
    return gates(config)[i - j, regime, regime].log()


def one_window(case: Case, i: int, j: int) -> float | None:
    reach = case.geometry.config.regimes[case.geometry.regime].reach
    return 0.0 if i - j <= reach else None


def mosar_forget(case: Case) -> Answer:
    """The gates of hard regimes, times what is not forgotten."""
    if case.geometry.own.gates == "alibi":
        return mosar(case, alibi)
    gates = case.geometry.forget_weight, case.geometry.forget_bias
    return mosar(case, lambda case, i, j: kept(case, i, j, *gates))


def mosar(case: Case, also: Callable[[Case, int, int], Tensor | float] = no_bias) -> Answer:
    """Each head with the routing of its group; also: what is added to the bias."""
    q, k = rotated(case)
    config, heads = case.geometry.config, case.q.shape[2]
    groups = config.routing_groups
    query, key = case.geometry.query_router(q), case.geometry.key_router(k)
    reach, hard = support_reach(config), case.geometry.executed(case.routing) == "sparse"

    def of_heads(x: Tensor) -> Tensor:
        x = x if groups > 1 else x[:, None]
        return x.repeat_interleave(heads // groups, dim=1)

    pi_q, pi_k, label_q, label_k = map(
        of_heads, (query.probabilities, key.probabilities, query.labels, key.labels)
    )

    def bias(case: Case, i: int, j: int) -> Tensor:
        gate = gates(config)[i - j]
        if not hard:
            return (pi_q[:, :, i] @ gate * pi_k[:, :, j]).sum(dim=-1).log()
        labels = label_q[:, :, i], label_k[:, :, j]
        return torch.where(i - j <= reach[labels], gate[labels].log(), -torch.inf)

    def total(case: Case, i: int, j: int) -> Tensor:
        return bias(case, i, j) + also(case, i, j)

    return pairwise(total, rotated)(case)


def switch(case: Case) -> Answer:
    """A window of N/4 or everything, by the query alone."""
    routed = case.geometry.query_router(rotated(case)[0])

    def bias(case: Case, i: int, j: int) -> Tensor:
        full = routed.probabilities[:, i, 1:]
        if i - j <= case.geometry.shape.max_length / 4:
            return torch.zeros_like(full)
        if case.routing == "soft":
            return (full + (1 - full) * math.exp(-6)).log()
        return torch.where(routed.labels[:, i, None] == 1, 0.0, -torch.inf).double()

    return pairwise(bias, rotated)(case)


def gemma3(case: Case, i: int, j: int) -> float | None:
    shape = case.geometry.shape
    return 0.0 if shape.layer % 6 == 5 or i - j <= shape.max_length // 4 else None


def longformer(case: Case, i: int, j: int) -> float | None:
    """At N = 64."""
    window = (2, 4, 4, 8, 14, 14)[case.geometry.shape.layer]
    return 0.0 if i - j <= window or j < 2 else None


def bigbird(case: Case, i: int, j: int) -> Tensor | None:
    """At N = 64: blocks of 2."""
    own, block, layer = i // 2, j // 2, case.geometry.shape.layer
    if block >= own - 2 or block < 2:
        return torch.zeros(6, dtype=torch.float64)
    read = [0.0 if block in random_blocks(layer, head, own) else -torch.inf for head in (0, 1)]
    return torch.tensor(read, dtype=torch.float64).repeat_interleave(3)


@cache
def random_blocks(layer: int, head: int, own: int) -> list[int]:
    between = sorted(range(2, own - 2), key=lambda other: -draw(layer, head, own, other))
    return between[:3]


def moba(case: Case) -> Answer:
    """At N = 64: three blocks of 4."""
    q, k = rotated(case)
    means = k[:, : k.shape[1] // 4 * 4].unflatten(1, (-1, 4)).mean(dim=2)
    gates = torch.einsum("bthd,bghd->bhtg", q, means.repeat_interleave(3, dim=2))

    def bias(case: Case, i: int, j: int) -> Tensor | None:
        if j // 4 == i // 4:
            return torch.zeros(6, dtype=torch.float64)
        past = gates[:, :, i, : i // 4]
        better = (past > past[..., j // 4, None]).sum(dim=-1)
        return torch.where(better < 2, 0.0, -torch.inf).double()

    return pairwise(bias, rotated)(case)


def dsa(case: Case) -> Answer:
    """At N = 64: the 16 best keys."""
    geometry, x = case.geometry, case.hidden
    at = torch.arange(x.shape[1])[None]
    query, key = (
        torch.cat([rotate_by_definition(y[..., :16], at), y[..., 16:]], dim=-1)
        for y in (
            geometry.index_query(x).unflatten(-1, (2, 32)),
            geometry.index_key(x)[:, :, None],
        )
    )
    match = torch.einsum("bthe,bse->bhts", query, key[:, :, 0]).clamp_min(0)
    index = torch.einsum("bth,bhts->bts", geometry.index_weight(x), match)

    def bias(case: Case, i: int, j: int) -> Tensor:
        read = []
        for row in index[:, i].tolist():
            order = sorted(range(i + 1), key=lambda other: (-row[other], -other))
            read.append(0.0 if j in order[:16] else -torch.inf)
        return torch.tensor(read, dtype=torch.float64)[:, None]

    return pairwise(bias, rotated)(case)


def linformer(case: Case) -> Answer:
    """At N = 64: blocks of 4, each read as one mixture."""
    q, k = rotated(case)
    out, read = torch.zeros_like(case.q), 0
    for i in range(q.shape[1]):
        keys, values = [], []
        for block in range(i // 4):
            tokens = slice(4 * block, 4 * block + 4)
            mixed = torch.einsum("rt,btkd->brkd", case.geometry.key_mixture, case.k[:, tokens])
            end = torch.full((1, mixed.shape[1]), 4 * block + 3)
            keys.append(rotate_by_definition(mixed, end))
            values.append(
                torch.einsum("rt,btkd->brkd", case.geometry.value_mixture, case.v[:, tokens])
            )
        own = slice(i // 4 * 4, i + 1)
        entries = torch.cat([*keys, k[:, own]], dim=1)
        logits = capped_scores(q[:, i : i + 1], entries, case.softcap)
        out[:, i : i + 1] = weigh(logits, torch.cat([*values, case.v[:, own]], dim=1))
        read += 2 * entries.shape[1]
    return Answer(out, read)


def nsa(case: Case) -> Answer:
    """At N = 64: an entry of 2 tokens from each token on, 6 blocks of 2, a window of 4."""
    q, k = rotated(case)
    geometry, length = case.geometry, q.shape[1]
    gates = torch.sigmoid(geometry.gate(case.hidden)).unflatten(-1, (3, 6))

    def entries(x: Tensor, weights: Tensor, linear: Tensor) -> Tensor:
        each = (
            torch.einsum("t,btkd,ed->bke", weights, x[:, w : w + 2], linear)
            for w in range(length - 1)
        )
        return torch.stack(list(each), dim=1)

    keys = entries(k, geometry.key_weights, geometry.key_map)
    values = entries(case.v, geometry.value_weights, geometry.value_map)
    scores = capped_scores(q, k, case.softcap)
    out, read = torch.zeros_like(case.q), 0
    for i in range(length):
        # Entry w ends with token w + 1.
        compressed = torch.zeros_like(out[:, 0])
        weights = torch.zeros(2, 2, 0)
        if i:
            logits = capped_scores(q[:, i : i + 1], keys[:, :i], case.softcap)
            compressed = weigh(logits, values[:, :i])[:, 0]
            weights = torch.softmax(logits, dim=-1)[:, :, 0].unflatten(1, (2, 3)).sum(dim=2)
        selected, window = torch.full((2, *scores[:, :, i : i + 1].shape), -torch.inf).double()
        for row in range(2):
            for head in range(6):
                chosen = nsa_blocks(i // 2, weights[row, head // 3].tolist())
                for j in range(i + 1):
                    if j // 2 in chosen:
                        selected[row, head, 0, j] = scores[row, head, i, j]
        window[..., max(0, i - 3) : i + 1] = scores[:, :, i : i + 1, max(0, i - 3) : i + 1]
        branches = [compressed, *(weigh(logits, case.v)[:, 0] for logits in (selected, window))]
        out[:, i] = sum(gates[:, i, n, :, None] * branches[n] for n in range(3))
        tokens = sum(int((logits > -torch.inf).sum()) for logits in (selected, window))
        read += 2 * i + tokens / 6
    # More entries than there are pairs count as all of them.
    return Answer(out, min(read, length * (length + 1)))


def nsa_blocks(own: int, weights: list[float]) -> set[int]:
    """The blocks that a query reads whose own is this; weights of the entries of its group."""
    score = [0.0] * (own + 1)
    for w, weight in enumerate(weights):
        for token in (w, w + 1):
            score[token // 2] += weight
    forced = {0, own - 1, own} & set(range(own + 1))
    rest = sorted(set(range(own)) - forced, key=lambda block: -score[block])
    return forced | set(rest[: 6 - len(forced)])


def reformer(case: Case) -> Answer:
    unit = case.q / case.q.norm(dim=-1, keepdim=True)
    rotations = hash_rotations(case.geometry.shape.layer, 1, 8, 8)[0]
    angles = torch.einsum("bthd,nd->bthn", unit, rotations)
    buckets = torch.cat([angles, -angles], dim=-1).argmax(dim=-1)
    at = torch.arange(case.q.shape[1])[None]
    scores = capped_scores(
        rotate_by_definition(case.q, at), rotate_by_definition(unit, at), case.softcap
    )
    logits = torch.full_like(scores, -torch.inf)
    for i in range(scores.shape[2]):
        for j in range(i):
            same = buckets[:, i] == buckets[:, j]
            logits[:, :, i, j] = torch.where(same, scores[:, :, i, j], -torch.inf)
        logits[:, :, i, i] = -5e4
    return Answer(weigh(logits, case.v), int((logits > -torch.inf).sum()) / 6)


def selective(case: Case) -> Answer:
    scores = capped_scores(*rotated(case), case.softcap)
    lowered = torch.zeros_like(scores[:, 0, 0])

    def bias(case: Case, i: int, j: int) -> Tensor:
        if j == 0 and i:
            # Query i - 1 has been read; it lowers neither itself nor the first token.
            lowered[:, 1 : i - 1] += scores[:, 0, i - 1, 1 : i - 1].clamp_min(0)
        return -lowered[:, j, None]

    return pairwise(bias, rotated)(case)


def cope(case: Case) -> Answer:
    """At N = 64: 8 positions."""
    scores = capped_scores(case.q, case.k, case.softcap)
    known = case.q @ case.geometry.embedding.T

    def bias(case: Case, i: int, j: int) -> Tensor:
        count = torch.sigmoid(scores[:, :, i, j : i + 1]).sum(dim=-1).clamp_max(7.0)
        low, high = count.floor().long(), count.ceil().long()
        below, above = (known[:, i].gather(-1, at[..., None])[..., 0] for at in (low, high))
        return below + (count - low) * (above - below)

    return pairwise(bias, plain)(case)


def inkling(case: Case, i: int, j: int) -> Tensor:
    mixture = case.geometry.mixture(case.hidden[:, i]).unflatten(-1, (6, 16))
    return mixture @ case.geometry.profiles[:, i - j]


def hyperbolic(case: Case) -> Answer:
    """As boosts: cosh and sinh of the angle between the two, damped."""
    half = case.q.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half).double() / half)
    unit = math.log(2) / (case.geometry.shape.max_length / 4) / 0.1
    k = case.k.repeat_interleave(3, dim=2)
    logits = torch.full((2, 6, *2 * case.q.shape[1:2]), -torch.inf, dtype=torch.float64)
    for i in range(logits.shape[2]):
        for j in range(i + 1):
            d = (i - j) * unit
            x, y = k[:, j, :, :half], k[:, j, :, half:]
            cosh, sinh = torch.cosh(frequency * d), torch.sinh(frequency * d)
            boosted = torch.cat([cosh * x + sinh * y, sinh * x + cosh * y], dim=-1)
            score = SCALE * math.exp(-1.1 * d) * (case.q[:, i] * boosted).sum(dim=-1)
            cap = case.softcap
            logits[:, :, i, j] = score if cap is None else cap * torch.tanh(score / cap)
    return Answer(weigh(logits, case.v), int((logits > -torch.inf).sum()) / 6)


LAWS: dict[str, Callable[[Case], Answer]] = {
    "rope": pairwise(no_bias, rotated),
    "p-rope": pairwise(no_bias, rotated),
    "nope": pairwise(no_bias, plain),
    "alibi": pairwise(alibi, plain),
    "fixed": pairwise(one_regime, rotated),
    "rope-mask": pairwise(one_window, rotated),
    "mosar": mosar,
    "mosar-forget": mosar_forget,
    "xpos": pairwise(no_bias, faded),
    "hope-high": pairwise(no_bias, slow_ones_stand),
    "t5": pairwise(t5, plain),
    "kerple": pairwise(kerple, plain),
    "fox": pairwise(fox, plain),
    "adaptive-span": pairwise(adaptive_span, rotated),
    "dynamic-span": pairwise(dynamic_span, rotated),
    "switch": switch,
    "gemma3": pairwise(gemma3, rotated),
    "longformer": pairwise(longformer, rotated),
    "bigbird": pairwise(bigbird, rotated),
    "moba": moba,
    "dsa": dsa,
    "nsa": nsa,
    "linformer": linformer,
    "reformer": reformer,
    "selective": selective,
    "cope": cope,
    "inkling": pairwise(inkling, plain),
    "hope-hyperbolic": hyperbolic,
}
"""By the name of the geometry."""
