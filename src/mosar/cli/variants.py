"""`mosar variants`: every model that can be compared, and what is known of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

from typer import Option

from mosar.cli.app import command
from mosar.cli.options import Preset, check_names

if TYPE_CHECKING:
    from rich.table import Table

# Columns of a terminal that take the whole table.
_WIDE = 150


@command("variants")
def variants(
    preset: Preset = "small",
    as_json: Annotated[bool, Option("--json", help="Print all facts as JSON.")] = False,
) -> None:
    """List all variants: what they learn, read and store, and who proposed them.

    The numbers are for the model of a preset. "pairs" is the share of the causal pairs that is
    read, at one and at four times the training length. "q·k" is the number of q·k products that one
    head computes for the last query of the training length. A second table lists the modes in which
    mosar evaluate can run a trained model.

    Example: mosar variants

    Example: mosar variants --preset paper --json
    """
    check_names(None, preset)
    from mosar.geometries import MODES, VARIANTS
    from mosar.geometries.facts import variant_facts
    from mosar.training.config import resolve_config

    model = resolve_config(
        variant="rope", preset=preset or "small", data="none", vocab_size=256
    ).model
    facts = [variant_facts(name, model.head_shape, model.num_layers) for name in VARIANTS]
    if as_json:
        print(json.dumps([fact.to_dict() for fact in facts], indent=1))
        return
    from rich.console import Console

    console = Console()
    is_wide = console.width >= _WIDE
    table = _table("variant", "depends on")
    for heading in ("parameters", "pairs N", "4N", "q·k", "cache"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("kernels", *(("learns", "follows", "checked against") if is_wide else ())):
        table.add_column(heading)
    for fact in facts:
        density = ("–" if x is None else f"{x:.1%}" for x in fact.density)
        products = "–" if fact.products is None else f"{fact.products:,.0f}"
        table.add_row(
            *(fact.variant, fact.family, f"{fact.parameters:,}", *density, products),
            *(f"{fact.cache:,}", "native" if fact.native else "torch"),
            *((fact.learns, fact.source, fact.checked) if is_wide else ()),
        )
    console.print(table)
    print("–: depends on the text; adaptive-span: the largest share that it may read.")
    print("cache: how many numbers a layer stores per token.")
    print("All variants are prefix-invariant: later tokens do not change earlier outputs.")
    if not is_wide:
        print("A wider terminal shows more columns: learns, follows, checked against.")
    print("--json prints all facts.")
    table = _table("mode", "prefix-invariant")
    for heading in ("of", "follows"):
        table.add_column(heading)
    for name, mode in MODES.items():
        served = ", ".join(fact.variant for fact in facts if name in fact.modes)
        table.add_row(name, "yes" if mode.prefix_invariant else "no", served, mode.source)
    console.print()
    console.print(table)


def _table(*headings: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table
