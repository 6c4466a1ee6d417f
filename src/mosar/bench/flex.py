"""FlexAttention as a competitor, compiled: on tokens as they come, and sorted by our plan.

Both get the labels as a score modification and the exact blocks that hold a pair, with those that
are full told apart. Making these is not timed; sorting q, k, v and putting the output back is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from mosar.bench.comparison import Unavailable
from mosar.bench.problem import Case, Problem, solve
from mosar.core.layout import resolve_layout
from mosar.core.regimes import pair_geometry, support_reach
from mosar.kernels.plan import build_plan, sparse_plan_input

# On the CPU smaller blocks than the usual 128 skip more of a sorted support and measure faster.
_BLOCKS = {"cpu": 64, "cuda": 128}
_FLAT = 1e30


def flex_call(problem: Problem, *, is_sorted: bool) -> Callable[[], tuple[Tensor, ...]]:
    """The timed call; the first one compiles. Raises Unavailable."""
    case = problem.case
    if not case.is_sparse:
        raise Unavailable("FlexAttention is given supports, and this mode has all pairs")
    if case.trains and case.device == "cpu":
        raise Unavailable("FlexAttention has no backward pass on the CPU")
    attend = _compiled()
    labels_q, labels_k = (labels[0] for labels in problem.labels)
    order_q = order_k = torch.arange(case.length, device=problem.q.device)
    if is_sorted:
        layout = resolve_layout(1, case.length, case.length, device=problem.q.device)
        plan = build_plan(sparse_plan_input(labels_q[None], labels_k[None], case.config, layout))
        order_q, order_k = plan.query_order[0].long(), plan.key_order[0].long()
    options = _modifications(case, order_q, order_k, labels_q[order_q], labels_k[order_k])
    back = torch.argsort(order_q)

    def forward(given: Problem) -> Tensor:
        q, k, v = given.q, given.k, given.v
        if not is_sorted:
            return attend(q, k, v, **options)
        q, k, v = q[:, :, order_q], k[:, :, order_k], v[:, :, order_k]
        return attend(q, k, v, **options)[:, :, back]

    return lambda: solve(problem, forward, problem.leaves)


def first_call(name: str, call: Callable[[], tuple[Tensor, ...]]) -> Tensor:
    """Compiles and runs; every failure becomes Unavailable."""
    try:
        return call()[0]
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise Unavailable(f"{name} does not run here: {reason}") from None


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # Each length is compiled separately; beyond its limit torch would run uncompiled.
    torch._dynamo.config.recompile_limit = 1024
    for name in ("torch._inductor", "torch._dynamo"):
        # The compiler's messages would appear in the middle of our table.
        logging.getLogger(name).setLevel(logging.ERROR)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _modifications(
    case: Case, places_q: Tensor, places_k: Tensor, labels_q: Tensor, labels_k: Tensor
) -> dict:
    """score_mod, block_mask and the rest for queries and keys in the order given."""
    from torch.nn.attention.flex_attention import BlockMask

    regimes, barrier, exponent = case.config.num_regimes, case.config.barrier, case.config.exponent
    pairs = pair_geometry(case.config)
    reach = support_reach(case.config).clamp_max(_FLAT).float().flatten()
    flat = pairs.transition == 0
    flat[-1, -1] = True
    plateau = pairs.plateau.masked_fill(flat, _FLAT).float().flatten()
    slope = (1 / pairs.transition.masked_fill(flat, torch.inf)).float().flatten()
    device = places_q.device
    reach, plateau, slope = (table.to(device) for table in (reach, plateau, slope))
    i_place, j_place = places_q.int(), places_k.int()
    i_row, j_column = (labels_q * regimes).int(), labels_k.int()

    def inside(b, h, i, j):
        distance = i_place[i] - j_place[j]
        return (distance >= 0) & (distance <= reach[i_row[i] + j_column[j]])

    def add_log_gate(score, b, h, i, j):
        pair = i_row[i] + j_column[j]
        progress = torch.clamp((i_place[i] - j_place[j] - plateau[pair]) * slope[pair], 0, 1)
        return score - barrier * (progress * progress if exponent == 2 else progress**exponent)

    block = _BLOCKS[device.type]
    counts = _block_counts(inside, torch.arange(case.length, device=device), block)
    full = counts == block * block
    some = (counts > 0) & ~full
    block_mask = BlockMask.from_kv_blocks(
        *_listed(some),
        *_listed(full),
        BLOCK_SIZE=block,
        mask_mod=inside,
        seq_lengths=(case.length, case.length),
        compute_q_blocks=case.trains,
    )
    enable_gqa = case.shape.heads != case.shape.kv_heads
    return {"score_mod": add_log_gate, "block_mask": block_mask, "enable_gqa": enable_gqa}


def _block_counts(inside: Callable[..., Tensor], index: Tensor, size: int) -> Tensor:
    """Pairs of the support per (query block, key block), one strip of blocks at a time."""
    padding = -len(index) % size
    strips = [F.pad(inside(0, 0, rows[:, None], index), (0, padding)) for rows in index.split(size)]
    return torch.stack([strip.unflatten(1, (-1, size)).sum(dim=(0, 2)) for strip in strips])


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Chosen blocks per row: how many, and their indices first."""
    number = blocks.sum(dim=1).int()[None, None]
    indices = torch.argsort(blocks.int(), dim=1, descending=True, stable=True).int()[None, None]
    return number.contiguous(), indices.contiguous()
