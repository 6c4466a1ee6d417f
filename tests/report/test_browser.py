"""The page in a real browser: it draws, sorts, hides, changes colour and fits a phone."""

import json
import re

import pytest

from mosar.files import sealed, unsealed
from mosar.report.comparison import Comparison
from mosar.report.experiment import load_experiment
from report import synthetic
from report.synthetic import compare, compare_many, render, write_experiment

MAIN = "#table-main thead tr:last-child th"
DELTA = "#fig-delta_by_length"


@pytest.fixture(scope="module")
def file(page, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


@pytest.fixture
def tab(browser, file):
    """The page, fresh, on a desktop in the light; afterwards it must have had no error."""
    browser.open(file)
    yield browser
    browser.evaluate("localStorage.clear()")
    assert browser.errors == []
    assert browser.requests == [file.absolute().as_uri()]


def click(tab, selector):
    tab.evaluate(f"document.querySelector({selector!r}).click()")


def each(tab, selector, expression, hidden=False):
    """The value for each element `e` that is not inside of a hidden panel, or for all."""
    wanted = "true" if hidden else "!e.closest('[hidden]')"
    return tab.evaluate(
        f"[...document.querySelectorAll({selector!r})].filter(e => {wanted})"
        f".map(e => {{ const b = e.getBoundingClientRect(); return {expression} }})"
    )


def test_everything_is_drawn(tab):
    """Each figure has a size, and each line of a chart and of a legend too."""
    sizes = each(tab, "figure svg:not(.sample)", "Math.min(b.width, b.height)")
    assert len(sizes) >= 20 and min(sizes) >= 60
    lines = each(tab, ".series[data-x*=' '] > path", "e.getTotalLength()")
    assert len(lines) >= 80 and min(lines) > 10
    samples = each(tab, ".chip:not(.plain) .sample path:not(defs *)", "b.width")
    assert len(samples) >= 60 and min(samples) > 15


def test_no_text_is_cut_off(tab):
    """Labels of charts stay inside of the cards."""
    places = each(
        tab,
        ".chart .plot svg text",
        "[e.textContent, b.width, b.left - e.closest('.card').getBoundingClientRect().left,"
        " e.closest('.card').getBoundingClientRect().right - b.right]",
    )
    assert [text for text, width, *gaps in places if width and min(gaps) < -1] == []


def column(tab, index):
    return each(tab, "#table-main tbody tr", f"e.cells[{index}].dataset.sort")


def test_sorting_sorts(tab):
    heads = each(tab, MAIN, "e.textContent")
    assert heads[0] == "variant" and len(heads) >= 9
    for index in (2, 3, len(heads) - 1):
        before = list(map(float, column(tab, index)))
        for down in (False, True):
            click(tab, f"{MAIN}:nth-child({index + 1}) button")
            assert list(map(float, column(tab, index))) == sorted(before, reverse=down)
    sorts = each(tab, "#table-main thead [aria-sort]", "e.getAttribute('aria-sort')")
    assert sorts == ["none"] * (len(heads) - 1) + ["descending"]
    click(tab, f"{MAIN}:nth-child(1) button")
    names = column(tab, 0)
    assert [name.lower() for name in names] == sorted(name.lower() for name in names)


def test_cells_without_a_figure_sort_last(tab):
    tab.evaluate(
        "(() => { const c = document.querySelector('#table-routing tbody tr').cells[4];"
        " delete c.dataset.sort; c.textContent = 'nothing' })()"
    )
    for _ in range(2):
        click(tab, "#table-routing thead tr:last-child th:nth-child(5) button")
        texts = each(tab, "#table-routing tbody tr", "e.cells[4].textContent")
        assert texts[-1] == "nothing"


def series(tab, key):
    return each(tab, f'.series[data-key="{key}"]', "b.width > 0")


def axis(tab, figure=""):
    """Label and place of every tick of the vertical axes."""
    return each(tab, f"{figure} .tick", "[e.textContent.trim(), b.top]")


def test_legend_hides_a_variant_everywhere(tab):
    chip = "#fig-perplexity_by_length .chip[data-key=p-rope]"
    assert all(series(tab, "p-rope")) and len(series(tab, "p-rope")) >= 5
    click(tab, chip)
    assert not any(series(tab, "p-rope"))
    assert all(series(tab, "mosar")) and all(series(tab, "rope"))
    pressed = each(tab, ".chip[data-key=p-rope]", "e.getAttribute('aria-pressed')", hidden=True)
    assert set(pressed) == {"false"} and len(pressed) >= 5
    click(tab, chip)
    assert all(series(tab, "p-rope"))
    click(tab, f'{DELTA} .chip[data-key="note:paper"]')
    assert not any(each(tab, ".series[data-note=paper]", "b.width > 0", hidden=True))
    assert all(series(tab, "rope"))


def test_axes_follow_what_is_visible(tab):
    """Alone, the variant that collapsed is seen whole; with all it is as Python drew it."""

    def highest():
        labels = [label for label, _ in axis(tab, DELTA)]
        return max(float(label.rstrip(" %").replace("\u2212", "-")) for label in labels)

    def drawn():
        paths = each(tab, ".moves > path", "e.getAttribute('d')", hidden=True)
        return [list(map(float, re.findall(r"-?[\d.]+", path))) for path in paths]

    before, labels = drawn(), axis(tab)
    assert highest() <= 5
    for key in set(each(tab, f"{DELTA} .chip", "e.dataset.key")) - {"p-rope"}:
        click(tab, f'{DELTA} .chip[data-key="{key}"]')
    assert highest() >= 60 and 4 <= len(axis(tab, DELTA)) <= 10
    # Every point of it is inside of the plot, with its marker.
    places = each(tab, f"{DELTA} .series:not(.off) use", "Number(e.getAttribute('y'))")
    assert len(places) == 3 and all(20 <= y <= 270 for y in places)
    assert tab.evaluate("document.getElementById('all').hidden") is False
    click(tab, "#all")
    assert tab.evaluate("document.getElementById('all').hidden") is True
    for (label, y), (was, was_y) in zip(axis(tab), labels, strict=True):
        assert label == was and y == pytest.approx(was_y, abs=1)
    # What matplotlib had cut off at the picture's edge is whole now; of a band without width it had
    # left out the last point.
    pairs = [(a, b) for a, b in zip(drawn(), before, strict=True) if min(b[1::2]) >= 0]
    assert len(pairs) >= 0.85 * len(before)
    for new, old in pairs:
        assert new[: len(old)] == pytest.approx(old, abs=0.15) and len(new) - len(old) in (0, 2)


def test_of_many_variants_a_few_are_shown_at_first(browser, tmp_path):
    path = tmp_path / "index.html"
    path.write_text(render(compare_many(tmp_path / "run")), encoding="utf-8")
    browser.open(path)
    chart = "#fig-perplexity_by_length"

    def drawn():
        return set(each(browser, f"{chart} .series:not(.off)", "e.dataset.key"))

    def chips():
        keys = each(browser, f"{chart} .chip", "b.width && e.dataset.key")
        return {key for key in keys if key}

    few = {"rope", "alibi", "mosar", "fox", "t5", "kerple", "xpos"}
    assert drawn() == chips() == few
    click(browser, f"{chart} .expand")
    everything = {*synthetic.ALL, *synthetic.RIVALS}
    assert chips() == everything and drawn() == few
    click(browser, f'{chart} .chip[data-key="nsa"]')
    assert drawn() == {*few, "nsa"}
    click(browser, "#all")
    assert drawn() == everything
    click(browser, "#all")
    assert drawn() == few
    # Each line has its own colour in the legend.
    stroke = "[e.closest('[data-key]').dataset.key, getComputedStyle(e).stroke]"
    shown = each(browser, f"{chart} .chip .sample path:not(defs *)", stroke)
    lines = each(browser, f"{chart} .series > path", stroke)
    assert dict(shown) == dict(lines) and len({line for _, line in lines}) == len(everything)
    assert len(each(browser, "#table-main tr.group", "1")) == 4
    click(browser, f"{MAIN}:nth-child(2) button")
    assert each(browser, "#table-main tr.group", "1") == []
    places = list(map(float, column(browser, 1)))
    assert places == sorted(places) and len(places) == len(everything)
    assert browser.errors == []


def colours(tab):
    return tab.evaluate(
        "['body', '.card', '.series[data-key=mosar] path', '.series[data-key=rope] path',"
        " '.diagram path', '.support path', '.share path'].map(s => {"
        " const c = getComputedStyle(document.querySelector(s));"
        " return [c.backgroundColor, c.color, c.stroke, c.fill].join() })"
    )


def test_theme_follows_the_system_and_the_button(tab, file):
    light = colours(tab)
    click(tab, "#theme")
    dark = colours(tab)
    assert all(a != b for a, b in zip(light, dark, strict=True))
    # It is remembered, whatever the system prefers.
    tab.open(file, dark=False)
    assert colours(tab) == dark
    click(tab, "#theme")
    assert colours(tab) == light
    tab.evaluate("localStorage.clear()")
    tab.open(file, dark=True)
    assert colours(tab) == dark


def test_page_never_scrolls_sideways_and_is_readable_on_a_phone(tab, file):
    for width in (320, 375, 768, 1280):
        tab.open(file, width=width)
        if width == 375:
            sizes = each(tab, ".chart:not(#fig-architecture) .plot svg text", "b.width && b.height")
            assert min(size for size in sizes if size) >= 9
        tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        tab.evaluate("scrollTo(500, 0)")
        assert tab.evaluate("scrollX") == 0
        # The report's tables fit; numbers of a chart may scroll in their own box.
        overflow = "[e.getAttribute('aria-label'), e.scrollWidth - e.clientWidth]"
        tables = each(tab, ".scroll:has(> .sortable)", overflow)
        if width != 768:
            assert [name for name, excess in tables if excess > 1] == [] and len(tables) >= 8
        if width <= 375:
            labels = each(
                tab,
                "#table-main tbody tr:first-child td",
                "getComputedStyle(e, '::before').content.slice(1, -1)",
            )
            assert labels[0] == "perplexity, 1×" and len(set(labels)) == len(labels) >= 7


def test_tooltip_reads_the_values(tab):
    plot = "#fig-perplexity_by_length .plot"
    tab.evaluate(
        f"document.querySelector('{plot}').scrollIntoView({{behavior: 'instant', block: 'center'}})"
    )
    ((left, top, width, height),) = each(tab, plot, "[b.left, b.top, b.width, b.height]")
    assert tab.evaluate("document.getElementById('tip').hidden") is True
    tab.move(left + width * 0.9, top + height / 2)
    tab.wait("!document.getElementById('tip').hidden")
    text = tab.evaluate("document.getElementById('tip').innerText")
    assert "4× · 2,048" in text and "MoSAR" in text and "±" in text
    # Highest first.
    values = [float(value) for value in re.findall(r"(\d+\.\d+) ±", text)]
    assert len(values) == 8 and values == sorted(values, reverse=True)
    tab.move(5, 5)
    tab.wait("document.getElementById('tip').hidden")


def test_arrow_keys_read_the_values(tab):
    tab.evaluate(f"document.querySelector('{DELTA} .plot').focus()")
    for expected in ("1× · 512", "2× · 1,024"):
        tab.press("ArrowRight")
        assert expected in tab.evaluate("document.getElementById('tip').innerText")
    tab.press("Escape")
    assert tab.evaluate("document.getElementById('tip').hidden") is True


def test_one_of_several_is_shown(tab):
    shown = "[...document.querySelectorAll('#switch-position .panel')].map(p => p.offsetHeight > 0)"
    assert tab.evaluate(shown) == [True, False, False]
    tab.evaluate(
        "(() => { const s = document.querySelector('#switch-position select'); s.value = '2';"
        " s.dispatchEvent(new Event('change')) })()"
    )
    assert tab.evaluate(shown) == [False, False, True]
    layers = "[...document.querySelectorAll('.geometry.switch [data-panel]')].map(p => !p.hidden)"
    assert sum(tab.evaluate(layers)) == 1 and len(tab.evaluate(layers)) == 6


def test_verdicts_can_be_filtered(tab):
    def rows():
        return each(tab, ".claims tbody tr[data-verdict]", "e.dataset.verdict")

    before = rows()
    assert "holds" in before and len(set(before)) > 1
    click(tab, "button[data-verdict=holds]")
    assert rows() == [verdict for verdict in before if verdict != "holds"]
    assert 0 < len(each(tab, ".claims .group", "1")) < 6
    click(tab, "button[data-verdict=holds]")
    assert rows() == before


def test_every_heading_has_its_place_in_the_menu(tab):
    targets = each(tab, ".bar nav a", "document.querySelector(e.hash)?.tagName")
    assert targets == ["SECTION"] * 11


def test_only_a_part_of_an_experiment(browser, tmp_path):
    path = tmp_path / "index.html"
    path.write_text(render(compare(tmp_path, variants=("rope",), seeds=(0,))), encoding="utf-8")
    browser.open(path, width=375)
    assert browser.errors == []
    assert browser.evaluate("document.documentElement.scrollWidth") == 375
    assert browser.evaluate("document.querySelectorAll('.missing').length") >= 5


# The harmless one has its length, so that both pages draw as many labels.
HOSTILE = "".join(
    (
        '"><script>window.ran=1</script>',
        "'\"><img src=x onerror=ran=1>",
        "' onload=ran=1 x=' \" onfocus=ran=1 autofocus y=\"",
        "</title></style></svg><svg onload=ran=1>&lt;",
        "{{ 7 * 7 }}{% raw %}",
    )
)
# Where another text would leave a section out.
KEPT = {"kind", "created", "example_labels", "routing", "composition", "task"}


def with_suffix(value, suffix, key=""):
    """Every text of a record with something behind it: values, and keys of free objects."""
    if key in KEPT:
        return value + suffix if value in ("passkey", "recall") else value
    if key == "regimes" and value is None:
        value = [{"name": n, "reach": r, "plateau": 0.5} for n, r in synthetic.REACHES.items()]
    if isinstance(value, str):
        return value + suffix
    if isinstance(value, list):
        return [with_suffix(part, suffix) for part in value]
    if isinstance(value, dict):
        free = key in ("environment", "data", "reaches", "measurements", "checks")
        changed = {
            name + suffix if free else name: with_suffix(part, suffix, name)
            for name, part in value.items()
        }
        # The claims are about variants by name: one seed keeps it.
        return changed | (
            {"variant": value["variant"]} if key == "cell" and value["seed"] == 0 else {}
        )
    return value


def altered_page(folder, into, suffix):
    """The page of the same records with a suffix at every text."""
    for path in folder.rglob("*.json*"):
        target = into / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Whoever can write a record can give it its checksum, too.
        values = (unsealed(json.loads(line))[0] for line in path.read_text().splitlines())
        lines = [json.dumps(sealed(with_suffix(value, suffix), digits=16)) for value in values]
        target.write_text("\n".join(lines))
    page = into / "index.html"
    page.write_text(render(Comparison(load_experiment(into))), encoding="utf-8")
    return page


def elements(tab):
    """How many of each kind, and the names of all attributes."""
    return tab.evaluate(
        "(() => { const kinds = {}, names = new Set(); for (const e of "
        "document.querySelectorAll('*')) { kinds[e.tagName] = (kinds[e.tagName] ?? 0) + 1;"
        " for (const a of e.attributes) names.add(a.name) }"
        " return [kinds, [...names].sort()] })()"
    )


def test_no_text_of_a_record_becomes_markup(browser, tmp_path):
    """Not when the page is made, nor when it is used: the same elements, and no script runs."""
    folder = write_experiment(
        tmp_path / "plain",
        variants=("rope", "mosar"),
        seeds=(0, 1),
        grid={"attention.barrier": [4.0, 8.0]},
        failures=["alibi-seed7"],
    )
    found = []
    for suffix in (re.sub(r"\W", "x", HOSTILE), HOSTILE):
        page = altered_page(folder, tmp_path / f"altered{len(found)}" / "small", suffix)
        browser.open(page)
        assert suffix in browser.evaluate("document.body.textContent")
        browser.evaluate("document.querySelectorAll('.chip').forEach(c => c.click())")
        click(browser, "#all")
        for chip in ("#fig-perplexity_by_length .chip", "button[data-verdict]"):
            click(browser, chip)
        browser.evaluate("document.querySelector('#fig-perplexity_by_length .plot').focus()")
        browser.press("ArrowRight")
        assert suffix in browser.evaluate("document.getElementById('tip').textContent")
        assert browser.evaluate("'ran' in window") is False
        assert (browser.errors, len(browser.requests)) == ([], 1)
        found.append(elements(browser))
    assert found[0] == found[1]
    assert found[1][0]["SCRIPT"] == 1
    assert not [name for name in found[1][1] if name.startswith("on")]


INTRUDERS = (
    "<script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "<script src='data:text/javascript,window.ran=1'></script>",
    "<a id=intruder href='javascript:window.ran=1'>x</a>",
    "<iframe srcdoc='<script>top.ran = 1</script>'></iframe>",
    "<style>body { display: none }</style>",
)


def test_the_policy_stops_what_is_not_ours(browser, file, tmp_path):
    """Were markup ever to get in."""
    path = tmp_path / "index.html"
    page = file.read_text(encoding="utf-8")
    path.write_text(page.replace("<footer>", f"{''.join(INTRUDERS)}<footer>"), encoding="utf-8")
    browser.open(path)
    browser.evaluate("document.getElementById('intruder').click()")
    browser.evaluate("new Promise(done => setTimeout(done, 50))")
    assert browser.evaluate("'ran' in window") is False
    assert browser.evaluate("getComputedStyle(document.body).display") == "block"
    refused = [error for error in browser.errors if "Content Security Policy" in error]
    assert len(refused) >= len(INTRUDERS)
    # Our own script runs.
    click(browser, "#theme")
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
    browser.evaluate("localStorage.clear()")
