"""`mosar report`: the report of an experiment, or of retrofitted models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mosar.cli.app import command
from mosar.errors import ReportError


@command("report")
def report(
    folder: Annotated[
        Path,
        Argument(
            help="An experiment folder of mosar reproduce, or a run that mosar evaluate has seen."
        ),
    ],
    out: Annotated[
        Path | None, Option(help="Folder to write; by default report in FOLDER.")
    ] = None,
) -> None:
    """Make the report of an experiment: one page, tables, figures.

    index.html needs nothing else and no network; tables.md and tables.tex hold its tables,
    figures/ its figures as .png and .svg. Only records are read; equal records give equal files.

    Of retrofitted models, one or a folder of several, report.md and their frontier are written.

    Example: mosar report runs/small

    Example: mosar report results/small --out small-report
    """
    from mosar.report.retrofit import find_runs

    if not find_runs(folder):
        report_experiment(folder, out)
    elif out is not None:
        raise ValueError("--out is for experiments; a retrofit's is in its folder")
    else:
        report_retrofit(folder)


def report_experiment(folder: Path, out: Path | None = None) -> None:
    """Writes the report of an experiment folder; prints its main table and its path."""
    from rich.console import Console

    from mosar.report.experiment import load_experiment
    from mosar.report.terminal import main_table_renderable
    from mosar.report.write import write_report

    page = write_report(folder, out)
    experiment = load_experiment(folder)
    console = Console()
    if experiment.evaluations:
        console.print(main_table_renderable(experiment, console.width))
    print(f"The report: {page}")


def report_retrofit(folder: Path) -> None:
    """Writes and prints the report of a retrofitted run, or of a folder that holds some."""
    from mosar.report.retrofit import write_retrofit_report

    try:
        path = write_retrofit_report(folder)
    except (ValueError, KeyError) as error:
        raise ReportError(str(error)) from None
    print(path.read_text(encoding="utf-8"))
    print(f"report in {path}")
