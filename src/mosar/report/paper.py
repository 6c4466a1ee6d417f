"""The paper's reported figures, beside which ours are put; lengths are factors of its 2048."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.resources import files
from typing import Any


@lru_cache(maxsize=1)
def paper() -> dict[str, Any]:
    """paper.json: main and routing tables, validation curves, by the name of the variant."""
    return json.loads(files("mosar.report").joinpath("paper.json").read_text(encoding="utf-8"))


def _key(factor: float) -> str:
    return f"{factor:g}"


def paper_length(factor: float) -> str | None:
    """What the paper calls the length of this factor, "8k" for 4; None where it has none."""
    known = _key(factor) in paper()["main"]["rope"]["perplexity"]
    return f"{paper()['train_length'] * factor / 1024:g}k" if known else None


def paper_perplexity(variant: str, factor: float, routing: str = "soft") -> float | None:
    """Of its main table, or of top-1 routing."""
    if routing == "top1":
        return paper_routing(variant, factor).get("top1_ppl")
    row = paper()["main"].get(variant, {})
    return row.get("perplexity", {}).get(_key(factor))


def paper_delta(variant: str, factor: float) -> float | None:
    """Perplexity against RoPE, percent; as printed, or from its perplexities."""
    row = paper()["main"].get(variant)
    if row is None:
        return None
    printed = row["delta_pct"].get(_key(factor))
    if printed is not None:
        return printed
    ours, rope = paper_perplexity(variant, factor), paper_perplexity("rope", factor)
    return None if ours is None or rope is None else (ours / rope - 1) * 100


def paper_reach(variant: str) -> float | None:
    return paper()["main"].get(variant, {}).get("reach")


def paper_routing(variant: str, factor: float) -> dict[str, float]:
    """A row of its routing table; empty where it has none."""
    return paper()["routing"].get(variant, {}).get(_key(factor), {})
