"""The site's pages: listed, linked by anchors that exist, and every public name documented.

`make docs` builds the site and fails on any warning. These tests need none of its packages.
"""

import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest

import mosar

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
REFERENCE = "\n".join(
    path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md")
)
DOCUMENTED = re.findall(r"^::: (\S+)$", REFERENCE, re.M)


def find(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def own_members(thing):
    """Functions and properties that a class of ours adds, with what one of them inherits."""
    for name, member in vars(thing).items() if inspect.isclass(thing) else ():
        function = getattr(member, "__func__", member)
        if not name.startswith("_") and isinstance(
            function, (property, functools.cached_property, type(own_members))
        ):
            yield f"{thing.__name__}.{name}", inspect.getdoc(getattr(thing, name))


def test_the_reference_has_every_public_name():
    named = {path.rpartition(".")[2] for path in DOCUMENTED}
    assert set(mosar.__all__) - {"__version__"} <= named
    for name in set(mosar.__all__) & named:
        (path,) = (path for path in DOCUMENTED if path.rpartition(".")[2] == name)
        assert find(path) is getattr(mosar, name)


@pytest.mark.parametrize("path", DOCUMENTED)
def test_a_public_name_has_its_docstrings(path):
    thing = find(path)
    assert inspect.getdoc(thing)
    # nn.Module's own text says nothing of ours.
    foreign = inspect.getdoc(importlib.import_module("torch").nn.Module.forward)
    assert not [name for name, text in own_members(thing) if not text or text == foreign]


def test_the_navigation_lists_every_page():
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r": (\S+\.md)$", settings, re.M)
    assert len(listed) == len(set(listed))
    found = {path.relative_to(ROOT / "docs").as_posix() for path in PAGES}
    assert set(listed) - {"CHANGELOG.md", "CONTRIBUTING.md"} == found


@functools.cache
def anchors(path):
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda path: path.name)
def test_anchors_of_links_exist(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target, anchor in re.findall(r"\]\(([^)#:\s]*\.md|)#([^)]*)\)", text):
        assert anchor in anchors((page.parent / target) if target else page), (target, anchor)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_brackets_that_markdown_would_take_for_a_link_are_code(page):
    """`S[key][lane]` outside of code is a link without a target, which fails the site."""
    code = r"^```.*?^```$|^    .*?$|`[^`]*`|\$\$.*?\$\$|\$[^$\n]+\$"
    text = re.sub(code, "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert not re.findall(r"\[[^\][]*\] ?\[[^\][]+\]", text)
