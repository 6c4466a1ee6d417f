"""Tensor parallelism: heads and feed-forward divided over processes, one routing for all of them.

    q, k, v, gate, up    divided by rows of the weight: each process has its heads, its channels
    o, down              divided by columns; the processes' partial sums are added
    routers              W1 divided with the heads it reads; the partial sums of both routers are
                         added in one message, so that every process holds the routing of the whole
    the rest             (embedding, norms, the routers' second layers) whole in every process

Fewer key/value heads than processes: keys, values and the key router are whole in every process,
and each attends to the one key head that its queries read. Routing groups, where there are as many
as processes or more, stay with their process and need no message.

Divided parameters are DTensors, which FSDP2 and checkpoints understand; the arithmetic is on their
local parts, with the gradients of `operators`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from mosar.core.bias import LabelBias, MixtureBias
from mosar.core.outputs import RouterOutput
from mosar.core.routers import PostPositionRouter, router_decision, router_projection
from mosar.geometries import Attended, Geometry, LayerRouting, MoSAR
from mosar.model.decoder import Attention, Decoder, FeedForward
from mosar.training.distributed.operators import add, common, copy


@dataclass(frozen=True)
class TensorRanks:
    """The processes that divide a layer, seen from one of them."""

    mesh: DeviceMesh
    """One dimension."""
    rank: int
    size: int

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()


def split_decoder(decoder: Decoder, ranks: TensorRanks) -> None:
    """Divides the layers of a decoder on the meta device; parameters keep their names."""
    for layer in decoder.layers:
        assert isinstance(layer.attention, Attention) and isinstance(layer.ffn, FeedForward)
        _split_attention(layer.attention, ranks)
        _split_feed_forward(layer.ffn, ranks)


def local(parameter: Tensor) -> Tensor:
    """This process's part of a parameter, or all of it if it is not divided."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class ColumnLinear(nn.Module):
    """A linear layer with its weight divided by rows: some of the outputs."""

    def __init__(self, whole: nn.Linear, ranks: TensorRanks):
        super().__init__()
        self.weight = _divided(whole.weight, 0, ranks)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, local(self.weight))


class RowLinear(nn.Module):
    """A linear layer with its weight divided by columns: partial sums are added."""

    def __init__(self, whole: nn.Linear, ranks: TensorRanks):
        super().__init__()
        self.weight = _divided(whole.weight, 1, ranks)
        self.group = ranks.group

    def forward(self, x: Tensor) -> Tensor:
        return add(self.group, F.linear(x, local(self.weight)))


def _divided(parameter: Tensor, dim: int, ranks: TensorRanks) -> nn.Parameter:
    shape = list(parameter.shape)
    shape[dim] //= ranks.size
    part = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(DTensor.from_local(part, ranks.mesh, [Shard(dim)], run_check=False))


def _copy_input(module: nn.Module, ranks: TensorRanks) -> None:
    def hook(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = arguments
        return (*copy(ranks.group, x), *rest)

    module.register_forward_pre_hook(hook)


def _common_input(module: nn.Module, ranks: TensorRanks) -> None:
    module.register_forward_pre_hook(lambda _, arguments: (common(ranks.size, arguments[0]),))


def _split_feed_forward(ffn: FeedForward, ranks: TensorRanks) -> None:
    _copy_input(ffn, ranks)
    ffn.gate_proj, ffn.up_proj, ffn.down_proj = (  # pyright: ignore[reportAttributeAccessIssue]
        ColumnLinear(ffn.gate_proj, ranks),
        ColumnLinear(ffn.up_proj, ranks),
        RowLinear(ffn.down_proj, ranks),
    )


def _split_attention(attention: Attention, ranks: TensorRanks) -> None:
    _copy_input(attention, ranks)
    attention.q_proj = ColumnLinear(attention.q_proj, ranks)  # pyright: ignore[reportAttributeAccessIssue]
    attention.o_proj = RowLinear(attention.o_proj, ranks)  # pyright: ignore[reportAttributeAccessIssue]
    heads = HeadSplit(ranks, attention.geometry.shape.num_kv_heads)
    if heads.copies_keys:
        _common_input(attention.k_proj, ranks)
        _common_input(attention.v_proj, ranks)
    else:
        attention.k_proj = ColumnLinear(attention.k_proj, ranks)  # pyright: ignore[reportAttributeAccessIssue]
        attention.v_proj = ColumnLinear(attention.v_proj, ranks)  # pyright: ignore[reportAttributeAccessIssue]
    attention.geometry = _split_geometry(attention.geometry, heads)


@dataclass(frozen=True)
class HeadSplit:
    """The heads of a layer that this process has."""

    ranks: TensorRanks
    num_kv_heads: int

    @property
    def copies_keys(self) -> bool:
        """Whether every process computes all keys and values."""
        return self.num_kv_heads < self.ranks.size

    def own_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The key/value heads [B, own, S, D] that this process's queries read."""
        if not self.copies_keys:
            return k, v
        k, v = copy(self.ranks.group, k, v)
        head = self.ranks.rank * self.num_kv_heads // self.ranks.size
        return k[:, head : head + 1], v[:, head : head + 1]


class _Split(Geometry):
    """Gives another geometry the heads of this process: their keys, values and parameters."""

    heads: HeadSplit

    def __getattr__(self, name: str) -> Any:
        """Parameters are read as their parts in this process; FSDP and checkpoints see DTensors."""
        found = super().__getattr__(name)
        return local(found) if isinstance(found, Tensor) else found


class _SplitHeads(_Split):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Attended:
        return super().attend(q, *self.heads.own_keys(k, v), **options)


class _SplitMoSAR(_Split, MoSAR):
    keeps_groups: bool
    """Whether this process has its own routing groups."""

    def route(self, q: Tensor, k: Tensor, hidden: Tensor | None = None) -> LayerRouting:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        hidden_q = router_projection(q, local(self.query_router.weight1))
        if self.heads.copies_keys:
            hidden_q = add(self.heads.ranks.group, hidden_q)
            return LayerRouting(_decide(self.query_router, hidden_q), self.key_router(k))
        hidden_k = router_projection(k, local(self.key_router.weight1))
        if not self.keeps_groups:
            both = add(self.heads.ranks.group, torch.cat([hidden_q, hidden_k], dim=2))
            hidden_q, hidden_k = both.split([q.shape[1], k.shape[1]], dim=2)
        return LayerRouting(
            _decide(self.query_router, hidden_q), _decide(self.key_router, hidden_k)
        )

    def attend_routed(
        self, q: Tensor, k: Tensor, v: Tensor, bias: LabelBias | MixtureBias, **options: Any
    ) -> Any:
        if not self.keeps_groups:
            # All heads use the same routing, so the gradients of all processes are added.
            bias = bias.through(partial(copy, self.heads.ranks.group))
        return super().attend_routed(q, *self.heads.own_keys(k, v), bias, **options)


def _decide(router: PostPositionRouter, hidden_BGTH: Tensor) -> RouterOutput:
    bias1, weight2, bias2 = (local(p) for p in (router.bias1, router.weight2, router.bias2))
    return router_decision(hidden_BGTH, bias1, weight2, bias2, router.config.temperature)


def _split_geometry(geometry: Geometry, heads: HeadSplit) -> Geometry:
    kind, ranks = type(geometry), heads.ranks
    divided = _SplitMoSAR if isinstance(geometry, MoSAR) else _SplitHeads
    split = type(f"Split{kind.__name__}", (divided, kind), {})(geometry.attention, geometry.shape)
    own = geometry.shape.num_heads // ranks.size
    split.own_heads = slice(ranks.rank * own, (ranks.rank + 1) * own)
    split.heads = heads
    for name, parameter in list(split.named_parameters(recurse=False)):
        if name in geometry.of_heads:
            setattr(split, name, _divided(parameter, 0, ranks))
    if not isinstance(split, _SplitMoSAR):
        # Heads that attend separately need nothing else.
        return split
    groups = split.config.routing_groups
    split.keeps_groups = groups > 1
    for router in (split.query_router, split.key_router):
        if split.keeps_groups:
            for name in ("weight1", "bias1", "weight2", "bias2"):
                setattr(router, name, _divided(getattr(router, name), 0, ranks))
        elif router is split.query_router or not heads.copies_keys:
            router.weight1 = _divided(router.weight1, 2, ranks)
    if split.keeps_groups:
        split.config = replace(split.config, routing_groups=groups // ranks.size)
    return split
