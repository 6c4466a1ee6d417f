"""The attention problems that are measured, and the calls that solve them.

    sparse           forward, only the pairs of the support
    sparse-train     forward and backward of the same: dq, dk, dv
    soft-train       forward and backward of soft routing: dq, dk, dv, dpi_q, dpi_k
    distance-train   forward and backward of `distance_attention` with a soft-cap and no bias

A call returns (out,) or (out, dq, dk, dv, ...). Everything is drawn from the case's seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mosar.attention import distance_attention, mosar_attention
from mosar.bench.labels import make_labels
from mosar.core.config import MoSARConfig
from mosar.core.hard_domain import build_hard_domain
from mosar.core.routers import forced_routing

MODES = ("sparse", "sparse-train", "soft-train", "distance-train")
_SOFTCAP = 50.0


class Shape(NamedTuple):
    """Heads of queries, heads of keys, head dim."""

    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """ "8x1x256": 8 query heads, 1 key/value head, head dim 256."""
        parts = text.split("x")
        if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
            raise ValueError(f"a shape is HEADSxKV_HEADSxHEAD_DIM like 8x1x256, got {text!r}")
        shape = cls(*map(int, parts))
        if shape.heads % shape.kv_heads:
            raise ValueError(f"heads must be a multiple of the key/value heads, got {text!r}")
        return shape

    def __str__(self) -> str:
        return "x".join(map(str, self))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the benchmark."""

    mode: str
    shape: Shape
    length: int
    labels: str = "independent"
    seed: int = 0
    config: MoSARConfig = field(default_factory=MoSARConfig)
    device: str = "cpu"
    dtype: str = "float32"
    """Of q, k and v."""

    def __str__(self) -> str:
        return f"{self.mode} {self.shape}, n = {self.length}"

    def record_fields(self) -> dict[str, Any]:
        """Fields that every record has; a file without its folder."""
        labels = Path(self.labels).name if self.is_sparse else "none"
        return {"length": self.length, "labels": labels, "seed": self.seed}

    @property
    def trains(self) -> bool:
        return self.mode.endswith("-train")

    @property
    def is_sparse(self) -> bool:
        """Whether labels are read and pairs skipped."""
        return self.mode.startswith("sparse")


@dataclass(frozen=True)
class Problem:
    """The tensors of a case."""

    case: Case
    q: Tensor
    """[1, Hq, T, D]."""
    k: Tensor
    v: Tensor
    pi_q: Tensor
    """[1, T, R]: one-hot, soft where the mode is, all global where it reads none."""
    pi_k: Tensor
    dout: Tensor
    """The gradient of the output."""
    query_positions: Tensor | None = None
    """[1, T]; None: the queries are all tokens."""

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that we compute gradients of."""
        routed = (self.pi_q, self.pi_k) if self.case.mode == "soft-train" else ()
        return (self.q, self.k, self.v, *routed)

    @property
    def labels(self) -> tuple[Tensor, Tensor]:
        """Of queries and keys, [1, tokens] each."""
        return self.pi_q.argmax(dim=-1), self.pi_k.argmax(dim=-1)


def build_problem(case: Case, num_queries: int | None = None) -> Problem:
    """Queries for all tokens, or in mode "sparse" for the last ones."""
    generator = torch.Generator().manual_seed(case.seed)
    shape, length = case.shape, case.length
    start = 0 if num_queries is None else length - num_queries

    def normal(heads: int, length: int) -> Tensor:
        drawn = torch.randn(1, heads, length, shape.head_dim, generator=generator)
        return drawn.to(case.device, getattr(torch, case.dtype))

    q = normal(shape.heads, length - start)
    k, v = normal(shape.kv_heads, length), normal(shape.kv_heads, length)
    regimes = case.config.num_regimes
    if case.is_sparse:
        labels = make_labels(case.labels, length, case.seed, case.config)
        pi_q, pi_k = (F.one_hot(x, regimes).float()[None] for x in labels)
    elif case.mode == "soft-train":
        logits = 2 * torch.randn(2, 1, length, regimes, generator=generator)
        pi_q, pi_k = torch.softmax(logits, dim=-1).unbind()
    else:
        pi_q = pi_k = forced_routing(case.config, case.config.global_index, 1, length)
    pi_q, pi_k = pi_q[:, start:].to(case.device), pi_k.to(case.device)
    dout = normal(shape.heads, length) if case.trains else q
    positions = torch.arange(start, length, device=case.device)[None] if start else None
    problem = Problem(case, q, k, v, pi_q, pi_k, dout, positions)
    if case.trains:
        for leaf in problem.leaves:
            leaf.requires_grad_()
    return problem


def attend(problem: Problem, impl: str = "auto") -> Tensor:
    """The measured result of the mode, from one of our implementations."""
    q, k, v, at = problem.q, problem.k, problem.v, problem.query_positions
    if problem.case.mode == "distance-train":
        out = distance_attention(q, k, v, softcap=_SOFTCAP, query_positions=at, impl=impl)
    else:
        routing = "soft" if problem.case.mode == "soft-train" else "sparse"
        config, pi = problem.case.config, (problem.pi_q, problem.pi_k)
        out = mosar_attention(q, k, v, *pi, config, routing=routing, query_positions=at, impl=impl)
    assert isinstance(out, Tensor)
    return out


def attend_dense(problem: Problem) -> Tensor:
    """torch's plain causal attention: no geometry, no soft-cap."""
    shape = problem.case.shape
    return F.scaled_dot_product_attention(
        problem.q, problem.k, problem.v, is_causal=True, enable_gqa=shape.heads != shape.kv_heads
    )


def _attend_flash(problem: Problem) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return attend_dense(problem)


def solve(
    problem: Problem, forward: Callable[[Problem], Tensor], leaves: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The forward pass and, if the mode trains, the gradients of `leaves`."""
    if not problem.case.trains:
        with torch.no_grad():
            return (forward(problem),)
    out = forward(problem)
    return (out.detach(), *torch.autograd.grad(out, leaves, problem.dout))


def call_of(problem: Problem, competitor: str) -> Callable[[], tuple[Tensor, ...]]:
    """The timed call of "sdpa", "flash", "reference" or "ours"."""
    if competitor in ("sdpa", "flash"):
        forward = attend_dense if competitor == "sdpa" else _attend_flash
        return lambda: solve(problem, forward, problem.leaves[:3])
    impl = {"ours": "auto", "reference": "reference"}[competitor]
    return lambda: solve(problem, lambda given: attend(given, impl), problem.leaves)


def prepare_call(case: Case, competitor: str) -> Callable[[], tuple[Tensor, ...]]:
    return call_of(build_problem(case), competitor)


def count_pairs(problem: Problem) -> tuple[int, int]:
    """Pairs that are evaluated, and all causal ones."""
    length = problem.case.length
    causal = length * (length + 1) // 2
    if not problem.case.is_sparse:
        return causal, causal
    config, at = problem.case.config, problem.query_positions
    domain = build_hard_domain(*problem.labels, config, query_positions=at, materialize=False)
    return domain.count, domain.causal_count
