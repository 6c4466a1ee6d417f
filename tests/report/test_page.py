"""The page: whole, self-contained, the same for the same records, for any part of an experiment."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from mosar.core.config import MoSARConfig
from mosar.report.curves import retrieval
from mosar.report.drawing import draw_support, y_domain
from mosar.report.length_charts import delta_by_length
from mosar.report.palette import VARIANTS, variant_looks
from mosar.report.sections import make_sections
from mosar.report.summary import abstract
from mosar.report.support import fixed_grids, routed_grids
from report import synthetic
from report.synthetic import ALL, compare, render

VOID = {"meta", "link"}


class Outline(HTMLParser):
    """Checks that tags are closed, and collects what tests ask for."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        values = dict(attrs)
        self.attributes.append((tag, values))
        self.ids += [values["id"]] if "id" in values else []

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (self.open[-5:], tag, self.getpos())
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data.strip())

    @property
    def text(self):
        return " ".join(text for text in self.texts if text)


@pytest.fixture(scope="module")
def outline(page):
    return Outline(page)


def test_page_is_well_formed_and_needs_nothing_else(page, outline):
    assert page.startswith("<!doctype html>")
    assert len(outline.ids) == len(set(outline.ids))
    for tag, values in outline.attributes:
        assert tag not in ("img", "iframe", "object", "embed")
        for name in ("src", "href", "xlink:href"):
            value = values.get(name) or "#"
            assert value.startswith(("#", "data:")), (tag, value)
            assert value == "#" or not value.startswith("#") or value[1:] in outline.ids
        clip = values.get("clip-path", "")
        assert not clip or clip.removeprefix("url(#").rstrip(")") in outline.ids
        # Pictures say what they show.
        if tag == "svg":
            assert values.get("aria-hidden") == "true" or values.get("aria-label")
        assert tag != "th" or values.get("scope") in ("row", "col", "colgroup")
    style = re.search(r"<style>(.*?)</style>", page, re.S)[1]
    assert "@import" not in style and "url(" not in style
    (policy,) = [v["content"] for _, v in outline.attributes if "http-equiv" in v]
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy
    script = re.search(r"<script>(.*?)</script>", page, re.S)[1]
    assert not re.search(r"fetch|XMLHttpRequest|import\(|eval|http|innerHTML", script)


def test_page_says_what_was_found_and_by_which_rules(page, outline):
    for figure in ("12.208", "11.753", "−19.6 %", "0.2210", "+95.0 %", "0.1544"):
        assert figure in outline.text
    assert "Of 30 claims with figures" in outline.text
    for part in ("4.30 for three seeds", "two one-sided tests", "2026-11-16", "± 0.2 %"):
        assert part in outline.text
    for part in ("Attention benchmark", "Decoding benchmark", "Training benchmark"):
        assert part in outline.text
    assert "one step of decoding" in outline.text and "2.5×" in outline.text
    assert "alibi-seed7" in outline.text and "loss is not finite at step 17" in outline.text


def test_rows_of_a_table_have_the_colours_of_their_variants(page):
    """Where the paper's rows lie beneath ours, too."""
    table = re.search(r'id="table-routing".*?</table>', page, re.S)[0]
    rows = re.findall(r'<tr style="--l:(#\w+);.*?</i>([\w-]+)<', table, re.S)
    expected = [(VARIANTS[v].light, VARIANTS[v].label) for v in ("mosar", "mosar-cost")]
    assert rows == [row for row in expected for _ in range(3)]


def test_the_abstract_compares_within_seeds(tmp_path):
    """A good seed that others do not have makes no variant the best."""
    several = {"rope": (0, 1), "alibi": (0, 1, 2), "mosar": (1,)}
    c = compare(tmp_path, variants=tuple(several), seeds=several, retrieval=True)
    means = {v: c.records(v, 4.0, c.own_routing(v)) for v in several}
    (alibi,) = [record for record in means["alibi"] if record.cell.seed == 1]
    said = "Over the 1 seed that all variants have, the lowest perplexity at 4× is "
    assert f"{said}MoSAR's ({means['mosar'][0].perplexity:.2f})" in abstract(c)
    assert f"before ALiBi's ({alibi.perplexity:.2f})" in abstract(c)


FULL = {"retrieval": True, "benchmarks": True}
PARTS = {
    "one variant, one seed": {"variants": ("rope",), "seeds": (0,)},
    "mosar alone": {"variants": ("mosar",), "seeds": (0,)} | FULL,
    "one length": {"variants": ("rope", "alibi"), "seeds": (0, 1), "factors": (1,)},
    "odd lengths": {"variants": ("rope", "mosar"), "seeds": (0,), "factors": (2, 3, 8)},
    "unknown variants": {"variants": ("rope", "nope", "yarn"), "seeds": (0,)} | FULL,
    "uneven seeds": {"variants": ALL, "seeds": {"rope": (0, 1, 2), "mosar": (1, 2)}},
    "grid alone": {"variants": (), "grid": {"attention.barrier": (4, 6)}},
    "grid of words": {"variants": (), "grid": {"attention.composition": ("min", "max")}},
    "benchmarks alone": {"variants": (), "benchmarks": True},
    "no perplexity": {"variants": ("rope", "fixed-m", "mosar"), "seeds": (0, 1), "factors": ()}
    | FULL,
}


@pytest.mark.parametrize("name", PARTS)
def test_any_part_of_an_experiment_makes_a_page(tmp_path, name):
    page = render(compare(tmp_path / "part", **PARTS[name]))
    outline = Outline(page)
    assert not re.search(r"\b(nan|NaN|None|inf|Infinity)\b", outline.text)
    drawn = " ".join(f"{a.get('d')} {a.get('data-y')}" for _, a in outline.attributes)
    assert not re.search(r"nan|inf", drawn)
    # Every section is there, with something to see or a line about what is missing.
    bodies = re.findall(r"<section id=.*?</section>", page, re.S)
    assert len(bodies) == 11
    assert all(re.search(r"<svg|<table|class=\"missing\"", body) for body in bodies)


def test_what_is_missing_is_said(tmp_path):
    page = render(compare(tmp_path, variants=("alibi",), seeds=(0,)))
    missing = " ".join(re.findall(r'class="missing">(.*?)<', page))
    for part in ("RoPE was not evaluated", "No variant with routers", "No retrieval task"):
        assert part in missing
    assert "No benchmark" in missing and "(--grid)" in missing


def test_retrieval_is_in_the_abstract(tmp_path):
    c = compare(tmp_path, variants=("fixed-m", "mosar"), seeds=(0,), factors=(), retrieval=True)
    said = r"farther away than 128 tokens: MoSAR 9\d % and Fixed-M \d % \(passkey\)"
    assert re.search(said, abstract(c)) and "3.28 M tokens of articles" in abstract(c)


def test_regimes_of_any_number_and_name(tmp_path, monkeypatch):
    reaches = {"near": 16.0, "nether": 64.0, "mid": 200.0, "all": 512.0}
    regimes = [{"name": n, "reach": r, "plateau": float(r == 512)} for n, r in reaches.items()]
    plain_config, plain_routing = synthetic.make_config, synthetic._with_routing

    def config(cell):
        made = plain_config(cell)
        made["attention"]["regimes"] = regimes
        return made

    def split(shares):
        return {side: [[a / 2, a / 2, b, c] for a, b, c in rows] for side, rows in shares.items()}

    def routing(record, factor):
        made = plain_routing(record, factor)
        letters = str.maketrans("SMG", "nea")
        return replace(
            made,
            regimes=list(reaches),
            shares_soft=split(made.shares_soft),
            shares_top1=split(made.shares_top1),
            example_labels={
                side: [layer.translate(letters) for layer in rows]
                for side, rows in made.example_labels.items()
            },
        )

    monkeypatch.setattr(synthetic, "make_config", config)
    monkeypatch.setattr(synthetic, "_with_routing", routing)
    text = Outline(render(compare(tmp_path, variants=("mosar",), seeds=(0,)))).text
    assert "near–nether" in text and "MoSAR, layer 6" in text


def test_support_grids_are_the_supports(comparison):
    short, medium, whole = grids = fixed_grids(comparison.geometry("mosar"))
    assert [grid.title for grid in grids] == [f"every token {name}" for name in "SMG"]
    # A band of 32 positions and its own: d = 0 .. 32.
    pairs = 512 * 513 / 2
    assert short.density == pytest.approx((33 * 512 - 32 * 33 / 2) / pairs)
    assert medium.density == pytest.approx((129 * 512 - 128 * 129 / 2) / pairs)
    assert whole.density == 1.0 and all(s == 1.0 for row in whole.shares for s in row)
    assert whole.size <= 48 and [len(row) for row in whole.shares] == [*range(1, whole.size + 1)]
    said = draw_support(short).label
    assert "of the causal pairs of 512 tokens are inside the support" in said
    first = routed_grids(comparison, "mosar")[0]
    # Cells weigh their pairs: their mean is the density.
    inside = total = 0.0
    for row, shares in enumerate(first.shares):
        edge = min(first.block, 512 - row * first.block)
        for column, portion in enumerate(shares):
            size = edge * first.block if column < row else edge * (edge + 1) / 2
            inside += portion * size
            total += size
    assert total == pairs
    assert inside / total == pytest.approx(first.density, rel=1e-5)


def test_supports_are_drawn_over_the_training_length(tmp_path, monkeypatch):
    """However few tokens a record holds, each regime's band is seen."""
    plain = synthetic._labels
    monkeypatch.setattr(synthetic, "_labels", lambda *args: plain(*args)[:100])
    c = compare(tmp_path, variants=("mosar",), seeds=(0,))
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
    looks = variant_looks([*ALL, "nope", "yarn", "xpos", "x"])
    for ground, paper in (("light", "#ffffff"), ("dark", "#191e27")):
        shades = [getattr(look, ground) for look in looks.values()]
        assert len(set(shades)) == len(looks)
        assert min(_contrast(shade, paper) for shade in shades) >= 2.9
    assert len({(look.marker, look.dash) for look in looks.values()}) == len(looks)


def _contrast(a, b):
    def luminance(colour):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_papers_collapse_does_not_press_ours_together(comparison, page):
    chart = delta_by_length(comparison)
    paper = [line for line in chart.series if line.note == "paper"]
    assert max(p.y for line in paper for p in line.points) == pytest.approx(95.0, abs=0.1)
    own = [p.y for line in chart.series if line.note != "paper" for p in line.points]
    low, high = y_domain(chart, chart.series)
    assert chart.cap == 5.0 and high < 6 and low < min(own)
    assert "p-RoPE, paper (up to +95.0 % at 8k)" in page


def test_differences_above_rope_are_not_cut(tmp_path, monkeypatch):
    worse = dict.fromkeys(("alibi", "mosar", "fixed-m"), (1.2, 1.3, 1.9))
    monkeypatch.setattr(synthetic, "_QUALITY", synthetic._QUALITY | worse)
    chart = delta_by_length(compare(tmp_path, variants=("rope", *worse)))
    ours = [p.y for line in chart.series if line.note != "paper" for p in line.points]
    assert y_domain(chart, chart.series)[1] > max(ours)


def test_points_of_retrieval_lie_within_their_distances(tmp_path):
    c = compare(tmp_path, variants=("mosar",), seeds=(0,), factors=(), retrieval=True)
    (record, *_) = (r for r in c.retrievals if r.task == "recall")
    rows = [[1, 2, 1.0, 8], [2, 3, 0.9, 8], [3, 5, 0.8, 8], [5, 33, 0.7, 8], [33, 129, 0.5, 8]]
    c.retrievals[:] = [replace(record, by_distance=rows, length=2048, routing="soft")]
    chart = retrieval(c, "recall", 2048)
    places = [point.x for point in chart.series[0].points]
    assert places == pytest.approx([1, 2, 12**0.5, 160**0.5, (33 * 128) ** 0.5])
    # The last distance is 128: S and M end within, G does not.
    assert [mark.label for mark in chart.marks] == ["S 32", "M 128"]
