"""Shows a plan: one table per section, and how attention's cost grows with context."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich.console import Console
from rich.table import Table

from mosar.planning.lines import BASES, brief, say
from mosar.planning.plan import Cost, Plan


def print_plan(plan: Plan, console: Console) -> None:
    config, mesh, batch = plan.config, plan.mesh, plan.batch
    ranks = mesh.num_processes
    console.print(
        f"{config.variant}, preset {config.preset}, training length {config.model.max_length:,}; "
        f"context {plan.context:,}; {config.train.precision}",
        highlight=False,
    )
    console.print(
        f"mesh: {ranks} rank{'s' * (ranks > 1)} = data {mesh.data} x shard {mesh.shard} "
        f"x tensor {mesh.tensor}; an update: {batch.windows} windows, "
        f"{batch.passes} x {batch.pass_windows} on a rank",
        highlight=False,
    )
    for note in plan.notes:
        console.print(f"Note: {note}", highlight=False)
    for section, lines in groupby(plan.lines, key=lambda line: line.section):
        table = _table(section, "", "basis", "how")
        for line in lines:
            table.add_row(line.name, say(line.value, line.unit), line.basis, line.how)
        console.print()
        console.print(table)
    for curve, costs in groupby(plan.costs, key=lambda cost: cost.curve):
        console.print(f"\nattention of a token, forward: {curve}", style="bold", highlight=False)
        console.print(_cost_table(costs))
    console.print()
    for basis, meaning in BASES.items():
        console.print(f"{basis}: {meaning}", highlight=False)


def _cost_table(costs: Iterable[Cost]) -> Table:
    """With few digits, so that it fits 80 columns."""
    columns = ("all pairs", "support", "density", "basis", "part", "cache", "all keys")
    table = _table("context", *columns)
    for cost in costs:
        table.add_row(
            f"{cost.context:,}",
            brief(cost.dense, "FLOP"),
            brief(cost.sparse, "FLOP"),
            brief(100 * cost.density, "%"),
            cost.basis,
            brief(100 * cost.share, "%"),
            brief(cost.cache, "B"),
            brief(cost.dense_cache, "B"),
        )
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for name in columns:
        right = name not in ("basis", "how")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "how")
    return table
