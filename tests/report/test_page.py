"""The page: whole, self-contained, the same for the same records, for any part of an experiment."""

import ast
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mosar.core.config import MoSARConfig
from mosar.files import sealed, unsealed
from mosar.records import Cell
from mosar.report import elements
from mosar.report.charts import (
    Chart,
    Point,
    Series,
    nice_step,
    padded,
    place,
    tick_label,
    ticks,
    y_domain,
)
from mosar.report.comparison import Comparison
from mosar.report.curves import perplexity_by_position, retrieval
from mosar.report.experiment import load_experiment
from mosar.report.length_charts import delta_by_length
from mosar.report.page import render_page
from mosar.report.palette import VARIANTS, variant_looks
from mosar.report.sections import make_sections
from mosar.report.summary import abstract
from mosar.report.support import fixed_grids, grid_svg, routed_grids
from report import synthetic
from report.synthetic import ALL, write_cell, write_experiment

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Outline(HTMLParser):
    """Checks that tags are closed, and collects what tests ask for."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.attributes, self.headings, self.texts = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.attributes.append((tag, values))
        if "id" in values:
            self.ids.append(values["id"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (self.open[-5:], tag, self.getpos())
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)
            if self.open[-1] in ("h1", "h2"):
                self.headings.append(data)


def compared(folder, **changes):
    return Comparison(load_experiment(write_experiment(folder, **changes)))


def render(folder, **changes):
    c = compared(folder, **changes)
    return render_page(c, make_sections(c), [])


def test_page_is_well_formed(page):
    outline = Outline(page)
    assert len(outline.ids) == len(set(outline.ids))
    assert outline.headings[0] == "small"
    anchors = [v["href"][1:] for tag, v in outline.attributes if tag == "a"]
    assert set(anchors) <= set(outline.ids)


def test_page_needs_nothing_else(page):
    outline = Outline(page)
    for tag, values in outline.attributes:
        assert tag not in ("img", "iframe", "object", "embed")
        for name in ("src", "href", "xlink:href"):
            value = values.get(name) or "#"
            assert value.startswith(("#", "data:")), (tag, value)
    style = re.search(r"<style>(.*?)</style>", page, re.S)[1]
    assert "@import" not in style and "url(" not in style
    (policy,) = [v["content"] for _, v in outline.attributes if "http-equiv" in v]
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy
    script = re.search(r"<script>(.*?)</script>", page, re.S)[1]
    assert not re.search(r"fetch|XMLHttpRequest|import\(|eval|http|innerHTML", script)


def test_pictures_say_what_they_show(page):
    for tag, values in Outline(page).attributes:
        if tag == "svg":
            assert values.get("aria-hidden") == "true" or values.get("aria-label")
        if tag == "th":
            assert values.get("scope") in ("row", "col", "colgroup")


def test_equal_records_give_an_equal_page(page, folder):
    c = Comparison(load_experiment(folder))
    assert render_page(c, make_sections(c), []) == page


def test_page_holds_the_paper_beside_ours(page):
    text = " ".join(Outline(page).texts)
    for figure in ("12.208", "11.753", "−19.6 %", "0.2210", "+95.0 %", "0.1544"):
        assert figure in text
    assert "Of 30 claims with figures" in text


def test_page_says_its_rules_and_when_they_were_set(page):
    text = " ".join(Outline(page).texts)
    for part in ("4.30 for three seeds", "two one-sided tests", "2026-11-16", "± 0.2 %"):
        assert part in text


def test_the_abstract_compares_within_seeds(tmp_path):
    """A good seed that others do not have makes no variant the best."""
    several = {"rope": (0, 1), "alibi": (0, 1, 2), "mosar": (1,)}
    c = compared(tmp_path, variants=tuple(several), seeds=several, benchmarks=False)
    means = {v: c.records(v, 4.0, c.own_routing(v)) for v in several}
    (alibi,) = [record for record in means["alibi"] if record.cell.seed == 1]
    said = "Over the 1 seed that all variants have, the lowest perplexity at 4× is "
    assert f"{said}MoSAR's ({means['mosar'][0].perplexity:.2f})" in abstract(c)
    assert f"before ALiBi's ({alibi.perplexity:.2f})" in abstract(c)


PARTS = {
    "one variant, one seed": {"variants": ("rope",), "seeds": (0,)},
    "mosar alone": {"variants": ("mosar",), "seeds": (0,)},
    "no routers": {"variants": ("rope", "alibi"), "seeds": (0, 1)},
    "one length": {"variants": ("rope", "mosar"), "seeds": (0, 1), "factors": (1,)},
    "odd lengths": {"variants": ("rope", "mosar"), "seeds": (0,), "factors": (2, 3, 8)},
    "unknown variants": {"variants": ("rope", "nope", "yarn"), "seeds": (0,)},
    "uneven seeds": {"variants": ALL, "seeds": {"rope": (0, 1, 2), "mosar": (1, 2)}},
    "failed cells": {"variants": ("rope",), "seeds": (0,), "failures": ["mosar-seed0", "x"]},
    "grid alone": {"variants": (), "grid": {"attention.barrier": (4, 6)}},
    "grid of words": {"variants": (), "grid": {"attention.composition": ("min", "max")}},
    "benchmarks alone": {"variants": (), "benchmarks": True},
    "no perplexity": {"variants": ("rope", "fixed-m", "mosar"), "seeds": (0, 1), "factors": ()},
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("more", [False, True], ids=["bare", "with retrieval and benchmarks"])
def test_any_part_of_an_experiment_makes_a_page(tmp_path, name, more):
    changes = {"retrieval": more, "benchmarks": more} | PARTS[name]
    page = render(tmp_path / "part", **changes)
    outline = Outline(page)
    text = " ".join(outline.texts)
    assert not re.search(r"\b(nan|NaN|None|inf|Infinity)\b", text)
    drawn = " ".join(
        f"{v}" for _, a in outline.attributes for v in (a.get("d"), a.get("transform"))
    )
    assert not re.search(r"nan|inf", drawn)
    # Every section is there, with something to see or a line about what is missing.
    sections = re.findall(r'<section id="(\w+)".*?</section>', page, re.S)
    assert len(sections) == 11
    bodies = re.findall(r"<section id=.*?</section>", page, re.S)
    assert all(re.search(r"<svg|<table|class=\"missing\"", body) for body in bodies)


def test_what_is_missing_is_said(tmp_path):
    page = render(tmp_path, variants=("alibi",), seeds=(0,), retrieval=False, benchmarks=False)
    missing = re.findall(r'class="missing">(.*?)<', page)
    for part in ("RoPE was not evaluated", "No variant with routers", "No retrieval task"):
        assert any(part in line for line in missing)
    assert any("No benchmark" in line for line in missing)
    assert any("(--grid)" in line for line in missing)


def test_every_kind_of_benchmark_is_shown(page):
    for part in ("Attention benchmark", "Decoding benchmark", "Training benchmark"):
        assert part in page
    assert "one step of decoding" in page and "2.5×" in page


def test_retrieval_is_in_the_abstract(tmp_path):
    page = render(tmp_path, variants=("fixed-m", "mosar"), seeds=(0,), factors=(), benchmarks=False)
    abstract = re.search(r'class="abstract">(.*?)</p>', page, re.S)[1]
    said = r"farther away than 128 tokens: MoSAR 9\d % and Fixed-M \d % \(passkey\)"
    assert re.search(said, abstract)
    assert "3.28 M tokens of articles" in abstract


def test_failed_cells_are_shown(page):
    assert "alibi-seed7" in page and "loss is not finite at step 17" in page


def test_names_cannot_break_out(tmp_path):
    bad = "<script>alert(1)</script>\"'&"
    write_experiment(tmp_path, variants=("rope",), seeds=(0,), retrieval=False, benchmarks=False)
    # A file cannot have this name, a record can.
    path = next((tmp_path / "records").glob("*.jsonl"))
    lines = [unsealed(json.loads(line))[0] for line in path.read_text().splitlines()]
    for line in lines:
        line["cell"]["variant"] = bad
    path.write_text("\n".join(json.dumps(sealed(line, digits=16)) for line in lines))
    c = Comparison(load_experiment(tmp_path))
    page = render_page(c, make_sections(c), [])
    assert c.variants == [bad]
    Outline(page)
    assert "<script>alert" not in page


def test_only_one_module_writes_markup():
    """No other has a tag in a string, or says of a string that it is markup."""
    for path in Path(elements.__file__).parent.glob("*.py"):
        if path.name == "elements.py":
            continue
        tree = ast.parse(path.read_text())
        words = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        tags = [word for word in words if isinstance(word, str) and re.search(r"<[a-z/!]", word)]
        # The pattern that finds the names of former figures.
        assert all(path.name == "write.py" and "<meta" in word for word in tags), path.name
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert not [f for f in calls if isinstance(f, ast.Name) and f.id == "Markup"], path.name


def test_text_and_attributes_are_escaped():
    assert elements.tag("p", "a<b", title='"><i>') == '<p title="&quot;&gt;&lt;i&gt;">a&lt;b</p>'
    inner = elements.tag("b", "x & y", class_="k", data_key=0.5, hidden=None, style="")
    assert inner == '<b class="k" data-key="0.5">x &amp; y</b>'
    assert elements.tag("p", inner, "<") == f"<p>{inner}&lt;</p>"
    # Formatted or joined elsewhere it is text again.
    assert elements.tag("p", f"{inner}").startswith("<p>&lt;b")
    assert elements.tag("line", x1=1.5) == '<line x1="1.5"/>'


def test_regimes_of_any_number_and_name(tmp_path, monkeypatch):
    regimes = [
        {"name": "near", "reach": 16.0, "plateau": 0.5},
        {"name": "nether", "reach": 64.0, "plateau": 0.5},
        {"name": "mid", "reach": 200.0, "plateau": 0.5},
        {"name": "all", "reach": 512.0, "plateau": 1.0},
    ]
    plain_config, plain_routing = synthetic.make_config, synthetic._with_routing

    def config(cell):
        made = plain_config(cell)
        made["attention"]["regimes"] = regimes
        return made

    def routing(record, factor):
        from dataclasses import replace

        made = plain_routing(record, factor)

        def split(shares):
            return {
                side: [[a / 2, a / 2, b, c] for a, b, c in rows] for side, rows in shares.items()
            }

        labels = {
            side: [layer.replace("S", "n").replace("M", "e").replace("G", "a") for layer in rows]
            for side, rows in made.example_labels.items()
        }
        return replace(
            made,
            regimes=[regime["name"] for regime in regimes],
            shares_soft=split(made.shares_soft),
            shares_top1=split(made.shares_top1),
            example_labels=labels,
        )

    monkeypatch.setattr(synthetic, "make_config", config)
    monkeypatch.setattr(synthetic, "_with_routing", routing)
    page = render(tmp_path, variants=("mosar",), seeds=(0,), retrieval=False, benchmarks=False)
    text = " ".join(Outline(page).texts)
    assert "near–nether" in text and "MoSAR, layer 6" in text


def test_support_grids_are_the_supports(comparison):
    config = comparison.geometry("mosar")
    short, medium, whole = fixed_grids(config)
    # A band of 32 positions and its own: d = 0 .. 32.
    pairs = 512 * 513 / 2
    assert short.density == pytest.approx((33 * 512 - 32 * 33 / 2) / pairs)
    assert medium.density == pytest.approx((129 * 512 - 128 * 129 / 2) / pairs)
    assert whole.density == 1.0 and all(s == 1.0 for row in whole.shares for s in row)
    assert whole.size <= 48 and [len(row) for row in whole.shares] == [*range(1, whole.size + 1)]
    grids = routed_grids(comparison, "mosar")
    assert len(grids) == 6
    # Cells weigh their pairs: their mean is the density.
    first = grids[0]
    weights = [
        [min(first.block, 512 - r * first.block) * first.block if c < r else None
         for c in range(r + 1)]
        for r in range(first.size)
    ]  # fmt: skip
    inside = total = 0.0
    for row, (shares, sizes) in enumerate(zip(first.shares, weights, strict=True)):
        for portion, size in zip(shares, sizes, strict=True):
            if size is None:
                edge = min(first.block, 512 - row * first.block)
                size = edge * (edge + 1) / 2
            inside += portion * size
            total += size
    assert total == pairs
    assert inside / total == pytest.approx(first.density, rel=1e-5)
    assert grid_svg(first).count("<path") >= 3


def test_supports_are_drawn_over_the_training_length(tmp_path, monkeypatch):
    """However few tokens a record holds, each regime's band is seen."""
    plain = synthetic._labels
    monkeypatch.setattr(synthetic, "_labels", lambda *args: plain(*args)[:100])
    c = compared(tmp_path, variants=("mosar",), seeds=(0,), retrieval=False, benchmarks=False)
    (mechanism,) = [section for section in make_sections(c) if section.name == "mechanism"]
    supports = mechanism.items[-1]
    assert [grid.tokens for grid in supports.fixed] == [512] * 3
    assert [grid.density < 0.5 for grid in supports.fixed] == [True, True, False]
    assert {grid.tokens for grid in supports.routed} == {100}
    assert supports.routed[0].remark.endswith(" · 100 tokens")
    assert "first 100 tokens" in supports.caption and "512 tokens" in supports.caption
    assert "a square of 3 × 3 or 11 × 11 pairs" in supports.caption


@pytest.mark.parametrize("length", [2048, 100_000, 2**31 - 1])
def test_supports_of_long_texts_look_like_those_of_short_ones(length):
    """The reaches are in proportion, so the picture is the same and costs the same."""
    grids = fixed_grids(MoSARConfig.scaled(length))
    for grid, expected in zip(grids, fixed_grids(MoSARConfig.scaled(2048)), strict=True):
        assert grid.tokens == length and grid.size <= 48
        assert grid.density == pytest.approx(expected.density, abs=2e-3)


def test_looks_are_apart():
    looks = variant_looks([*ALL, "nope", "yarn", "xpos"])
    assert list(looks)[:8] == list(VARIANTS)
    for shade in ("light", "dark"):
        assert len({getattr(look, shade) for look in looks.values()}) == len(looks)
    assert len({(look.marker, look.dash) for look in looks.values()}) == len(looks)


@pytest.mark.parametrize("ground", ["light", "dark"])
def test_colours_stand_out_from_their_ground(ground):
    paper = {"light": "#ffffff", "dark": "#191e27"}[ground]
    for name, look in variant_looks([*ALL, "a", "b", "c", "d"]).items():
        assert _contrast(getattr(look, ground), paper) >= 2.9, name


def _contrast(a, b):
    def luminance(colour):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_ticks_are_round_and_inside():
    assert ticks(0, 1, log=False) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert ticks(3, 480, log=True) == [5, 10, 20, 50, 100, 200]
    assert ticks(32.1, 34.2, log=True) == pytest.approx([32.5, 33, 33.5, 34])
    for low, high in ((0.013, 0.014), (-31.0, 95.0), (1e-6, 3e-6), (5, 5.0001)):
        found = ticks(low, high, log=False)
        assert 2 <= len(found) <= 7
        assert all(low - 1e-9 <= value <= high + 1e-9 for value in found)
        labels = [tick_label(value, found, "") for value in found]
        assert len(set(labels)) == len(labels)
    assert [nice_step(x) for x in (0.9, 1.1, 2.2, 3, 7)] == [1, 2, 2.5, 5, 10]
    assert tick_label(-20.0, [-20.0, 0.0], " %") == "−20 %"
    assert tick_label(0.0, [-20.0, 0.0], " %") == "0 %"


def test_domains_hold_what_is_drawn():
    low, high = padded([3.0, 5.0], log=False)
    assert low < 3 < 5 < high
    assert padded([3.0, 5.0], log=False, zero=True)[0] == 0
    assert padded([-3.0, 5.0], log=False, zero=True)[0] < -3
    assert padded([3.0, 5.0], log=False, line=-4.0)[0] < -4
    low, high = padded([4.0, 4.0], log=True)
    assert 0 < low < 4 < high
    assert padded([], log=True) == (1.0, 10.0)
    assert place(10, 1, 100, log=True) == pytest.approx(0.5)
    look = VARIANTS["rope"]
    lines = [
        Series(key=str(i), label="", look=look, points=(Point(1, y, ""),))
        for i, y in enumerate((3.0, 4.0, 90.0))
    ]
    chart = Chart(
        name="a", title="", caption="", x_label="", y_label="", series=tuple(lines), cap=5.0
    )
    assert y_domain(chart)[1] < 5
    alone = Chart(
        name="a", title="", caption="", x_label="", y_label="", series=tuple(lines[2:]), cap=5.0
    )
    assert y_domain(alone)[1] > 90


def test_the_papers_collapse_does_not_press_ours_together(comparison):
    chart = delta_by_length(comparison)
    paper = [line for line in chart.series if line.note == "paper"]
    assert max(p.y for line in paper for p in line.points) == pytest.approx(95.0, abs=0.1)
    own = [p.y for line in chart.series if line.note != "paper" for p in line.points]
    assert chart.cap == 5.0 and y_domain(chart)[1] < 6 and y_domain(chart)[0] < min(own)
    assert "p-RoPE, paper (up to +95.0 % at 8k)" in render_page(
        comparison, make_sections(comparison), []
    )


def test_differences_above_rope_are_not_cut(tmp_path, monkeypatch):
    from report import synthetic

    worse = dict.fromkeys(("alibi", "mosar", "fixed-m"), (1.2, 1.3, 1.9))
    monkeypatch.setattr(synthetic, "_QUALITY", synthetic._QUALITY | worse)
    chart = delta_by_length(
        compared(tmp_path, variants=("rope", *worse), retrieval=False, benchmarks=False)
    )
    assert y_domain(chart)[1] > max(
        p.y for line in chart.series if line.note != "paper" for p in line.points
    )


def test_captions_speak_of_what_is_drawn(comparison):
    for factor in comparison.factors:
        chart = perplexity_by_position(comparison, factor)
        assert bool(chart.marks) == (factor > 1) == ("mark" in chart.caption)
    config = comparison.geometry("mosar")
    grids = fixed_grids(config)
    assert [grid.title for grid in grids] == [f"every token {name}" for name in "SMG"]
    assert "of the causal pairs of 512 tokens are inside the support" in grid_svg(grids[0])


def test_points_of_retrieval_lie_within_their_distances(tmp_path):
    c = compared(tmp_path, variants=("mosar",), seeds=(0,), factors=(), benchmarks=False)
    (record, *_) = (r for r in c.retrievals if r.task == "recall")
    rows = [[1, 2, 1.0, 8], [2, 3, 0.9, 8], [3, 5, 0.8, 8], [5, 33, 0.7, 8], [33, 129, 0.5, 8]]
    c.retrievals[:] = [replace(record, by_distance=rows, length=2048, routing="soft")]
    chart = retrieval(c, "recall", 2048)
    places = [point.x for point in chart.series[0].points]
    assert places == pytest.approx([1, 2, 12**0.5, 160**0.5, (33 * 128) ** 0.5])
    # The last distance is 128: S and M end within, G does not.
    assert [mark.label for mark in chart.marks] == ["S 32", "M 128"]


def test_a_cell_without_training_record(tmp_path):
    write_experiment(tmp_path, variants=(), benchmarks=False)
    cell = Cell(variant="mosar", preset="small", seed=0)
    write_cell(tmp_path, cell)
    path = tmp_path / "records" / f"{cell.name}.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    c = Comparison(load_experiment(tmp_path))
    page = render_page(c, make_sections(c), [])
    Outline(page)
    assert "No training record" in page
