"""The plan with torch operators only: no compiler, any device, O(pairs) work, O(n d) memory.

Queries are processed in tiles of one label. A tile gathers, for each key class, the run of sorted
keys that its queries read, and attends to them with one softmax. If gradients are needed, each tile
is checkpointed: the backward pass recomputes its scores instead of storing them.

Shapes: B batch rows of a plan row, K its key/value heads, J query heads per key/value head,
T queries of the tile, S keys of its runs, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mosar.core.bias import Bias, DistanceBias, LabelBias, MixtureBias, Scores
from mosar.core.hard_domain import class_reach
from mosar.core.layout import Layout
from mosar.core.regimes import PairGeometry, log_gate, pair_geometry
from mosar.kernels.plan import Plan, build_plan, dense_plan_input, sparse_plan_input
from mosar.kernels.tables import gate_table, has_table

_TILE = 128


@dataclass(frozen=True)
class Tile:
    """Queries of one label and the keys they read, as indices into the orders of a plan row."""

    batch: slice
    groups: slice
    label: int
    queries: Tensor
    """[T]: indices of the queries."""
    keys: Tensor
    """[S]: indices of the keys, class after class."""
    classes: Tensor
    """[S]: the class of each key."""
    distances: Tensor
    """[T, S]."""
    admissible: Tensor
    """[T, S] bool: inside the query's own run."""


BiasOfTile = Callable[[Tile], "Tensor | None"]


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, bias: Bias, scores: Scores
) -> tuple[Tensor, Tensor]:
    """See `mosar.core.bias`."""
    options = {"scale": scores.scale, "softcap": scores.softcap}
    if isinstance(bias, LabelBias) and bias.ends_at_reach:
        plan = build_plan(sparse_plan_input(bias.query, bias.key, bias.config, layout))
        by_label = _bias_of_labels(bias, k.shape[1])
        return _attend(q, k, v, plan, bias.groups, by_label, bias_by_head=True, **options)
    plan = build_plan(dense_plan_input(layout))
    if isinstance(bias, DistanceBias):
        by_distance = _bias_by_distance(bias, k.shape[1])
        return _attend(q, k, v, plan, 1, by_distance, bias_by_head=True, **options)
    if isinstance(bias, LabelBias):
        bias = bias.mixture(torch.float64 if q.dtype == torch.float64 else torch.float32)
    return _attend(q, k, v, plan, bias.groups, _bias_of_mixture(bias, layout), **options)


def _bias_of_labels(given: LabelBias, kv_heads: int) -> BiasOfTile:
    config, geometry = given.config, pair_geometry(given.config)
    boundless = class_reach(config) == math.inf

    def bias(tile: Tile) -> Tensor:
        # Sinks (the class after the regimes) and the global pair have no transition.
        label, columns = tile.label, tile.classes.clamp_max(config.global_index)
        tables = (table[label].to(columns.device)[columns] for table in geometry)
        flat = boundless[label].to(columns.device)[tile.classes]
        pairs = PairGeometry(*tables)
        gates_TS = log_gate(tile.distances, *pairs, config).masked_fill(flat, 0.0)
        if given.of_key is None:
            return gates_TS
        of_group = given.of_key.unflatten(1, (given.groups, -1))[tile.batch, tile.groups]
        per_group = kv_heads // given.groups
        of_key_BKJS = of_group[..., tile.keys].unflatten(2, (per_group, -1)).flatten(1, 2)
        return gates_TS + of_key_BKJS[..., None, :]

    return bias


def _bias_of_mixture(given: MixtureBias, layout: Layout) -> BiasOfTile:
    config, device = given.config, given.query.device
    dtype = torch.promote_types(given.query.dtype, given.key.dtype)
    table_RRd = gate_table(config, dtype).to(device) if has_table(config) else None
    pairs = pair_geometry(config, device)
    sinks_BS = layout.sinks(config.num_sinks) if config.num_sinks else None

    def gate(m: int, n: int, distances_TS: Tensor) -> Tensor | float:
        if table_RRd is not None:
            return table_RRd[m, n][distances_TS.clamp(0, table_RRd.shape[-1] - 1)]
        if m == n == config.global_index:
            return 1.0
        pair = PairGeometry(*(table[m, n] for table in pairs))
        return log_gate(distances_TS, *pair, config).exp().to(dtype)

    def bias(tile: Tile) -> Tensor:
        pi_q_BGTR = given.query[tile.batch, tile.groups, tile.queries]
        pi_k_BGSR = given.key[tile.batch, tile.groups, tile.keys]
        # One regime pair at a time: the gates of all pairs would need R x R tiles of memory.
        worth_BGTS = torch.zeros((), dtype=dtype, device=device)
        for m, n in product(range(config.num_regimes), repeat=2):
            mixed_BGTS = pi_q_BGTR[..., :, m, None] * pi_k_BGSR[..., None, :, n]
            worth_BGTS = worth_BGTS + mixed_BGTS * gate(m, n, tile.distances)
        bias_BGTS = worth_BGTS.clamp_min(config.epsilon).log()
        if sinks_BS is not None:
            rows = sinks_BS if sinks_BS.shape[0] == 1 else sinks_BS[tile.batch]
            bias_BGTS = bias_BGTS.masked_fill(rows[:, tile.keys][:, None, None, :], 0.0)
        return bias_BGTS

    return bias


def _bias_by_distance(given: DistanceBias, kv_heads: int) -> BiasOfTile:
    def bias(tile: Tile) -> Tensor | None:
        distances_TS = tile.distances.clamp_min(0)
        total = None
        if given.log_gate is not None:
            total = given.log_gate[:, distances_TS.clamp_max(given.log_gate.shape[1] - 1)]
        if given.slopes is not None:
            linear = -given.slopes[:, None, None] * distances_TS
            total = linear if total is None else total + linear
        if total is not None and total.shape[0] > 1:
            total = total.unflatten(0, (kv_heads, -1))
        if given.key is not None:
            of_key = given.key[tile.batch][..., tile.keys].unflatten(1, (kv_heads, -1))
            total = of_key[..., None, :] if total is None else total + of_key[..., None, :]
        return total

    return bias


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    groups: int,
    bias_of: BiasOfTile,
    *,
    scale: float,
    softcap: float | None,
    bias_by_head: bool = False,
) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    kv_heads = k.shape[1]
    q_BKJTD = q.unflatten(1, (kv_heads, -1))

    @torch.autocast(q.device.type, enabled=False)
    def attend(tile: Tile, q_BKJTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor):
        score = torch.einsum("bkjtd,bksd->bkjts", q_BKJTD.to(dtype), k_BKSD.to(dtype)) * scale
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        bias = bias_of(tile)
        admissible = tile.admissible
        if bias is not None:
            bias = _by_head(bias, score.shape[1], bias_by_head)
            # NaN must propagate.
            admissible = admissible & ~(bias == -math.inf)
            score = score + bias.to(dtype)
        score = score.masked_fill(~admissible, -math.inf)
        empty = ~admissible.any(dim=-1, keepdim=True)
        score = score.masked_fill(empty, 0)
        # Not exp(score - lse), because rounding a large lse would change all weights of its row.
        weight = torch.softmax(score, dim=-1).masked_fill(~admissible, 0)
        lse = torch.logsumexp(score, dim=-1).masked_fill(empty[..., 0], -math.inf)
        return torch.einsum("bkjts,bksd->bkjtd", weight, v_BKSD.to(dtype)), lse

    keep_scores = not torch.is_grad_enabled()
    rows_out, rows_lse = [], []
    for row, batch, group in _plan_rows(plan, q.shape[0], groups):
        # A row of a plan is the whole batch, one batch entry, or one group of a batch entry.
        heads = slice(None)
        if group != slice(None):
            per_group = kv_heads // groups
            heads = slice(group.start * per_group, group.stop * per_group)
        q_row, k_row, v_row = q_BKJTD[batch, heads], k[batch, heads], v[batch, heads]
        outs, lses = [], []
        for tile in _tiles(plan, row, batch, group):
            parts = (
                tile,
                q_row[:, :, :, tile.queries],
                k_row[:, :, tile.keys],
                v_row[:, :, tile.keys],
            )
            out, lse = (
                attend(*parts) if keep_scores else checkpoint(attend, *parts, use_reentrant=False)
            )
            outs.append(out)
            lses.append(lse)
        back = torch.argsort(plan.query_order[row].long())
        rows_out.append(torch.cat(outs, dim=3)[:, :, :, back])
        rows_lse.append(torch.cat(lses, dim=3)[:, :, :, back])
    shape = (q.shape[0], kv_heads, *q_BKJTD.shape[2:])
    out = _join(rows_out, shape).flatten(1, 2)
    lse = _join(rows_lse, shape[:-1]).flatten(1, 2)
    return out.to(q.dtype), lse


def _by_head(bias: Tensor, heads: int, by_head: bool) -> Tensor:
    """A bias per pair, per (group, pair) or per (head, pair), reshaped to [.., K, J, T, S]."""
    if bias.dim() == 2 or by_head:
        return bias
    return bias.repeat_interleave(heads // bias.shape[1], dim=1)[:, :, None]


def _join(rows: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Joins plan rows, each [batch rows, heads, ...], into [B, K, ...]."""
    if len(rows) == 1:
        return rows[0]
    return torch.cat([row.flatten(0, 1) for row in rows]).unflatten(0, shape[:2])


def _plan_rows(plan: Plan, batch: int, groups: int) -> Iterator[tuple[int, slice, slice]]:
    rows = plan.query_order.shape[0]
    for row in range(rows):
        if rows == 1 and batch * groups > 1:
            yield row, slice(None), slice(None)
        elif rows == batch:
            yield row, slice(row, row + 1), slice(None)
        else:
            b, g = divmod(row, groups)
            yield row, slice(b, b + 1), slice(g, g + 1)


def _tiles(plan: Plan, row: int, batch: slice, groups: slice) -> Iterator[Tile]:
    """The tiles of one plan row, in sorted order."""
    offsets = plan.query_offsets[row].tolist()
    order_q, order_k = plan.query_order[row].long(), plan.key_order[row].long()
    lo, hi = plan.run_lo[row], plan.run_hi[row]
    places_q, places_k = plan.query_places[row].long(), plan.key_places[row].long()
    device = order_q.device
    for label, (begin, end) in enumerate(pairwise(offsets)):
        for first in range(begin, end, _TILE):
            last = min(first + _TILE, end)
            lows, highs = lo[first].tolist(), hi[last - 1].tolist()
            runs = [torch.arange(a, max(a, b)) for a, b in zip(lows, highs, strict=True)]
            sorted_keys = torch.cat(runs).to(device)
            classes = torch.cat([torch.full((len(run),), c) for c, run in enumerate(runs)]).to(
                device
            )
            queries, keys = order_q[first:last], order_k[sorted_keys]
            inside = (lo[first:last][:, classes] <= sorted_keys) & (
                hi[first:last][:, classes] > sorted_keys
            )
            distances = places_q[queries][:, None] - places_k[keys][None, :]
            yield Tile(batch, groups, label, queries, keys, classes, distances, inside)
