"""A picture inside the page: matplotlib's SVG without what only a file needs, in colours that
follow the theme. An XML library writes it, so that no text in it can become markup."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from markupsafe import Markup

from mosar.report.drawing import Picture
from mosar.report.palette import THEME

_HEX = re.compile("#[0-9a-f]{6}")
_LONG = re.compile(r"-?\d+\.\d+")


def inline(picture: Picture, name: str) -> tuple[Markup, list[Markup]]:
    """The picture, and the sample line of each entry of its legend."""
    root = ElementTree.fromstring(picture.svg)
    legend = Element("g")
    for parent in [*root.iter()]:
        for child in [*parent]:
            kind = child.get("id")
            legend = child if kind == "part-legend" else legend
            if kind in ("part-legend", "part-ground") or _local(child.tag) in ("metadata", "style"):
                parent.remove(child)
    _complete(root, legend, picture)
    colours = THEME | {k.light: f"light-dark({k.light}, {k.dark})" for k in picture.looks}
    for element in [*root.iter(), *legend.iter()]:
        _adapt(element, picture, name, colours)
    width, height = picture.size
    root.attrib = {"viewBox": f"0 0 {width:g} {height:g}", "role": "img"}
    root.attrib |= {"aria-label": picture.label} | picture.attributes
    return _markup(root), [_markup(sample) for sample in _samples(legend)]


def _complete(root: Element, legend: Element, picture: Picture) -> None:
    """matplotlib leaves out a line or its markers where all are outside of the picture; page.js may
    show them, so they are copied from the legend."""
    clip = next((f"url(#{e.get('id')})" for e in root.iter() if _local(e.tag) == "clipPath"), "")
    groups = {group.get("id"): group for group in root.iter()}
    for sample in legend:
        identity = (sample.get("id") or "").removesuffix("-sample")
        if identity not in picture.groups:
            continue
        drawn = {_local(part.tag) for part in groups[identity].iter() if part.get("d") != ""}
        if {"path", "use"} & {_local(part.tag) for part in sample.iter()} <= drawn:
            continue
        values = picture.groups[identity]
        places = [*zip(values["data-x"].split(), values["data-y"].split(), strict=True)]
        markers = [part for part in groups[identity] if _local(part.tag) == "defs"]
        groups[identity][:] = markers + deepcopy(sample[:])
        for part in groups[identity]:
            if _local(part.tag) != "defs":
                part.set("clip-path", clip)
            if _local(part.tag) == "path":
                part.set("d", "M" + "L".join(map(" ".join, places)))
        for dot in groups[identity].iter():
            if _local(dot.tag) == "use":
                dot.attrib |= dict(zip("xy", places[0], strict=True))
        sample[:] = [part for part in sample if _local(part.tag) != "defs"]


def _local(name: str) -> str:
    """Without its namespace, which HTML knows."""
    return name.rpartition("}")[2]


def _markup(element: Element) -> Markup:
    return Markup(ElementTree.tostring(element, encoding="unicode"))


def _adapt(element: Element, picture: Picture, name: str, colours: dict[str, str]) -> None:
    element.tag, element.tail = _local(element.tag), None
    element.text = (element.text or "").strip() or None
    values = {_local(key): value for key, value in element.items()}
    identity = values.pop("id", "")
    # Ids of a page are its own; only what is referred to keeps one.
    if element.tag in ("clipPath", "path") and identity:
        values["id"] = f"{name}-{identity}"
    for key, value in values.items():
        if key == "href":
            values[key] = f"#{name}-{value[1:]}"
        elif key == "clip-path":
            values[key] = value.replace("url(#", f"url(#{name}-")
        elif key == "style":
            value = re.sub(r"font-family:[^;]*; ?", "", value)
            values[key] = _HEX.sub(lambda found: colours.get(found[0], found[0]), value)
        elif key in ("d", "x", "y", "transform"):
            value = _LONG.sub(lambda found: f"{float(found[0]):.4g}", value)
            values[key] = " ".join(value.split())
    if values.get("transform", "").startswith("rotate(-0 "):
        del values["transform"]
    if identity.startswith("ytick_"):
        values["class"] = "tick"
    element.attrib = values | picture.groups.get(identity, {})


def _samples(legend: Element) -> Iterator[Element]:
    for handle in legend:
        line = handle.find("path")
        if line is not None and line.get("d"):
            x, y = (float(part) for part in line.attrib["d"].split()[1:3])
            box = {"viewBox": f"{x - 2:g} {y - 6:g} 30 12", "width": "30", "height": "12"}
            sample = Element("svg", {"class": "sample", "aria-hidden": "true"} | box)
            sample.append(handle)
            yield sample
