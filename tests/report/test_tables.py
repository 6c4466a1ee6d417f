"""Tables: their figures, and the ways to write them down."""

import math
import re
import statistics
from dataclasses import replace
from itertools import groupby

import pytest

from mosar.geometries import VARIANTS
from mosar.records import Cell, append_record
from mosar.report.comparison import Comparison, Estimate, Setting
from mosar.report.experiment import load_experiment
from mosar.report.formats import count, duration, number, percent, perplexity, setting, share
from mosar.report.markup import latex, latex_tables, markdown_tables
from mosar.report.sections import all_tables, make_sections
from mosar.report.tables import (
    Column,
    Table,
    TableCell,
    gap_table,
    main_table,
    mode_table,
    pair_table,
    routing_table,
    sparse_table,
    spread,
)
from mosar.report.terminal import main_table_text
from report.synthetic import compare_many, make_evaluation, write_experiment
from report.synthetic import perplexity as made_perplexity


def column(table, group, label):
    (index,) = [i for i, c in enumerate(table.columns) if (c.group, c.label) == (group, label)]
    return index


def test_main_table(comparison):
    table = main_table(comparison)
    row = dict(zip(table.keys, table.rows, strict=True))["mosar"]
    values = [made_perplexity(Cell(variant="mosar", preset="small", seed=s), 4) for s in range(3)]
    cell = row[column(table, "perplexity, 4×", "ours")]
    assert cell.sort == pytest.approx(statistics.fmean(values))
    assert cell.text == f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"
    assert row[column(table, "perplexity, 4×", "paper, 8k")].text == "12.208"
    assert row[column(table, "vs RoPE, 4×", "paper, 8k")].text == "−19.6 %"
    assert row[column(table, "vs RoPE, 1×", "paper, 2k")].text == "−1.99 %"
    assert row[column(table, "reach", "paper")].text == "0.2210"
    assert row[-1].text == "3" and table.columns[-1].label == "seeds"
    # What one looks for first.
    assert table.columns[1].group == "perplexity, 1×"


def test_main_table_has_the_best_first_and_marked(comparison):
    table = main_table(comparison)
    index = column(table, "perplexity, 4×", "ours")
    figures = [row[index].sort for row in table.rows]
    assert figures == sorted(figures)
    assert [row[index].best for row in table.rows] == [True] + [False] * 7
    paper = column(table, "perplexity, 2×", "paper, 4k")
    (best,) = [key for key, row in zip(table.keys, table.rows, strict=True) if row[paper].best]
    assert best == "mosar"


def test_many_variants_are_grouped_by_family(tmp_path):
    c = compare_many(tmp_path)
    assert set(c.featured) == {"rope", "alibi", "mosar", "fox", *("t5", "kerple", "xpos")}
    table = main_table(c)
    families = [family for family, _ in groupby(table.groups)]
    assert len(families) == len(set(families)) == 4 and table.keys[0] == "fox"
    index = column(table, "perplexity, 4×", "ours")
    for family in families:
        rows = zip(table.groups, table.rows, strict=True)
        figures = [row[index].sort for group, row in rows if group == family]
        assert figures == sorted(figures)
    ranked = main_table(c, grouped=False)
    assert ranked.keys == tuple(c.ranked(4.0)) and ranked.groups == ()


def test_methods_are_compared_by_what_was_measured(tmp_path):
    c = compare_many(tmp_path)
    table = gap_table(c)
    rows = dict(zip(table.keys, table.rows, strict=True))
    told = {name: [cell.text for cell in rows[name][1:3]] for name in rows}
    assert told["mosar"] == told["fox"] == ["yes", "learned"]
    assert told["alibi"] == told["xpos"] == ["no", "fixed"]
    assert told["nsa"] == ["yes", "no"] and told["rope"] == ["no", "no"]
    # Executed sparsely, not as it was trained.
    sparse = Setting("mosar", 4.0, "sparse")
    assert rows["mosar"][column(table, "perplexity", "4×")].sort == c.estimate(sparse).mean
    density = c.estimate(sparse, lambda record: record.density).mean
    assert rows["mosar"][column(table, "pairs read", "4×")].sort == density < 1
    far = column(table, "far passkey", "4×")
    assert 0 < rows["mosar"][far].sort < 1 and rows["fox"][far].text == "–"


@pytest.mark.parametrize("name", VARIANTS)
def test_a_geometry_that_routes_or_reads_by_content_is_adaptive(name):
    geometry = VARIANTS[name].geometry_class
    if geometry.routed or getattr(geometry, "reads_by_content", False):
        assert geometry.adaptive


def table_names(comparison):
    return [table.name for table in all_tables(make_sections(comparison))]


def test_modes_have_rows_of_their_own(tmp_path):
    write_experiment(tmp_path, variants=("rope", "mosar"), seeds=(0,))
    before = Comparison(load_experiment(tmp_path))
    assert mode_table(before).rows == () and "modes" not in table_names(before)
    record = make_evaluation(Cell(variant="rope", preset="small", seed=0), 4, "yarn")
    append_record(tmp_path / "records" / "modes.jsonl", replace(record, loss=record.loss + 0.1))
    after = Comparison(load_experiment(tmp_path))
    assert main_table(after) == main_table(before)
    (row,) = mode_table(after).rows
    assert row[0].text == "RoPE · yarn"
    assert row[column(mode_table(after), "4×", "vs as trained")].text == "+10.5 %"
    assert row[column(mode_table(after), "4×", "density")].text == share(record.density)
    assert "modes" in table_names(after)


def test_a_figure_of_fewer_seeds_says_so(tmp_path, comparison):
    folder = write_experiment(
        tmp_path, variants=("rope",), seeds=(0, 1), retrieval=False, benchmarks=False
    )
    path = folder / "records" / "rope-seed1.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    table = main_table(Comparison(load_experiment(folder)))
    assert table.rows[0][column(table, "perplexity, 4×", "ours")].text.endswith("(n=1)")
    assert "n=" not in table.rows[0][column(table, "perplexity, 2×", "ours")].text


def test_routing_table_has_the_papers_under_ours(comparison):
    table = routing_table(comparison)
    assert len(table.rows) == 12
    ours, theirs = table.rows[:2]
    assert (ours[2].text, theirs[2].text) == ("ours", "paper, 2k")
    assert theirs[6].text == "+3.5 %"
    soft, top1 = ours[3].sort, ours[4].sort
    # A mean of ratios and a ratio of means differ by little.
    assert ours[6].sort == pytest.approx((top1 / soft - 1) * 100, abs=0.01)


def test_sparse_table(comparison):
    table = sparse_table(comparison)
    row = table.rows[2]
    (record,) = [r for r in comparison.records("mosar", 4.0, "top1") if r.cell.seed == 0]
    masses = record.discarded_mass
    assert row[3].sort == pytest.approx(statistics.fmean(layer["mean"] for layer in masses))
    # As `mosar evaluate` shows it: of the layer where it is highest.
    assert row[4].sort == pytest.approx(max(layer["p95"] for layer in masses))
    assert row[5].sort == pytest.approx(max(layer["worst"] for layer in masses))
    assert row[9].text.split()[0].startswith("2.")


def test_pair_table_of_the_default_geometry():
    from mosar.core.config import MoSARConfig

    rows = [[cell.text for cell in row] for row in pair_table(MoSARConfig()).rows]
    assert rows == [
        ["SS", "128", "96", "32"],
        ["SM", "320", "200", "120"],
        ["MM", "512", "256", "256"],
        ["SG", "1088", "952", "136"],
        ["MG", "1280", "960", "320"],
        ["GG", "∞", "∞", "0"],
    ]


def test_rows_have_a_cell_for_each_column(comparison):
    for table in all_tables(make_sections(comparison)):
        assert {len(row) for row in table.rows} == {len(table.columns)}, table.name
        assert not table.keys or len(table.keys) == len(table.rows)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_main_table_in_a_terminal(comparison, width):
    text = main_table_text(comparison.experiment, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= max(width, 48)
    assert "…" not in text or width < 48
    assert sum("MoSAR" in line for line in lines) == 2
    assert ("paper" in text) == (width >= 120)
    assert ("±" in text) == (width >= 100)


NASTY = r"100 % of $x_1 & {y} ~ ^ \ # | < > “é” → ± × 漢字 *bold* `code` [a](b)"


def nasty_table():
    return Table(
        name="nasty_1",
        title=NASTY,
        caption=NASTY,
        columns=(Column(NASTY, numeric=False), Column("ours", NASTY)),
        rows=((TableCell(NASTY), TableCell("−1.5 ± 0.2 %", -1.5, best=True)),),
        groups=(NASTY,),
    )


def test_markdown_cannot_be_broken_by_what_is_in_it():
    text = markdown_tables([nasty_table()], NASTY)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 4
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {3}
    assert r"\*bold\*" in text and "**−1.5 ± 0.2 %**" in text


def test_latex_cannot_be_broken_by_what_is_in_it():
    text = latex_tables([nasty_table()])
    body = [line for line in text.splitlines() if not line.startswith("%")]
    joined = "\n".join(body)
    assert joined.isascii() or set(joined) - set("é") <= set(map(chr, range(128)))
    # No special character is left without its backslash, but the ampersands between cells.
    for line in body:
        bare = re.sub(r"\\[\\{}$&%#_]", "", line)
        assert not re.search(r"[$%#~^]", bare), line
    assert sum(bare.count("&") for bare in (re.sub(r"\\&", "", x) for x in body)) == 3
    assert r"\textbf{\ensuremath{-}1.5 \ensuremath{\pm} 0.2 \%}" in text
    for environment in ("table", "tabular"):
        assert text.count(rf"\begin{{{environment}}}") == text.count(rf"\end{{{environment}}}")
    assert latex("a_b") == r"a\_b"


def test_latex_of_a_whole_report(comparison):
    text = latex_tables(all_tables(make_sections(comparison)))
    depth = 0
    for character in re.sub(r"\\[{}\\]", "", text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth >= 0
    assert depth == 0
    assert text.count(r"\toprule") == text.count(r"\bottomrule") >= 8


def test_numbers():
    assert number(-1.25, 1) == "−1.2" and number(-0.01, 1) == "0.0"
    assert number(0.5, 1, signed=True) == "+0.5" and number(0.0, 1, signed=True) == "0.0"
    assert [perplexity(x) for x in (12.3456, 31.239, 210.51, 4096.4, 1.5e9)] == [
        *("12.346", "31.24", "210.5", "4096", "1.5e+09")
    ]
    assert percent(-19.61) == "−19.6 %" and share(0.00012) == "1.2e-04" and share(0.0) == "0.000"
    assert [count(x) for x in (1600, 3_276_800, 5e9)] == ["1,600", "3.28 M", "5 B"]
    assert [duration(x) for x in (12, 600, 7200)] == ["12 s", "10 min", "2 h"]
    assert [setting(x) for x in (None, True, 1e-6, [0.9, 0.95], 610000, {"a": 1})] == [
        *("–", "yes", "1e-06", "0.9, 0.95", "610,000", "a 1")
    ]


def test_spread_has_the_decimals_of_the_mean():
    assert spread(Estimate({0: 31.0, 1: 31.5}), perplexity) == "31.25 ± 0.35"
    assert spread(Estimate({0: 31.0}), perplexity) == "31.00"
    assert spread(Estimate({0: -2.0, 1: -3.0}), percent) == "−2.5 ± 0.7 %"
    assert spread(Estimate({0: 1e9, 1: 2e9}), perplexity) == "1.5e+09 ± 7e+08"
    assert spread(Estimate({0: 2.0, 1: 3.0}), lambda x: f"{x:.1f}×") == "2.5 ± 0.7×"
    assert math.isclose(Estimate({0: 1.0, 1: 3.0}).sd, math.sqrt(2))
