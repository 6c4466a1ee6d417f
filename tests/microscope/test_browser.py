"""The microscope's page in a real browser: what it shows is what was computed."""

import math
from io import BytesIO

import pytest
import torch
from matplotlib.image import imread

import mosar
from microscope.models import make_decoder
from mosar.data.tokenizer import ByteTokenizer
from mosar.microscope.page import percent
from mosar.microscope.picture import SECTIONS, take_picture
from report.conftest import browser  # noqa: F401

TEXT = (
    "<script>window.ran = 1</script><img src=x onerror='window.ran=1'> </script>&amp; "
    "{{ 7 * 7 }} naïve שלום سلام\n\tlast 漢 line\u202e\x00 ends.\n"
)


@pytest.fixture(scope="module")
def seen():
    return mosar.look(make_decoder(), TEXT, tokenizer=ByteTokenizer(), name="<b>small</b>")


@pytest.fixture
def tab(browser, seen, tmp_path):  # noqa: F811
    """The page, fresh; afterwards it must have had no error and have asked for nothing."""
    path = seen.save(tmp_path / "look.html")
    browser.open(path)
    browser.wait("document.documentElement.dataset.ready === 'true'")
    yield browser
    assert browser.errors == []
    assert browser.requests == [path.absolute().as_uri()]


def choose(tab, name, value):
    tab.evaluate(
        f"(() => {{ const e = document.getElementById('{name}'); e.value = {value};"
        " e.dispatchEvent(new Event('change')) })()"
    )


def shown(tab):
    """The facts of the panel, and the keys that it lists on either side with their shares."""
    return tab.evaluate(
        "({facts: Object.fromEntries([...document.querySelectorAll('[data-fact]')]"
        ".map(e => [e.dataset.fact, e.textContent])),"
        "...Object.fromEntries(['inside', 'outside'].map(side => [side, [...document"
        ".querySelectorAll(`[data-side=${side}] button`)].map(e => [+e.dataset.key,"
        " parseFloat(e.querySelector('em').textContent)])])),"
        "here: [...document.querySelectorAll('#text .here')].map(e => +e.dataset.i)})"
    )


def check_numbers(tab, seen, layer, token):
    view, panel = seen.views[layer], shown(tab)
    outside = float(view.outside[0, token])
    assert panel["here"] == [token]
    assert panel["facts"] == {
        "reads": str(int(view.reads[0, token])),
        "inside": percent(1 - outside),
        "outside": percent(outside),
    }
    for side, largest in (("inside", view.inside_largest), ("outside", view.outside_largest)):
        expected = {
            token - int(d): 100 * float(s)
            for d, s in zip(largest.distance[0, token], largest.share[0, token], strict=True)
            if s > 0
        }
        assert len(panel[side]) <= (12 if side == "inside" else 6)
        for key, share in panel[side]:
            # 255 steps of the root, then rounded to what is shown.
            assert share == pytest.approx(expected[key], abs=0.5 if expected[key] > 9 else 0.2)
    listed = {key for key, _ in panel["inside"]}
    assert int(token - view.inside_largest.distance[0, token, 0]) in listed


def test_numbers_are_those_of_python(tab, seen):
    tab.evaluate("document.querySelector('#text [data-i=\"60\"]').click()")
    choose(tab, "layer", 1)
    check_numbers(tab, seen, 1, 60)
    tab.evaluate("document.getElementById('text').focus()")
    tab.press("ArrowRight")
    check_numbers(tab, seen, 1, 61)
    tab.press("End")
    choose(tab, "layer", 0)
    check_numbers(tab, seen, 0, len(seen.pieces) - 1)
    tab.press("ArrowUp")
    (above,) = shown(tab)["here"]
    assert 0 < above < len(seen.pieces) - 1
    tab.press("Escape")
    assert shown(tab)["here"] == []


def test_colours_follow_role_and_layer(tab, seen):
    def colours():
        return tab.evaluate(
            "[...document.querySelectorAll('#text span')].map(e => e.style.getPropertyValue('--l'))"
        )

    choose(tab, "layer", 1)
    for role in (0, 1):
        tab.evaluate(f"document.querySelector('[data-role=\"{role}\"]').click()")
        labels = seen.labels[1, role, 0].tolist()
        # One colour for each regime, and another one for every other regime.
        assert len(set(zip(labels, colours(), strict=True))) == len(set(labels)) == 3
        assert len(set(colours())) == 3


def test_the_map_leads_to_the_text(tab, seen):
    box = tab.evaluate(
        "(() => { const c = document.querySelector('#map canvas'); "
        "c.scrollIntoView({block: 'center', behavior: 'instant'});"
        " const b = c.getBoundingClientRect(); return [b.left, b.top, b.width, b.height] })()"
    )
    length = len(seen.pieces)
    x, y = box[0] + box[2] * 20.5 / length, box[1] + box[3] * 0.75
    tab.move(x, y)
    tab.wait("document.getElementById('tip').textContent.includes('position 20, layer 1')")
    assert tab.evaluate("document.querySelector('#text .hover').dataset.i") == "20"
    tab.evaluate(
        "document.querySelector('#map canvas').dispatchEvent(new MouseEvent('click', "
        f"{{clientX: {x}, clientY: {y}}}))"
    )
    check_numbers(tab, seen, 1, 20)
    tab.evaluate("document.getElementById('map').focus()")
    tab.press("ArrowUp")
    check_numbers(tab, seen, 0, 20)


def test_the_address_holds_the_view(tab, seen, tmp_path):
    tab.evaluate("document.querySelector('#text [data-i=\"60\"]').click()")
    choose(tab, "layer", 1)
    view = tab.evaluate("location.hash")
    assert view == "#reading?role=0&layer=1&token=60"
    # A link that is pasted into the open page counts too; one to a section keeps the choice.
    tab.evaluate("location.hash = '#reading?layer=0&token=20'")
    tab.wait("document.querySelector('#text .here')?.dataset.i === '20'")
    check_numbers(tab, seen, 0, 20)
    tab.evaluate("document.querySelector('nav a[href=\"#map-section\"]').click()")
    tab.wait("location.hash === '#map-section?role=0&layer=0&token=20'")
    path = tmp_path / "look.html"
    tab.open(path, view)
    tab.wait("document.documentElement.dataset.ready === 'true'")
    check_numbers(tab, seen, 1, 60)
    # What does not exist is not chosen, and a section can stand alone.
    tab.open(path, "#map-section?alone&token=99999&layer=-3&role=<b>")
    tab.wait("document.documentElement.dataset.ready === 'true'")
    assert shown(tab)["here"] == []
    sections = "[...document.querySelectorAll('main > section')].filter(e => !e.hidden)"
    assert tab.evaluate(f"{sections}.map(e => e.id)") == ["map-section"]
    tab.open(path)
    tab.wait("document.documentElement.dataset.ready === 'true'")
    assert tuple(tab.evaluate(f"{sections}.map(e => e.id)")) == SECTIONS


def test_a_picture_shows_the_view(browser, seen):  # noqa: F811
    # Without the fixture `browser` there may be none.
    pictures = [take_picture(seen.to_html(), f"{part}?alone") for part in ("reading", "savings")]
    for picture in pictures:
        assert imread(BytesIO(picture), format="png").shape[:2] == (800, 1280)
    assert pictures[0] != pictures[1]


def test_text_stays_text(tab, seen):
    assert tab.evaluate("'ran' in window") is False
    assert tab.evaluate("document.querySelector('h1').textContent") == "<b>small</b>"
    assert tab.evaluate("document.querySelectorAll('#text *:not(div, span, s)').length") == 0
    # Signs stand for what cannot be seen; all else is the text itself.
    plain = "[...document.querySelectorAll('#text s')].forEach(e => e.remove())"
    tab.evaluate(plain)
    text = tab.evaluate("document.getElementById('text').textContent")
    assert text == TEXT.replace("\u202e", "").replace("\x00", "")
    assert torch.tensor(seen.tokens).shape == (len(TEXT.encode()),)


def test_averages_over_layers_and_groups(browser, tmp_path):  # noqa: F811
    model = make_decoder(routing_groups=2)
    seen = mosar.look(model, TEXT, tokenizer=ByteTokenizer(), name="groups")
    browser.open(seen.save(tmp_path / "groups.html"), "#reading?token=70")
    browser.wait("document.documentElement.dataset.ready === 'true'")
    assert seen.labels.shape[:3] == (2, 2, 2)
    reads = torch.stack([view.reads[:, 70] for view in seen.views]).double()
    outside = torch.stack([view.outside[:, 70] for view in seen.views])
    for layer, chosen in (("", slice(None)), ("&layer=1", slice(1, 2))):
        for group, heads in (("", slice(None)), ("&group=1", slice(1, 2))):
            browser.evaluate(f"location.hash = '#reading?token=70{layer}{group}'")
            # JavaScript rounds 25.25 up, Python to the even digit.
            expected = f"{math.floor(10 * float(reads[chosen, heads].mean()) + 0.5) / 10:g}"
            browser.wait(
                f"document.querySelector('[data-fact=reads]').textContent === '{expected}'"
            )
            facts = shown(browser)["facts"]
            assert facts["outside"] == percent(float(outside[chosen, heads].mean()))
    assert browser.errors == []


def test_letters_join_and_a_long_line_scrolls(browser, tmp_path):  # noqa: F811
    text = "سلام " + "word " * 400
    seen = mosar.look(make_decoder(), text, tokenizer=ByteTokenizer())
    browser.open(seen.save(tmp_path / "long.html"), f"#reading?token={len(seen.pieces) - 9}")
    browser.wait("document.documentElement.dataset.ready === 'true'")
    joined = "[...document.querySelectorAll('#text .joined')].map(e => e.textContent).join('')"
    assert browser.evaluate(joined) == "لام"
    browser.wait(
        "(() => { const box = document.getElementById('text').getBoundingClientRect(), at = "
        "document.querySelector('#text .here').getBoundingClientRect();"
        " return box.top <= at.top && at.bottom <= box.bottom })()"
    )


def test_it_fits_a_phone_and_the_dark(tab):
    tab.resize(360, 740)
    tab.prefer(dark=True)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 20, 26)"
