"""Random but reproducible calls of the operators, each described by a few plain numbers.

A `Case` prints as one line that can be copied into a test, and shrinks well; all its tensors follow
from it, each from a random stream of its own, so that changing one trait leaves the others alone.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from core import outsider
from mosar import MoSARConfig, Regime, distance_attention, mosar_attention

ROUTINGS = ("soft", "top1", "sparse")
POSITIONS = ("default", "counted", "gaps")
PADDINGS = ("none", "left", "right", "holes")
SEGMENTS = ("none", "packed", "interleaved")
PROBABILITIES = ("mixed", "one-hot", "tied")
# All tokens of the first regime, all of the last, and all of the first but one of the last.
FORCED = ("first", "last", "lone")
DISTANCE_BIASES = ("none", "log_gate", "log_gate_per_head", "slopes", "both")
BARRIERS = st.sampled_from((6.0, 2.0, 0.5))
# Up to the largest whose e^-B, and an epsilon below it, are normal float32 numbers.
HIGH_BARRIERS = st.one_of(st.sampled_from((87.0, 80.0, 60.0)), st.floats(10.0, 87.0))
# (key/value heads, query heads per key/value head)
HEADS = ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (4, 1), (2, 3), (1, 8))

# Every gate of this geometry moves within a dozen positions.
SMALL = MoSARConfig(
    max_length=8,
    regimes=(Regime("S", 1.5, 0.75), Regime("M", 4, 0.5), Regime("G", 8, 1.0)),
    router_hidden=5,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `mosar_attention`, or of `distance_attention` with the same placement."""

    config: MoSARConfig = SMALL
    routing: str = "soft"
    batch: int = 1
    kv_heads: int = 1
    heads_per_kv: int = 1
    num_queries: int = 6
    num_keys: int = 6
    head_dim: int = 4
    scale: float | None = None
    softcap: float | None = None
    window: float | None = None
    positions: str = "default"
    """"counted": valid keys count up within their segment; "gaps": both sides free, some equal."""
    padding: str = "none"
    segments: str = "none"
    probabilities: str = "mixed"
    group_axis: bool = False
    """Whether a single routing group is spelled out as a dimension."""
    spread: float = 0.0
    """Where positive, what q·k of every query is spread over, beside its random part."""
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def with_(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.heads_per_kv

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, pi_q, pi_k."""
        return self.q, self.k, self.v, self.pi_q, self.pi_k

    @property
    def placement(self) -> dict[str, Any]:
        """The keywords that say which pairs exist."""
        return {
            "window": self.window,
            "query_positions": self.query_positions,
            "key_positions": self.key_positions,
            "key_valid": self.key_valid,
            "segment_ids": self.segment_ids,
        }

    @property
    def options(self) -> dict[str, Any]:
        """Every keyword both operators take."""
        return {"scale": self.scale, "softcap": self.softcap, **self.placement}

    @property
    def labels(self) -> tuple[Tensor, Tensor]:
        """The first largest entries of pi_q and pi_k."""
        return self.pi_q.argmax(dim=-1), self.pi_k.argmax(dim=-1)

    @cached_property
    def q(self) -> Tensor:
        shape = (self.batch, self.num_heads, self.num_queries, self.head_dim)
        q = self._normal("q", shape)
        if self.spread:
            q[..., 0] = 1.0
        return q.to(self.dtype)

    @cached_property
    def k(self) -> Tensor:
        k = self._normal("k", self._keys_shape)
        if self.spread:
            k[..., 0] = self.spread * torch.sigmoid(4 * k[..., 0])
        return k.to(self.dtype)

    @cached_property
    def v(self) -> Tensor:
        return self._normal("v", self._keys_shape).to(self.dtype)

    @cached_property
    def pi_q(self) -> Tensor:
        return self._routing("pi_q", self.num_queries)

    @cached_property
    def pi_k(self) -> Tensor:
        return self._routing("pi_k", self.num_keys)

    @cached_property
    def key_valid(self) -> Tensor | None:
        shape = (self.batch, self.num_keys)
        if self.padding == "none":
            return None
        if self.padding == "holes":
            return self._integers("padding", 0, 4, shape) > 0
        padded = self._integers("padding", 0, self.num_keys + 1, (self.batch, 1))
        valid = torch.arange(self.num_keys)[None] >= padded
        return valid if self.padding == "left" else valid.flip(1)

    @cached_property
    def segment_ids(self) -> Tensor | None:
        if self.segments == "none":
            return None
        ids = self._integers("segments", -1, 2, (self.batch, self.num_keys))
        return ids.sort(dim=1).values if self.segments == "packed" else ids

    @cached_property
    def key_positions(self) -> Tensor | None:
        if self.positions == "default":
            return None
        shape = (self.batch, self.num_keys)
        valid = torch.ones(shape, dtype=torch.bool) if self.key_valid is None else self.key_valid
        if self.positions == "gaps":
            positions = self._integers("gaps", 0, 4, shape).cumsum(dim=1)
            # A padded slot may hold anything, also what would be refused elsewhere.
            garbage = torch.tensor([-5, 10**9]).repeat(self.num_keys)[: self.num_keys]
            return torch.where(valid, positions, garbage)
        ids = torch.zeros(shape, dtype=torch.long) if self.segment_ids is None else self.segment_ids
        earlier = (ids[:, :, None] == ids[:, None, :]) & valid[:, None, :]
        return (earlier.tril().sum(dim=-1) - 1).clamp_min(0)

    @cached_property
    def query_positions(self) -> Tensor | None:
        if self.positions != "gaps":
            return None
        shape = (self.batch, self.num_queries)
        return self._integers("query_positions", 0, 2 * self.num_keys + 3, shape)

    def distance_bias(self, kind: str) -> dict[str, Tensor]:
        """log_gate and slopes for `distance_attention`, long enough for every distance."""
        bias = {}
        if kind.startswith("log_gate") or kind == "both":
            rows = self.num_heads if kind == "log_gate_per_head" else 1
            table = self._normal("log_gate", (rows, 2 * self.num_keys + 3))
            out = self._integers("log_gate_out", 0, 5, tuple(table.shape)) == 0
            bias["log_gate"] = table.masked_fill(out, -torch.inf)
        if kind in ("slopes", "both"):
            bias["slopes"] = self._normal("slopes", (self.num_heads,)).abs()
        return bias

    @property
    def _keys_shape(self) -> tuple[int, ...]:
        return (self.batch, self.kv_heads, self.num_keys, self.head_dim)

    def _stream(self, name: str) -> torch.Generator:
        # The generator takes 32 bits of its seed.
        return torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))

    def _normal(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self._stream(name), dtype=torch.float64)

    def _integers(self, name: str, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, generator=self._stream(name))

    def _routing(self, name: str, length: int) -> Tensor:
        groups, regimes = self.config.routing_groups, self.config.num_regimes
        group_axis = (groups,) if groups > 1 or self.group_axis else ()
        shape = (self.batch, *group_axis, length, regimes)
        if self.probabilities in FORCED:
            labels = torch.zeros(shape[:-1], dtype=torch.long)
            labels[..., length // 3 if self.probabilities == "lone" else slice(None)] = regimes - 1
            if self.probabilities == "first":
                labels.zero_()
            pi = F.one_hot(labels, regimes)
        elif self.probabilities == "tied":
            weights = self._integers(name, 1, 3, shape).double()
            pi = weights / weights.sum(dim=-1, keepdim=True)
        else:
            pi = torch.softmax(2 * self._normal(name, shape), dim=-1)
        if self.probabilities == "one-hot":
            pi = F.one_hot(pi.argmax(dim=-1), regimes)
        return pi.to(torch.float64 if self.dtype == torch.float64 else torch.float32)


@st.composite
def configs(
    draw: st.DrawFn,
    *,
    length: int = 12,
    kv_heads: int = 1,
    barriers: st.SearchStrategy[float] = BARRIERS,
) -> MoSARConfig:
    """Two to five regimes whose reaches are worth testing at this length."""
    barrier = draw(barriers)
    num_regimes = draw(st.integers(2, 5))
    unit = draw(st.sampled_from((1, 2, 3)))
    steps = draw(st.lists(st.integers(1, length), min_size=num_regimes, max_size=num_regimes))
    plateaus = draw(
        st.lists(
            st.sampled_from((1.0, 0.5, 0.75, 0.0, 1 / 3)),
            min_size=num_regimes,
            max_size=num_regimes,
        )
    )
    return MoSARConfig(
        max_length=length,
        regimes=tuple(
            Regime(f"R{index}", float(reach) / unit, plateau)
            for index, (reach, plateau) in enumerate(zip(np.cumsum(steps), plateaus, strict=True))
        ),
        barrier=barrier,
        epsilon=min(1e-6, 0.75 * math.exp(-barrier)),
        exponent=draw(st.sampled_from((2.0, 1.0, 3.0, 0.5))),
        floor=draw(st.sampled_from((1.0, 1.0, 0.25, 0.0))),
        composition=draw(st.sampled_from(("mean", "min", "max"))),
        routing_groups=draw(st.sampled_from([g for g in (1, 2, 3, 4) if kv_heads % g == 0])),
        num_sinks=draw(st.sampled_from((0, 1, 3))),
    )


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    routings: tuple[str, ...] = ROUTINGS,
    max_length: int = 12,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """Any call the operators' contract allows, up to `max_length` queries and keys."""
    kv_heads, heads_per_kv = draw(st.sampled_from(HEADS))
    positions = draw(st.sampled_from(POSITIONS))
    segments = draw(st.sampled_from(SEGMENTS))
    num_keys = draw(st.integers(1, max_length))
    placed_freely = positions == "gaps" and segments == "none"
    return Case(
        config=draw(configs(length=max_length, kv_heads=kv_heads)),
        routing=draw(st.sampled_from(routings)),
        batch=draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        heads_per_kv=heads_per_kv,
        num_queries=draw(st.integers(1, max_length if placed_freely else num_keys)),
        num_keys=num_keys,
        head_dim=draw(st.sampled_from((4, 1, 7))),
        scale=draw(st.sampled_from((None, 0.3, 2.0))),
        softcap=draw(st.sampled_from((None, 1.5, 50.0))),
        window=draw(st.one_of(st.none(), st.integers(0, max_length), st.just(3.5))),
        positions=positions,
        padding=draw(st.sampled_from(PADDINGS)),
        segments=segments,
        probabilities=draw(st.sampled_from(PROBABILITIES)),
        group_axis=draw(st.booleans()),
        dtype=dtype,
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def steep_cases(draw: st.DrawFn, *, max_length: int) -> Case:
    """Short reaches and high barriers, and scores that are as far apart as the gates."""
    case = draw(cases(dtype=torch.float32, max_length=max_length))
    config = draw(configs(length=4, kv_heads=case.kv_heads, barriers=HIGH_BARRIERS))
    return case.with_(config=config, spread=config.barrier, scale=1.0, softcap=None)


def geometry(config: MoSARConfig) -> dict[str, Any]:
    """A configuration's support, as the independent oracle takes it."""
    return {
        "regimes": [(regime.reach, regime.plateau) for regime in config.regimes],
        "composition": config.composition,
        "num_sinks": config.num_sinks,
    }


def arrays(options: dict[str, Any]) -> dict[str, Any]:
    """Options with tensors as numpy arrays."""
    return {
        name: value.numpy() if isinstance(value, Tensor) else value
        for name, value in options.items()
    }


def assert_agrees_with_outsider(case: Case, *, impl: str, atol: float) -> None:
    """Routed attention and its log-sum-exp are the independent oracle's."""
    output, lse = mosar_attention(
        *case.inputs,
        case.config,
        routing=case.routing,
        return_lse=True,
        impl=impl,
        **case.options,
    )
    exact_output, exact_lse = outsider.attention(
        *(tensor.double().numpy() for tensor in case.inputs),
        **geometry(case.config),
        barrier=case.config.barrier,
        exponent=case.config.exponent,
        floor=case.config.floor,
        epsilon=case.config.epsilon,
        routing=case.routing,
        **arrays(case.options),
    )
    assert_close(output, exact_output, atol)
    assert_close(lse, exact_lse, atol)


def assert_distance_agrees_with_outsider(case: Case, kind: str, *, impl: str, atol: float) -> None:
    """Attention with a distance bias, and its log-sum-exp, are the independent oracle's."""
    bias = case.distance_bias(kind)
    output, lse = distance_attention(
        case.q, case.k, case.v, return_lse=True, impl=impl, **bias, **case.options
    )
    exact_output, exact_lse = outsider.distance_attention(
        *(tensor.double().numpy() for tensor in (case.q, case.k, case.v)),
        **arrays(bias),
        **arrays(case.options),
    )
    assert_close(output, exact_output, atol)
    assert_close(lse, exact_lse, atol)


def assert_close(actual: Tensor, exact: Tensor | np.ndarray, atol: float) -> None:
    """Same shape, and no entry farther than `atol`; infinities must match."""
    exact = torch.as_tensor(exact)
    torch.testing.assert_close(actual.detach().to(exact.dtype), exact, atol=atol, rtol=0)


def enliven(module: nn.Module, *, std: float = 0.7, seed: int = 0) -> nn.Module:
    """Random weights large enough that tokens differ visibly in routing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std, generator=generator)
    return module
