"""`mosar variants`: every model that can be compared, and what is known of it."""

from __future__ import annotations

import json
from typing import Annotated

from typer import Option

from mosar.cli.app import command
from mosar.cli.options import Preset, check_names

# Columns of a terminal that take the whole table.
_WIDE = 130


@command("variants")
def variants(
    preset: Preset = "small",
    as_json: Annotated[bool, Option("--json", help="As JSON, with every fact.")] = False,
) -> None:
    """List all variants: what they learn, read and keep, and whose idea they are.

    The numbers are those of a preset's model. Pairs are shares of the causal pairs at one and at
    four times the training length; q·k: products of a head for the last query of that length.

    Example: mosar variants

    Example: mosar variants --preset paper --json
    """
    check_names(None, preset)
    from mosar.geometries import VARIANTS
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
    from rich.table import Table

    console = Console()
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for heading in ("variant", "depends on", "parameters", "pairs N", "4N", "q·k", "cache"):
        right = heading not in ("variant", "depends on")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    table.add_column("kernels")
    is_wide = console.width >= _WIDE
    for heading in ("follows", "checked against") if is_wide else ():
        table.add_column(heading)
    for fact in facts:
        density = ("–" if x is None else f"{x:.1%}" for x in fact.density)
        products = "–" if fact.products is None else f"{fact.products:,.0f}"
        table.add_row(
            *(fact.variant, fact.family, f"{fact.parameters:,}", *density, products),
            *(f"{fact.cache:,}", "native" if fact.native else "torch"),
            *((fact.source, fact.checked) if is_wide else ()),
        )
    console.print(table)
    print("–: it follows from the contents. cache: numbers a layer keeps of each token.")
    if not is_wide:
        print("Whom each follows and what it was checked against: a wider terminal, or --json.")
