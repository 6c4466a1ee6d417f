"""`mosar report`: the report of an experiment, or of retrofitted models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from mosar.cli.app import command
from mosar.errors import ReportError

if TYPE_CHECKING:
    from mosar.report.experiment import Experiment


@command("report")
def report(
    folder: Annotated[
        Path,
        Argument(help="An experiment folder of mosar reproduce, or an evaluated run folder."),
    ],
    out: Annotated[Path | None, Option(help="Folder to write; by default FOLDER/report.")] = None,
) -> None:
    """Make the report of an experiment: one page, tables, figures.

    The page is index.html and works offline. tables.md and tables.tex contain its tables, and
    figures/ contains its figures as .png and .svg. The same records always give the same files. If
    the run folder of a variant with routers exists, looks/ contains a page of mosar look for it:
    it shows what the tokens of a fixed paragraph chose.

    For one retrofitted model, or a folder of several, the command writes report.md and a figure of
    perplexity against density.

    Example: mosar report runs/small

    Example: mosar report results/small --out small-report
    """
    if not folder.is_dir():
        raise ReportError(f"there is no folder {folder}; make one with mosar reproduce")
    from mosar.report.retrofit import find_runs

    if not find_runs(folder):
        report_experiment(folder, out)
    elif out is not None:
        raise ValueError("--out is for experiments; the report of a retrofit is in its run folder")
    else:
        report_retrofit(folder)


def report_experiment(folder: Path, out: Path | None = None) -> None:
    """Writes the report of an experiment folder; prints its main table, its path, what is next."""
    import sys

    from rich.console import Console

    from mosar.report.experiment import load_experiment
    from mosar.report.formats import plural
    from mosar.report.terminal import main_table_renderable
    from mosar.report.write import write_report

    experiment = load_experiment(folder)
    records, cells = len(experiment.records), len(experiment.cells)
    found = f"{plural(records, 'record')} of {plural(cells, 'cell')}"
    print(f"mosar: writing the report of {folder}: {found}", file=sys.stderr)
    _keep_looks(experiment)
    page = write_report(folder, out)
    console = Console()
    if experiment.evaluations:
        console.print(main_table_renderable(experiment, console.width))
    print(f"The report: {page}")
    print("Open it in a browser; it works offline.")
    if experiment.evaluations and len({cell.seed for cell in experiment.cells}) == 1:
        print("One seed gives directions and no verdicts: add --seeds 3 to mosar reproduce.")


def _keep_looks(experiment: Experiment) -> None:
    """Makes the pages of the microscope that are missing, where the run folders are there."""
    from mosar.evaluation.progress import say
    from mosar.microscope.sample import keep_look
    from mosar.report.comparison import Comparison
    from mosar.report.experiment import look_path, run_folder

    folder = experiment.folder
    for cells in Comparison(experiment).routed_cells.values():
        cell = next((cell for cell in cells if run_folder(folder, cell).is_dir()), None)
        if cell is None:
            continue
        try:
            keep_look(run_folder(folder, cell), look_path(folder, cell))
        except (RuntimeError, ValueError, OSError) as error:
            say(f"no page of the microscope for {cell.name}: {' '.join(str(error).split())}")


def report_retrofit(folder: Path) -> None:
    """Writes and prints the report of a retrofitted run, or of a folder that holds some."""
    from mosar.report.retrofit import write_retrofit_report

    try:
        path = write_retrofit_report(folder)
    except (ValueError, KeyError) as error:
        raise ReportError(str(error)) from None
    print(path.read_text(encoding="utf-8"))
    print(f"report in {path}")
