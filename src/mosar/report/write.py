"""Writes a report: the page, the tables, the figures."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from mosar.files import replace_synced
from mosar.report.charts import Chart
from mosar.report.comparison import Comparison
from mosar.report.drawing import draw_charts, draw_pictures, draw_supports, render_figure
from mosar.report.experiment import LOOKS, ReportError, load_experiment
from mosar.report.markup import latex_tables, markdown_tables
from mosar.report.page import render_page
from mosar.report.sections import Links, Section, Supports, all_items, all_tables, make_sections

PAGE = "index.html"
_FORMATS = ("png", "svg")


def write_report(folder: Path | str, out: Path | str | None = None) -> Path:
    """Makes the report of an experiment folder in `out` (default: FOLDER/report).

    Returns the path of its page; a ReportError says in one line what is missing or damaged. A
    former report in `out` is replaced, file by file; equal records give equal files.
    """
    experiment = load_experiment(folder)
    out = Path(folder) / "report" if out is None else Path(out)
    c = Comparison(experiment)
    sections = make_sections(c)
    tables = all_tables(sections)
    links = [link for item in all_items(sections) if isinstance(item, Links) for link in item.links]
    try:
        figures = _folder(out, "figures")
        former = {name: _former(out / PAGE, name) for name in ("figures", LOOKS)}
        pictures = draw_pictures(all_items(sections))
        names = []
        # A file has no buttons: with many variants it shows those that the page shows at first.
        few = {item.name: item for item in _featured(c, all_items(sections))}
        for name, picture in (pictures | draw_pictures(few.values())).items():
            names += [f"{name}.svg", f"{name}.png"]
            _write(figures, names[-2], picture.svg)
            _write(figures, names[-1], render_figure(picture.figure, "png", dpi=160))
        for name, figure in _joint_figures(sections):
            for suffix in _FORMATS:
                names.append(f"{name}.{suffix}")
                _write(figures, names[-1], render_figure(figure, suffix, dpi=160))
        for link in links:
            _write(_folder(out, LOOKS), link.name, link.source.read_bytes())
        looks = [link.name for link in links]
        for folder_name, made in (("figures", names), (LOOKS, looks)):
            for name in former[folder_name] - set(made):
                (_folder(out, folder_name) / name).unlink(missing_ok=True)
        _write(out, "tables.md", _encoded(markdown_tables(tables, experiment.name)))
        _write(out, "tables.tex", _encoded(latex_tables(tables)))
        _write(out, PAGE, _encoded(render_page(c, sections, pictures, names, looks)))
    except OSError as error:
        raise ReportError(f"cannot write {error.filename or out}: {error.strerror}") from None
    return out / PAGE


def _folder(out: Path, name: str) -> Path:
    """A folder of the report, made where it is missing; one that leads elsewhere is refused."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    if folder.resolve().parent != out.resolve():
        raise ReportError(f"{folder} leads out of the report's folder; remove that link")
    return folder


def _former(page: Path, kind: str) -> set[str]:
    """Files of a kind that a former report says it made; other files there are not ours."""
    try:
        text = page.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    found = re.search(rf'<meta name="{kind}" content="([\w. -]*)">', text)
    names = found[1].split() if found else []
    return {name for name in names if name.endswith((*_FORMATS, "html"))}


def _featured(c: Comparison, items: Iterable[Any]) -> Iterable[Chart]:
    """The charts with more variants than the page shows at first, without the others."""
    others = set(c.looks) - set(c.featured)
    for item in items:
        if isinstance(item, Chart) and any(line.key in others for line in item.series):
            kept = tuple(line for line in item.series if line.key not in others)
            if kept:
                yield replace(item, series=kept)


def _joint_figures(sections: Iterable[Section]) -> Iterable[tuple[str, Figure]]:
    """Figures of several parts that the page shows one by one."""
    items = list(all_items(sections))
    for item in items:
        if isinstance(item, Supports):
            shown = item.routed[item.initial : item.initial + 1]
            yield "geometry_grids", draw_supports([*item.fixed, *shown])
    speed = [i for i in items if isinstance(i, Chart) and i.name.startswith("speedup_")]
    if speed:
        yield "speedup", draw_charts(speed)


def _encoded(text: str) -> bytes:
    """JSON may hold lone surrogates, which UTF-8 cannot: they become question marks."""
    return text.encode("utf-8", "replace")


def _write(folder: Path, name: str, data: bytes) -> None:
    """Writes a file of `folder` atomically; refuses a name that leads elsewhere."""
    if name != os.path.basename(name):
        raise ReportError(f"a report does not write outside of its folder: {name!r:.80}")
    replace_synced(folder / name, data)
