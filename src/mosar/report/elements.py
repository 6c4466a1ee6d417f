"""Elements of HTML and SVG, whose text and attributes are always escaped.

    tag("p", "a < b", class_="note")  ->  <p class="note">a &lt; b</p>

A plain string is text. Only Markup is taken as it is, and only this module makes it: joining or
formatting Markup elsewhere gives a plain string again, which is then escaped once more.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from html import escape
from importlib.resources import files

_WITHOUT_END = {"link": ">", "meta": ">", "circle": "/>", "line": "/>", "path": "/>", "rect": "/>"}


class Markup(str):
    """Text that is markup already."""


def tag(name: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """An element; `class_` is class, `data_key` is data-key, and None or "" leaves out."""
    written = [
        f' {key.rstrip("_").replace("_", "-")}="{escape(_value(value))}"'
        for key, value in attributes.items()
        if value is not None and value != ""
    ]
    opened = f"<{name}{''.join(written)}"
    if name in _WITHOUT_END:
        return Markup(opened + _WITHOUT_END[name])
    return Markup(f"{opened}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Markup:
    """Parts after each other; those that are not Markup are escaped."""
    return Markup("".join(p if isinstance(p, Markup) else escape(p) for p in parts))


def document(*parts: str) -> str:
    """A whole page of <head> and <body>."""
    return f"<!doctype html>\n{tag('html', *parts, lang='en')}\n"


def asset(name: str) -> Markup:
    """A file of the package: the page's own style or script."""
    return Markup("\n" + files("mosar.report").joinpath(name).read_text(encoding="utf-8"))


def source_hash(content: Markup) -> str:
    """As a Content-Security-Policy names an inline style or script."""
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _value(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:g}"
