"""The checked-in results: what is rendered follows from the records, and the pages say the same."""

import json
import re
from pathlib import Path

import pytest

from mosar.model.parameters import parameter_parts, total
from mosar.report.comparison import Comparison
from mosar.report.experiment import load_experiment
from mosar.report.markup import latex_tables, markdown_tables
from mosar.report.retrofit import find_runs, load_run, retrofit_markdown
from mosar.report.sections import all_tables, make_sections
from mosar.report.tables import main_table
from mosar.training.config import resolve_config

ROOT = Path(__file__).parents[1]
FOLDERS = sorted(path.parent for path in (ROOT / "results").glob("*/experiment.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_tables_follow_from_the_records(folder):
    experiment = load_experiment(folder)
    tables = all_tables(make_sections(Comparison(experiment)))
    written = folder / "report"
    assert (written / "tables.md").read_text() == markdown_tables(tables, experiment.name), (
        f"run: mosar report results/{folder.name}"
    )
    assert (written / "tables.tex").read_text() == latex_tables(tables)


def test_the_page_shows_the_main_table():
    """In docs/experiments.md: perplexities of every variant at 1×, 2× and 4×, and the reach."""
    table = main_table(Comparison(load_experiment(ROOT / "results/small")))
    kept = [
        index
        for index, column in enumerate(table.columns)
        if column.label == "ours" or (column.group == "" and index < 2)
    ]
    page = (ROOT / "docs/experiments.md").read_text()
    rows = [_cells(line) for line in re.findall(r"^\|.*\|$", page, re.M)]
    for row in table.rows:
        assert [row[index].text for index in kept] in rows


@pytest.mark.parametrize(
    ("label", "changes", "records"),
    [
        ("`small`", (), "{}-seed0.jsonl"),
        ("`retrieval`, recall", ("data.task=recall",), "retrieval/{}-seed0-data.task=recall.jsonl"),
        ("`retrieval`, passkey", ("data.task=passkey",), "passkey/{}-seed0.jsonl"),
        ("`paper`", (), None),
    ],
)
def test_the_page_says_what_routers_add(label, changes, records):
    """In docs/experiments.md: parameters as the presets make them and the records have them."""
    preset, counts = label.split("`")[1], []
    for variant in ("rope", "mosar"):
        config = resolve_config(
            variant=variant, preset=preset, data="nowhere", changes=changes, vocab_size=4096
        )
        counts.append(total(parameter_parts(config.model, config.attention)))
        if records is not None:
            file = ROOT / "results/small/records" / records.format(variant)
            assert json.loads(file.read_text().splitlines()[0])["parameters"] == counts[-1]
    rope, mosar = counts
    row = f"| {label} | {rope:,} | {mosar:,} | {100 * (mosar / rope - 1):+.2f} % |"
    assert row in (ROOT / "docs/experiments.md").read_text().splitlines()


def test_the_report_of_the_retrofit_follows_from_the_records():
    folder = ROOT / "results/smollm2"
    runs = [load_run(path) for path in find_runs(folder)]
    assert len(runs) >= 3
    assert (folder / "report.md").read_text() == retrofit_markdown(runs, figure=True), (
        "run: mosar report results/smollm2"
    )
    assert (folder / "frontier.png").is_file()


def test_the_page_shows_rows_of_the_retrofits_report():
    """In docs/experiments.md, word for word: all rows that begin with a number of tokens."""
    page = (ROOT / "docs/experiments.md").read_text().partition("## SmolLM2-135M, retrofitted")[2]
    rows = re.findall(r"^\| \d,\d{3} \|.*\|$", page, re.M)
    report = (ROOT / "results/smollm2/report.md").read_text().splitlines()
    assert len(rows) > 20
    assert [row for row in rows if row not in report] == []


def _cells(line):
    return [cell.strip(" *") for cell in line.strip("|").split("|")]
