"""The decoder with its routers as a drawing: boxes and arrows, placed; `drawing` draws them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

Kind = Literal["plain", "norm", "router", "attention", "sum"]
WIDTH, HEIGHT = 560.0, 792.0


@dataclass(frozen=True)
class Node:
    """A box with its middle at (x, y); a "sum" is a circle."""

    x: float
    y: float
    width: float
    height: float
    text: str
    kind: Kind = "plain"
    small: str = ""
    """A second line."""


@dataclass(frozen=True)
class Arrow:
    """A line through points, with a head at its end."""

    points: tuple[tuple[float, float], ...]
    kind: Literal["plain", "router"] = "plain"


@dataclass(frozen=True, kw_only=True)
class Diagram:
    name: str
    title: str
    caption: str
    nodes: tuple[Node, ...]
    arrows: tuple[Arrow, ...]
    frame: tuple[float, float, float, float]
    """x, y, width, height of what is repeated."""
    repeat: str
    """How often."""


def decoder_diagram(model: dict[str, Any], regimes: list[str]) -> Diagram:
    """One layer from bottom to top, as Transformers are usually drawn.

    `model` is the section of a configuration; a size that it lacks is left out.
    """

    def sized(text: str, *names: str) -> str:
        values = [model.get(name) for name in names]
        return "" if None in values else text.format(*values)

    q, k, v, middle = 150.0, 400.0, 490.0, 320.0
    heads = sized("{} heads of {}", "num_heads", "head_dim")
    kv_heads = sized("{} heads", "num_kv_heads")
    mixture = f"mixture of the gates of {', '.join(regimes)}" if regimes else "mixture of gates"
    nodes = (
        Node(middle, 774, 150, 28, "tokens"),
        Node(middle, 722, 170, 40, "embedding", small=sized("width {}", "hidden_size")),
        Node(middle, 650, 150, 28, "RMSNorm", "norm"),
        Node(q, 586, 112, 40, "Q", small=heads),
        Node(k, 586, 76, 40, "K", small=kv_heads),
        Node(v, 586, 76, 40, "V", small=kv_heads),
        Node(q, 530, 112, 28, "RoPE"),
        Node(k, 530, 76, 28, "RoPE"),
        Node(222, 458, 104, 40, "query router", "router", "MLP, softmax"),
        Node(328, 458, 96, 40, "key router", "router", "MLP, softmax"),
        Node(275, 388, 206, 42, "log (π_Q · G(i − j) · π_K)", "router", mixture),
        Node(
            middle, 318, 410, 42, "causal attention", "attention", "soft-cap, + bias, softmax, · V"
        ),
        Node(middle, 262, 150, 28, "RMSNorm", "norm"),
        Node(middle, 224, 20, 20, "+", "sum"),
        Node(middle, 182, 150, 28, "RMSNorm", "norm"),
        Node(middle, 134, 170, 40, "gated MLP", small=sized("width {}", "ffn_size")),
        Node(middle, 86, 150, 28, "RMSNorm", "norm"),
        Node(middle, 54, 20, 20, "+", "sum"),
        Node(middle, 16, 230, 28, "RMSNorm, logits"),
    )
    spine = [node for node in nodes if node.x == middle and node.text != "causal attention"]
    arrows = [
        Arrow(((middle, below.y - below.height / 2), (middle, above.y + above.height / 2)))
        for below, above in pairwise(spine)
        if below.y - above.y < 100
    ]
    arrows += [
        *(Arrow(((middle, 636), (middle, 622), (x, 622), (x, 606))) for x in (q, k, v)),
        *(Arrow(((x, 566), (x, 544))) for x in (q, k)),
        *(Arrow(((x, start), (x, 339))) for x, start in ((q, 516), (k, 516), (v, 566))),
        # The routers read the rotated q and k on their way.
        Arrow(((q, 498), (222, 498), (222, 478)), "router"),
        Arrow(((k, 498), (328, 498), (328, 478)), "router"),
        *(Arrow(((x, 438), (x, 409)), "router") for x in (222, 328)),
        Arrow(((275, 367), (275, 339)), "router"),
        Arrow(((middle, 297), (middle, 276))),
        # Around attention, and around the MLP.
        Arrow(((middle, 690), (60, 690), (60, 224), (middle - 10, 224))),
        Arrow(((middle, 205), (60, 205), (60, 54), (middle - 10, 54))),
    ]
    return Diagram(
        name="architecture",
        title="The decoder and its routers",
        caption="Two small routers read the rotated queries and keys of a layer and choose how far "
        "each token looks; values bypass them. What is outside of the coloured boxes and RoPE is "
        "the same in all variants.",
        nodes=nodes,
        arrows=tuple(arrows),
        frame=(30, 38, 508, 660),
        repeat=sized("× {} layers", "num_layers"),
    )


def arrow_head(arrow: Arrow) -> list[tuple[float, float]]:
    """The corners of the triangle at its end."""
    (ax, ay), (bx, by) = arrow.points[-2:]
    dx, dy = (bx > ax) - (bx < ax), (by > ay) - (by < ay)
    back, side = 7.0, 3.6
    return [
        (bx, by),
        (bx - back * dx - side * dy, by - back * dy + side * dx),
        (bx - back * dx + side * dy, by - back * dy - side * dx),
    ]
