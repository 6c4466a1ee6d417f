"""The checked-in results: what is rendered follows from the records, and the pages say the same."""

import json
import math
import re
from pathlib import Path

import pytest

from mosar.model.parameters import parameter_parts, total
from mosar.report.claims import judged_claims, judged_own_claims
from mosar.report.comparison import Comparison
from mosar.report.experiment import load_experiment
from mosar.report.markup import latex_tables, markdown_tables
from mosar.report.retrofit import find_runs, load_run, retrofit_markdown
from mosar.report.sections import all_tables, make_sections
from mosar.report.tables import main_table
from mosar.report.verdicts import VERDICTS
from mosar.training.config import resolve_config

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/experiments.md"
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
        if column.label in ("variant", "ours", "seeds")
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


def test_the_page_shows_claims_as_the_report_judges_them():
    """In docs/experiments.md: every row of a table of claims, word for word."""
    comparison = Comparison(load_experiment(ROOT / "results/small"))
    judged = {
        claim.text: [finding.paper, finding.ours, VERDICTS[finding.verdict]]
        for claim, finding in judged_claims(comparison) + judged_own_claims(comparison)
    }
    _, *tables = PAGE.read_text().split("| claim | paper | ours | verdict |\n|---|---|---|---|\n")
    assert len(tables) >= 5
    for table in tables:
        rows = [_cells(line) for line in table.partition("\n\n")[0].splitlines()]
        assert rows
        for text, *row in rows:
            assert row == judged[text], text


def test_every_number_of_the_page_is_in_a_record():
    """In docs/experiments.md: each figure stands in a table of a report, or is computed here."""
    tables = [path.read_text() for path in sorted((ROOT / "results").glob("*/report/tables.md"))]
    tables.append((ROOT / "results/smollm2/report.md").read_text())
    known = set(_numbers("\n".join(tables))) | _settings() | _counted() | _of_retrofits()
    # A row of parameters has a test of its own.
    page = re.sub(r"^\| `.* % \|$", "", PAGE.read_text(), flags=re.M)
    page = re.sub(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", " ", page, flags=re.S)
    unknown = [
        f"{number} in: {line.strip()}"
        for line in page.splitlines()
        for number in _numbers(line)
        if number not in known
    ]
    assert not unknown, "\n".join(unknown)


def _numbers(text):
    """All but small whole numbers, without sign and separators; a percentage counts always."""
    for found in re.finditer(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)( ?%| ?×)?", text):
        number = found[1].rstrip(",").replace(",", "")
        if "." in number or len(number) > 2 or (found[2] or "").strip() == "%":
            yield number


def _settings():
    """What the presets set, the paper's size, and reaches of the retrofits."""
    values = set()
    for preset in ("small", "retrieval", "paper"):
        config = resolve_config(variant="mosar", preset=preset, data="nowhere", vocab_size=4096)
        model, steps = config.model, config.train
        values |= {model.hidden_size, model.max_length, model.head_dim, model.vocab_size}
        values |= {steps.steps, steps.warmup_steps}
        values |= {steps.micro_batch * steps.accumulation * model.max_length}
        for variant in ("rope", "mosar"):
            config = resolve_config(variant=variant, preset=preset, data="nowhere", vocab_size=4096)
            parts = parameter_parts(config.model, config.attention)
            whole = total(parts)
            values |= {whole, round(whole / 1e6), whole - model.vocab_size * model.hidden_size}
            values.add(round((whole - model.vocab_size * model.hidden_size) / 1e6))
    return {str(value) for value in values}


def _counted():
    """Of the records: tokens that were predicted, answers by distance, shares of parameters."""
    records = ROOT / "results/small/records"
    values = set()
    for line in (records / "mosar-seed0.jsonl").read_text().splitlines()[1:]:
        values.add(str(json.loads(line)["tokens"]))
    barrier = "results/passkey_barrier_12/mosar-seed0-attention.barrier=12.jsonl"
    for path in (records / "passkey/mosar-seed0.jsonl", ROOT / barrier):
        for record in map(json.loads, path.read_text().splitlines()):
            if record["kind"] != "retrieval" or record["length"] != record["train_length"]:
                continue
            values |= {f"{100 * record['chance']:.1f}", str(record["step"])}
            far = [row for row in record["by_distance"] if row[0] > record["reaches"]["M"]]
            values.add(f"{sum(r[2] * r[3] for r in far) / sum(r[3] for r in far):.3f}")
            values |= {f"{row[2]:.2f}" for row in far}
            values |= {str(row[1] - 1) for row in far} | {str(row[0]) for row in far}
    return values | {"500", "610000"}


def _of_retrofits():
    """The gap of each article under sparse routing, in percent."""
    files = sorted((ROOT / "results/smollm2").glob("*/evaluations/retrofit.jsonl"))
    records = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    found = [record for record in records if record["kind"] == "retrofit"]
    dense = {(r["text"], r["length"]): r for r in found if r["routing"] == "dense"}
    values = set()
    for record in found:
        plain = dense.get((record["text"], record["length"]))
        if record["routing"] == "sparse" and plain is not None:
            pairs = zip(record["window_losses"], plain["window_losses"], strict=True)
            values |= {f"{100 * math.expm1(sparse - own):.1f}" for sparse, own in pairs}
    return values


def _cells(line):
    return [cell.strip(" *") for cell in line.strip("|").split("|")]
