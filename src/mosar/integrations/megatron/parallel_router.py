"""A router whose heads are spread over tensor-parallel ranks, and which routes as if they were not.

    h = Σ_ranks Σ_heads W1[head] x[head],   pi = softmax((W2 GELU(h + b1) + b2) / tau)

W1 is split by heads (row-parallel), everything after the sum is computed alike on every rank: all
ranks hold the routing of the unsplit model. Where there are fewer key heads than ranks, several
ranks hold the same key head; the first of them brings it into the sum.

Shapes: B batch, T tokens, H heads of this rank, D head dim, G routing groups, C hidden, R regimes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mosar.core.config import MoSARConfig
from mosar.core.outputs import RouterOutput
from mosar.core.routers import PostPositionRouter, router_decision
from mosar.integrations.megatron.collectives import (
    from_one_rank,
    gradient_from_one_rank,
    sum_over_ranks,
)


class ParallelRouter(nn.Module):
    """This rank's part of one router (of queries or of keys) of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        config: MoSARConfig,
        group: Any = None,
        *,
        starts: Sequence[str] = (),
        start_logit: float = 1.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        """`num_heads` are those of the whole layer; `group` is the tensor-parallel process group.

        starts: the regime that each routing group starts in, in turn, `start_logit` above the
        others; none: routing starts uniform.

        The weights are those of `PostPositionRouter` under the same state of torch's CPU generator,
        which must be the same on all ranks of the group (as Megatron keeps it).
        """
        super().__init__()
        size = 1 if group is None else group.size()
        if num_heads % size and size % num_heads:
            raise ValueError(
                f"{num_heads} heads cannot be spread over {size} tensor-parallel ranks: one must "
                "divide the other"
            )
        if num_heads % config.routing_groups:
            raise ValueError(
                f"routing_groups must divide the {num_heads} heads, got {config.routing_groups}"
            )
        self.num_heads, self.head_dim, self.config, self.group = num_heads, head_dim, config, group
        self.starts, self.start_logit = [config.regime_index(name) for name in starts], start_logit
        self.copies = max(size // num_heads, 1)
        """Ranks that hold the same heads."""
        self.shards = size // self.copies
        rank = 0 if group is None else group.rank()
        self.shard, self.copy = divmod(rank, self.copies)
        self.local_heads = num_heads // self.shards
        first = self.shard * self.local_heads
        of_group = num_heads // config.routing_groups
        self.groups_of_heads = [h // of_group for h in range(first, first + self.local_heads)]
        """The routing group of each head of this rank."""
        hidden, regimes, groups = config.router_hidden, config.num_regimes, config.routing_groups
        options = {"device": device, "dtype": dtype}
        self.weight1 = nn.Parameter(torch.empty(self.local_heads, hidden, head_dim, **options))
        self.bias1 = nn.Parameter(torch.empty(groups, hidden, **options))
        self.weight2 = nn.Parameter(torch.empty(groups, regimes, hidden, **options))
        self.bias2 = nn.Parameter(torch.empty(groups, regimes, **options))
        self._mark_parameters()
        self.reset_parameters()

    def _mark_parameters(self) -> None:
        """What Megatron's gradient norm must know: which parameters are counted where."""
        for parameter in self.parameters():
            parameter.tensor_model_parallel = False  # pyright: ignore[reportAttributeAccessIssue]
        if self.shards > 1:
            self.weight1.tensor_model_parallel = True  # pyright: ignore[reportAttributeAccessIssue]
            self.weight1.partition_dim = 0  # pyright: ignore[reportAttributeAccessIssue]
            self.weight1.partition_stride = 1  # pyright: ignore[reportAttributeAccessIssue]
            self.weight1.shared = self.copy > 0  # pyright: ignore[reportAttributeAccessIssue]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """W1 std 0.02, W2 std 1e-3, biases 0 but for the regimes that groups start in.

        The numbers are the same however many ranks there are.
        """
        with torch.device("cpu"):
            whole = PostPositionRouter(self.num_heads * self.head_dim, self.config)
        self.load(whole)
        for group in range(len(self.bias2) if self.starts else 0):
            self.bias2[group, self.starts[group % len(self.starts)]] = self.start_logit

    @torch.no_grad()
    def load(self, router: PostPositionRouter) -> None:
        """Takes this rank's part of an unsplit router."""
        groups, hidden, _ = router.weight1.shape
        by_head = router.weight1.view(groups, hidden, -1, self.head_dim).transpose(1, 2)
        by_head = by_head.reshape(-1, hidden, self.head_dim)
        if len(by_head) != self.num_heads:
            raise ValueError(f"the router is of {len(by_head)} heads, not of {self.num_heads}")
        first = self.shard * self.local_heads
        self.weight1.copy_(by_head[first : first + self.local_heads])
        for name in ("bias1", "weight2", "bias2"):
            getattr(self, name).copy_(getattr(router, name))

    @torch.no_grad()
    def gather(self) -> PostPositionRouter:
        """The unsplit router, on every rank; a collective call."""
        parts = [self.weight1.detach()]
        if self.group is not None and self.group.size() > 1:
            parts = [torch.empty_like(self.weight1) for _ in range(self.group.size())]
            dist.all_gather(parts, self.weight1.detach().contiguous(), group=self.group)
        by_head = torch.cat(parts[:: self.copies])
        groups = self.config.routing_groups
        weight1 = by_head.view(groups, -1, *by_head.shape[1:]).transpose(1, 2).flatten(2)
        router = PostPositionRouter(self.num_heads * self.head_dim, self.config).to(by_head)
        router.weight1.copy_(weight1)
        for name in ("bias1", "weight2", "bias2"):
            getattr(router, name).copy_(getattr(self, name))
        return router

    def partial_sums(self, x_TBHD: Tensor) -> Tensor:
        """What this rank's heads add to h, [B, G, T, C] in float32 (float64 for such weights)."""
        length, batch, heads, head_dim = x_TBHD.shape
        if (heads, head_dim) != (self.local_heads, self.head_dim):
            raise ValueError(
                f"this rank routes {self.local_heads} heads of {self.head_dim}, "
                f"got {heads} of {head_dim}"
            )
        speaks = self.copy == 0
        dtype = self._dtype
        x_TBHD = gradient_from_one_rank(x_TBHD, speaks).to(dtype)
        weight_HCD = self.weight1.to(dtype)
        sums: list[Tensor | None] = [None] * self.config.routing_groups
        for group in dict.fromkeys(self.groups_of_heads):
            first = self.groups_of_heads.index(group)
            own = slice(first, first + self.groups_of_heads.count(group))
            sums[group] = torch.einsum("tbhd,hcd->btc", x_TBHD[:, :, own], weight_HCD[own])
        # Heads of other ranks add to the other groups.
        zero = x_TBHD.new_zeros(batch, length, self.config.router_hidden)
        return from_one_rank(torch.stack([zero if s is None else s for s in sums], 1), speaks)

    def finish(self, hidden_BGTC: Tensor) -> RouterOutput:
        """The routing that follows from the whole sum; [B, T, R], or [B, G, T, R] for G > 1."""
        return router_decision(
            hidden_BGTC, self.bias1, self.weight2, self.bias2, self.config.temperature
        )

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.weight1.dtype == torch.float64 else torch.float32

    def extra_repr(self) -> str:
        return (
            f"heads={self.local_heads} of {self.num_heads}, head_dim={self.head_dim}, "
            f"hidden={self.config.router_hidden}, regimes={self.config.num_regimes}"
        )


def route(
    query_router: ParallelRouter, key_router: ParallelRouter, q_TBHD: Tensor, k_SBKD: Tensor
) -> tuple[RouterOutput, RouterOutput]:
    """The routing of queries and keys, the same on every rank; one all-reduce for both."""
    with torch.autocast(q_TBHD.device.type, enabled=False):
        partial = query_router.partial_sums(q_TBHD), key_router.partial_sums(k_SBKD)
        hidden_q, hidden_k = sum_over_ranks(partial, query_router.group)
        return query_router.finish(hidden_q), key_router.finish(hidden_k)


def local_groups(groups_of_heads: Sequence[int]) -> list[int]:
    """Which groups' routings the key heads of a rank need: one a group, or one a head.

    Kernels take groups of equally many heads; where a rank cuts through groups, each of its heads
    counts as a group of its own.
    """
    counts = [groups_of_heads.count(group) for group in dict.fromkeys(groups_of_heads)]
    whole = len(set(counts)) == 1
    return list(dict.fromkeys(groups_of_heads)) if whole else list(groups_of_heads)
