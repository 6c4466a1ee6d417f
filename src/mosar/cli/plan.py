"""`mosar plan`: estimates what a run needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from mosar.cli.app import command
from mosar.cli.options import (
    Changes,
    Preset,
    Variant,
    check_figure,
    check_folder_of,
    check_names,
    write_figure,
    write_file,
)
from mosar.errors import PlanError

if TYPE_CHECKING:
    from mosar.planning.density import DensityCurve
    from mosar.planning.plan import Plan
    from mosar.training.config import RunConfig

_ASSUMED_VOCABULARY = 4096
_PACKAGED = ("paper", "small")
"""Sources of the density curves that come with mosar."""


@command("plan")
def plan(
    preset: Preset = "paper",
    variant: Variant = "mosar",
    context: Annotated[
        int | None, Option(min=1, help="Tokens in a window; by default as in the preset.")
    ] = None,
    gpus: Annotated[
        int | None,
        Option(
            min=1, max=1_000_000, help="Number of ranks; by default --data x --shard x --tensor."
        ),
    ] = None,
    data: Annotated[
        int | None, Option(min=1, help="Copies of the model (DDP).", show_default="chosen")
    ] = None,
    shard: Annotated[
        int | None,
        Option(
            min=1,
            help="Ranks that shard parameters and optimizer (FSDP).",
            show_default="chosen",
        ),
    ] = None,
    tensor: Annotated[
        int | None,
        Option(min=1, help="Ranks that split heads and feed-forward.", show_default="chosen"),
    ] = None,
    windows: Annotated[
        int | None,
        Option(
            min=1,
            help="Windows per update, on all ranks; by default as in the preset, or one per rank.",
        ),
    ] = None,
    memory: Annotated[
        float, Option(min=0.001, help="GiB of memory per rank; the mesh is chosen to fit.")
    ] = 80.0,
    density: Annotated[
        str | None,
        Option(
            help=f"The support density: {' or '.join(_PACKAGED)} (figures that come with mosar), a "
            "number, or a folder with records of mosar evaluate."
        ),
    ] = None,
    changes: Changes = None,
    json_file: Annotated[
        Path | None,
        Option("--json", help="Write the plan as JSON; - writes it to stdout, without the tables."),
    ] = None,
    plot: Annotated[
        Path | None, Option(help="Plot the cost of attention by context: FILE.png, .svg or .pdf.")
    ] = None,
) -> None:
    """Estimate a run before you start it: parameters, operations, memory, communication, context.

    Nothing is trained or timed. Every line says whether its figure is exact, measured or modelled,
    and by which rule. Without --data, --shard and --tensor, the command chooses the simplest mesh
    that fits into memory. --context does not change the reaches of the regimes: they belong to the
    preset's training length. To scale them, use for example --set model.max_length=8192.

    Example: mosar plan --preset paper --context 8192 --gpus 64

    Example: mosar plan --preset paper --gpus 8 --tensor 8 --memory 40 --set train.precision=fp32

    Example: mosar plan --preset small --variant mosar-cost --density results/small --json plan.json

    Example: mosar plan --preset paper --context 16384 --plot plan.png
    """
    check_names(variant, preset)
    check_figure("--plot", plot)
    check_folder_of(None if str(json_file) == "-" else json_file)
    source = _read_density(density)
    from mosar.planning.plan import make_plan
    from mosar.training.config import resolve_config

    config = resolve_config(
        variant=variant or "mosar",
        preset=preset or "paper",
        data=".",
        vocab_size=_ASSUMED_VOCABULARY,
        # A plan is for GPUs, wherever it is made: it uses their precision.
        changes=["train.device=cuda", *(changes or ())],
    )
    mesh = config.distributed
    data = data or mesh.data
    shard = shard or (mesh.shard if mesh.shard > 1 else None)
    tensor = tensor or (mesh.tensor if mesh.tensor > 1 else None)
    made = make_plan(
        config,
        context=config.model.max_length if context is None else context,
        gpus=(data or 1) * (shard or 1) * (tensor or 1) if gpus is None else gpus,
        data=data,
        shard=shard,
        tensor=tensor,
        windows=windows,
        limit=memory * 2**30,
        curves=_choose_curves(config, source),
    )
    if plot is not None:
        _draw(made, plot)
    text = json.dumps(made.to_dict(), indent=1)
    if str(json_file) == "-":
        print(text)
        return
    if json_file is not None:
        write_file(json_file, f"{text}\n".encode())
    from rich.console import Console

    from mosar.planning.terminal import print_plan

    print_plan(made, Console())


def _draw(made: Plan, path: Path) -> None:
    from mosar.report.figures import draw_plan

    section = "operations of a token"
    rest = sum(made.value(section, f"{name}, forward") for name in ("matrices", "routers"))
    config = made.config
    length = f"training length {config.model.max_length:,}"
    title = f"{config.variant}, preset {config.preset}, {length}"
    write_figure(path, draw_plan(made.to_dict()["attention_by_context"], rest, title))


def _read_density(text: str | None) -> str | float | Path | None:
    """The name of a packaged source, a share of the pairs, or a folder; needs no torch."""
    if text is None or text in _PACKAGED:
        return text
    try:
        share = float(text)
    except ValueError:
        folder = Path(text).resolve()
        if text and folder.is_dir():
            return folder
        raise PlanError(
            f"--density must be {', '.join(_PACKAGED)}, a number, or a folder with records, "
            f"got {text!r}"
        ) from None
    if not 0 < share <= 1:
        raise PlanError(f"--density must be a share in (0, 1], got {text}")
    return share


def _choose_curves(config: RunConfig, density: str | float | Path | None) -> list[DensityCurve]:
    """Density curves of a routed variant, the chosen one first; none for other variants."""
    from mosar.geometries import VARIANTS
    from mosar.planning.density import constant_curve, curves_from_records, packaged_curves

    if not config.attention.geometry_class.routed:
        if density is not None:
            raise PlanError(f"--density is for routed variants, {config.variant} has no routers")
        return []
    packaged = packaged_curves()
    if density is None:
        regimes = config.regimes.num_regimes
        counted = [packaged.get(f"{source}/{config.variant}") for source in _PACKAGED]
        fits = any(curve and len(curve.points[0].pairs) == regimes for curve in counted)
        if VARIANTS[config.variant].geometry_class.routed and not fits:
            return [constant_curve(1.0, "no model with these regimes was counted: as if dense")]
        # The paper published shares of its model; smaller models are closer to our own records.
        density = "paper" if config.preset == "paper" else "small"
    if isinstance(density, str):
        order = [density, *(source for source in _PACKAGED if source != density)]
        found = [packaged.get(f"{source}/{config.variant}") for source in order]
        curves = [curve for curve in found if curve is not None]
        if found[0] is None:
            raise PlanError(
                f"there is no density curve of {config.variant} with attention.geometry="
                f"{config.attention.geometry}; give --density a number or a folder with records, "
                "or name the routed variant with --variant"
            )
        return curves
    if not isinstance(density, Path):
        return [constant_curve(density)]
    found = curves_from_records(density)
    curve = found.get(f"{density.name}/{config.variant}")
    if curve is None:
        raise PlanError(
            f"no evaluation of {config.variant} under sparse routing below {density}; there are "
            f"{', '.join(found) or 'none at all'}"
        )
    return [curve]
