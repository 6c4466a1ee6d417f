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


def mosar(case: Case) -> Answer:
    """Each head with the routing of its group; groups that share a key head read the same keys."""
    q, k = rotated(case)
    config, heads = case.geometry.config, case.q.shape[2]
    groups = config.routing_groups
    copies = max(1, groups // k.shape[2])
    query = case.geometry.query_router(q)
    key = case.geometry.key_router(k.repeat_interleave(copies, dim=2))
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

    return pairwise(bias, rotated)(case)


LAWS: dict[str, Callable[[Case], Answer]] = {
    "rope": pairwise(no_bias, rotated),
    "p-rope": pairwise(no_bias, rotated),
    "nope": pairwise(no_bias, plain),
    "alibi": pairwise(alibi, plain),
    "fixed": pairwise(one_regime, rotated),
    "rope-mask": pairwise(one_window, rotated),
    "mosar": mosar,
    "xpos": pairwise(no_bias, faded),
    "hope-high": pairwise(no_bias, slow_ones_stand),
    "t5": pairwise(t5, plain),
    "kerple": pairwise(kerple, plain),
}
"""By the name of the geometry."""
