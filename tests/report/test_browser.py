"""The page in a real browser: it draws, sorts, hides, changes colour and fits a phone."""

import json
import re

import pytest

from mosar.files import sealed, unsealed
from mosar.report.comparison import Comparison
from mosar.report.experiment import load_experiment
from report import synthetic
from report.synthetic import compare, render, write_experiment


@pytest.fixture(scope="module")
def file(page, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


@pytest.fixture
def tab(browser, file):
    """The page, fresh, on a desktop in the light; afterwards it must have had no error."""
    browser.open(file)
    browser.evaluate("localStorage.clear()")
    browser.open(file)
    yield browser
    assert browser.errors == []
    assert browser.requests == [file.absolute().as_uri()]


def click(tab, selector):
    tab.evaluate(f"document.querySelector({selector!r}).click()")


def test_everything_is_drawn(tab):
    """Each figure has a size, and each line of a chart too, inside of its picture."""
    sizes = tab.evaluate(
        "[...document.querySelectorAll('figure svg:not(.sample)')]"
        ".filter(s => !s.closest('[hidden]')).map(s => {"
        " const b = s.getBoundingClientRect(); return Math.min(b.width, b.height) })"
    )
    assert len(sizes) >= 20 and min(sizes) >= 60
    lines = tab.evaluate(
        "[...document.querySelectorAll('.series:has(> path)')].filter(l => !l.closest('[hidden]'))"
        ".filter(l => l.dataset.x.includes(' ')).map(l => "
        "l.querySelector(':scope > path').getTotalLength())"
    )
    assert len(lines) >= 80 and min(lines) > 10
    samples = tab.evaluate(
        "[...document.querySelectorAll('.chip:not(.plain) .sample path')]"
        ".filter(s => !s.closest('[hidden]')).map(s => s.getBoundingClientRect().width)"
    )
    assert len(samples) >= 60 and min(samples) > 15


def test_no_text_is_cut_off(tab):
    """Labels of charts stay inside of the cards."""
    outside = tab.evaluate(
        "[...document.querySelectorAll('.chart .plot svg text')].filter(t => {"
        " if (t.closest('[hidden]')) return false;"
        " const a = t.getBoundingClientRect(), b = t.closest('.card').getBoundingClientRect();"
        " return a.width && (a.left < b.left - 1 || a.right > b.right + 1) }"
        ").map(t => t.textContent)"
    )
    assert outside == []


def column(tab, index):
    return tab.evaluate(
        "[...document.querySelectorAll('#table-main tbody tr')]"
        f".map(r => r.cells[{index}].dataset.sort)"
    )


def test_sorting_sorts(tab):
    heads = tab.evaluate(
        "[...document.querySelectorAll('#table-main thead tr:last-child th')]"
        ".map(h => h.textContent)"
    )
    assert heads[0] == "variant" and len(heads) >= 9
    for index in (2, 3, len(heads) - 1):
        button = f"#table-main thead tr:last-child th:nth-child({index + 1}) button"
        before = list(map(float, column(tab, index)))
        click(tab, button)
        assert list(map(float, column(tab, index))) == sorted(before)
        click(tab, button)
        assert list(map(float, column(tab, index))) == sorted(before, reverse=True)
    sorts = tab.evaluate(
        "[...document.querySelectorAll('#table-main thead [aria-sort]')]"
        ".map(h => h.getAttribute('aria-sort'))"
    )
    assert sorts == ["none"] * (len(heads) - 1) + ["descending"]
    click(tab, "#table-main thead tr:last-child th:nth-child(1) button")
    names = column(tab, 0)
    assert [name.lower() for name in names] == sorted(name.lower() for name in names)


def test_cells_without_a_figure_sort_last(tab):
    values = (
        "[...document.querySelectorAll('#table-routing tbody tr')].map(r => r.cells[4].textContent)"
    )
    tab.evaluate(
        "(() => { const c = document.querySelector('#table-routing tbody tr').cells[4];"
        " delete c.dataset.sort; c.textContent = 'nothing' })()"
    )
    for _ in range(2):
        click(tab, "#table-routing thead tr:last-child th:nth-child(5) button")
        assert tab.evaluate(values)[-1] == "nothing"


def series(tab, key):
    return tab.evaluate(
        f"[...document.querySelectorAll('.series[data-key=\"{key}\"]')]"
        ".filter(s => !s.closest('[hidden]')).map(s => s.getBoundingClientRect().width > 0)"
    )


def drawing(tab):
    """Where everything is that moves with the scale."""
    return tab.evaluate(
        "[...document.querySelectorAll('.moves > path')].map(p => p.getAttribute('d'))"
    )


def axis(tab, figure=""):
    """Label and place of every tick of the vertical axes."""
    return tab.evaluate(
        f"[...document.querySelectorAll('{figure} .tick')].filter(t => !t.closest('[hidden]'))"
        ".map(t => [t.textContent.trim(), Math.round(t.getBoundingClientRect().top)])"
    )


def test_legend_hides_a_variant_everywhere(tab):
    chip = "#fig-perplexity_by_length .chip[data-key=p-rope]"
    assert all(series(tab, "p-rope")) and len(series(tab, "p-rope")) >= 5
    click(tab, chip)
    assert not any(series(tab, "p-rope"))
    assert all(series(tab, "mosar")) and all(series(tab, "rope"))
    pressed = tab.evaluate(
        "[...document.querySelectorAll('.chip[data-key=p-rope]')]"
        ".map(c => c.getAttribute('aria-pressed'))"
    )
    assert set(pressed) == {"false"} and len(pressed) >= 5
    click(tab, chip)
    assert all(series(tab, "p-rope"))


def test_axes_follow_what_is_visible(tab):
    """Alone, the variant that collapsed is seen whole; with all it is as Python drew it."""
    figure = "#fig-delta_by_length"

    def highest():
        labels = [label for label, _ in axis(tab, figure)]
        return max(float(label.rstrip(" %").replace("\u2212", "-")) for label in labels)

    drawn, labels = drawing(tab), axis(tab)
    assert highest() <= 5
    chips = tab.evaluate(
        f"[...document.querySelectorAll('{figure} .chip')].map(c => c.dataset.key)"
    )
    for key in set(chips) - {"p-rope", "note:paper"}:
        click(tab, f'{figure} .chip[data-key="{key}"]')
    assert highest() >= 60 and 4 <= len(axis(tab, figure)) <= 10
    # Every point of it is inside of the plot, with its marker.
    places = tab.evaluate(
        f"[...document.querySelectorAll('{figure} .series:not(.off) use')]"
        ".map(u => Number(u.getAttribute('y')))"
    )
    assert len(places) == 6 and all(20 <= y <= 270 for y in places)
    assert tab.evaluate("document.getElementById('all').hidden") is False
    click(tab, "#all")
    assert tab.evaluate("document.getElementById('all').hidden") is True
    assert [label for label, _ in axis(tab)] == [label for label, _ in labels]
    assert all(abs(a - b) <= 1 for (_, a), (_, b) in zip(axis(tab), labels, strict=True))
    again = drawing(tab)
    for new, old in zip(again, drawn, strict=True):
        (x, y), (was_x, was_y) = (re.findall(r"-?[\d.]+", path)[:2] for path in (new, old))
        assert (float(x), float(y)) == pytest.approx((float(was_x), float(was_y)), abs=0.15)


def test_notes_can_be_hidden(tab):
    click(tab, '#fig-delta_by_length .chip[data-key="note:paper"]')
    hidden = tab.evaluate(
        "[...document.querySelectorAll('.series[data-note=paper]')].every(s => "
        "getComputedStyle(s).display === 'none')"
    )
    assert hidden is True and all(series(tab, "rope"))


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


@pytest.mark.parametrize("width", [320, 375, 768, 1280])
def test_page_never_scrolls_sideways(tab, file, width):
    tab.open(file, width=width)
    tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.evaluate("scrollTo(500, 0)")
    assert tab.evaluate("scrollX") == 0
    # Wide tables scroll in their own box.
    wide = tab.evaluate(
        "[...document.querySelectorAll('.scroll')].filter(b => b.scrollWidth > b.clientWidth + 1)"
        ".map(b => getComputedStyle(b).overflowX)"
    )
    assert set(wide) <= {"auto"} and (wide or width > 1000)


def test_labels_are_readable_on_a_phone(tab, file):
    tab.open(file, width=375)
    heights = tab.evaluate(
        "[...document.querySelectorAll('.chart:not(#fig-architecture) .plot svg text')]"
        ".filter(t => !t.closest('[hidden]')).map(t => { const b = t.getBoundingClientRect();"
        " return b.width && Math.min(b.height, b.width > b.height ? b.height : 99) })"
    )
    assert min(height for height in heights if height) >= 9


def test_tooltip_reads_the_values(tab):
    tab.evaluate(
        "document.querySelector('#fig-perplexity_by_length')"
        ".scrollIntoView({behavior: 'instant', block: 'center'})"
    )
    box = tab.evaluate(
        "(() => { const b = document.querySelector('#fig-perplexity_by_length .plot')"
        ".getBoundingClientRect(); return [b.left, b.top, b.width, b.height] })()"
    )
    assert tab.evaluate("document.getElementById('tip').hidden") is True
    tab.move(box[0] + box[2] * 0.9, box[1] + box[3] / 2)
    tab.wait("!document.getElementById('tip').hidden")
    text = tab.evaluate("document.getElementById('tip').innerText")
    assert "4× · 2,048" in text and "MoSAR" in text and "±" in text
    # Highest first.
    values = [float(value) for value in re.findall(r"(\d+\.\d+) ±", text)]
    assert len(values) == 8 and values == sorted(values, reverse=True)
    tab.move(5, 5)
    tab.wait("document.getElementById('tip').hidden")


def test_arrow_keys_read_the_values(tab):
    tab.evaluate("document.querySelector('#fig-delta_by_length .plot').focus()")
    tab.press("ArrowRight")
    first = tab.evaluate("document.getElementById('tip').innerText")
    tab.press("ArrowRight")
    second = tab.evaluate("document.getElementById('tip').innerText")
    assert "1× · 512" in first and "2× · 1,024" in second
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
    rows = (
        "[...document.querySelectorAll('.claims tbody tr[data-verdict]')]"
        ".filter(r => r.offsetHeight > 0).map(r => r.dataset.verdict)"
    )
    before = tab.evaluate(rows)
    assert "holds" in before and len(set(before)) > 1
    click(tab, "button[data-verdict=holds]")
    assert tab.evaluate(rows) == [verdict for verdict in before if verdict != "holds"]
    empty = tab.evaluate(
        "[...document.querySelectorAll('.claims .group')].filter(g => g.offsetHeight > 0).length"
    )
    assert 0 < empty < 6
    click(tab, "button[data-verdict=holds]")
    assert tab.evaluate(rows) == before


def test_every_heading_has_its_place_in_the_menu(tab):
    targets = tab.evaluate(
        "[...document.querySelectorAll('.bar nav a')].map(a => "
        "document.querySelector(a.hash)?.tagName)"
    )
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
