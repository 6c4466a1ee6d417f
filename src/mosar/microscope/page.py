"""A `Look` as one HTML page: its numbers as JSON and packed bytes, which page.js reads.

Each part is compressed by zlib and written in base64:

    labels     [L, 2, Gr, T] uint8
    outside    [L, Gr, T]    uint16, little-endian: 65535 sqrt(share)
    an entry   [3, L, Gr, T] uint8: low and high byte of the distance, 255 sqrt(share)

An entry holds the largest share of every query on one side of its support, the next one the
second largest, and so on: as many as the page's size allows.
"""

from __future__ import annotations

import base64
import math
import zlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jinja2 import Environment, StrictUndefined
from torch import Tensor

from mosar.core.hard_domain import class_reach
from mosar.microscope.attention import INSIDE, OUTSIDE, Largest
from mosar.microscope.summary import fewest_occurrences
from mosar.report.assets import content_policy, read_asset
from mosar.report.palette import regime_looks

if TYPE_CHECKING:
    from mosar.microscope.look import Look

# Most characters of the packed parts; everything else of a page is far below 300 KB.
LARGEST = 4_700_000


def render_look(look: Look) -> str:
    """The whole document."""
    package = "mosar.microscope"
    style = read_asset("page.css") + read_asset("page.css", package)
    script = read_asset("theme.js") + read_asset("page.js", package)
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    # Keys keep their order.
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    template = environment.from_string(str(read_asset("page.html", package)))
    return template.render(
        look=look,
        tiles=_tiles(look),
        least=fewest_occurrences(len(look.tokens)),
        data=page_data(look),
        style=style,
        script=script,
        policy=content_policy(style, script),
    )


def page_data(look: Look) -> dict[str, Any]:
    """What the script reads."""
    names = [regime.name for regime in look.config.regimes]
    colours = regime_looks(names)
    layers, _, groups, length = look.labels.shape
    return {
        "pieces": look.pieces,
        "tokens": look.tokens,
        "regimes": [
            {"name": regime.name, "reach": regime.reach, "light": shade.light, "dark": shade.dark}
            for regime, shade in zip(look.config.regimes, colours.values(), strict=True)
        ],
        # JSON has no infinity: null is boundless.
        "reach": [
            [None if math.isinf(x) else x for x in row] for row in class_reach(look.config).tolist()
        ],
        "sinks": look.config.num_sinks,
        "windows": [view.window for view in look.views],
        "layers": layers,
        "groups": groups,
        "length": length,
        "packed": _pack(look),
        "rankings": {role: asdict(ranking) for role, ranking in look.rankings.items()},
        "savings": asdict(look.savings),
    }


def _pack(look: Look) -> dict[str, Any]:
    shares = torch.stack([view.outside for view in look.views])
    labels = _compress(look.labels.numpy())
    outside = _compress(_roots(shares, 65535).astype("<u2"))
    sides = {
        "inside_entries": _entries([view.inside_largest for view in look.views]),
        "outside_entries": _entries([view.outside_largest for view in look.views]),
    }
    packed: dict[str, Any] = {"labels": labels, "outside": outside} | {side: [] for side in sides}
    room = LARGEST - len(labels) - len(outside)
    # The largest of both sides first.
    for index in range(max(INSIDE, OUTSIDE)):
        for side, entries in sides.items():
            if index == len(entries) or len(packed[side]) < index:
                continue
            part = _compress(entries[index])
            if len(part) > room:
                return packed
            packed[side].append(part)
            room -= len(part)
    return packed


def _compress(values: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(values.tobytes(), 6)).decode()


def _entries(layers: list[Largest]) -> np.ndarray:
    """[E, 3, L, Gr, T] uint8, without those that are 0 everywhere."""
    distances, shares = (
        torch.stack([getattr(layer, name) for layer in layers]).permute(3, 0, 1, 2)
        for name in ("distance", "share")
    )
    share = _roots(shares, 255).astype(np.uint8)
    # Distances of shares that round to 0 are never shown.
    distance = distances.numpy() * (share > 0)
    entries = np.stack([distance & 255, distance >> 8, share], axis=1).astype(np.uint8)
    return entries[share.any(axis=(1, 2, 3))]


def _roots(shares: Tensor, steps: int) -> np.ndarray:
    """steps * sqrt(share), rounded: fine where shares are small."""
    return (shares.clamp(0, 1).sqrt() * steps).round().numpy()


def _tiles(look: Look) -> list[tuple[str, str, str]]:
    """What it comes to: value, label, remark."""
    savings, length = look.savings, len(look.tokens)
    layers, _, groups, _ = look.labels.shape
    reads = sum(savings.layer_reads) / layers
    alive = sum(savings.layer_alive) / layers
    outside = sum(savings.layer_outside) / layers
    choices = f"{layers} layers × {groups} routing group{'s' if groups > 1 else ''}"
    lies, remark = "lies", "of what a token may read, on average"
    if look.hard:
        lies, remark = "would lie", "if pairs there kept the floor of their gates"
    return [
        (f"{length:,}", "token" if length == 1 else "tokens", choices),
        (percent(reads), "of the pairs are read", "the support over all causal pairs"),
        (percent(alive), "of the dense cache is stored", "keys in reach at the end"),
        (percent(outside), f"of the attention {lies} outside", remark),
    ]


def percent(share: float) -> str:
    """As page.js writes it."""
    value = 100 * share
    digits = 0 if value >= 10 else 1 if value >= 1 else 2
    return f"{value:.{digits}f} %"
