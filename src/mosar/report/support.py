"""Supports as grids of cells: which pairs of a query and a key sparse attention evaluates.

A cell is one pair, or a square of pairs where there are more tokens than cells; its shade is the
share of its causal pairs that are inside the support.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase, digits

import torch
from torch import Tensor

from mosar.core.config import MoSARConfig
from mosar.core.hard_domain import build_hard_domain
from mosar.records import EvaluationRecord
from mosar.report.comparison import Comparison
from mosar.report.palette import Look, regime_looks

MAX_CELLS = 48
# Of a longer text every second, third, … token is drawn.
_MAX_DRAWN = 2048
SHADES = (0.22, 0.45, 0.7, 1.0)


@dataclass(frozen=True)
class SupportGrid:
    """One geometry over the first tokens of a text."""

    title: str
    look: Look
    tokens: int
    block: int
    """Tokens along the side of a cell."""
    density: float
    shares: tuple[tuple[float, ...], ...]
    """By row and column; a row ends at the diagonal."""

    @property
    def size(self) -> int:
        return len(self.shares)

    @property
    def remark(self) -> str:
        return f"ρ = {self.density:.3f} · {self.tokens:,} tokens"


def fixed_grids(config: MoSARConfig) -> list[SupportGrid]:
    """Every token of a text of the training length in the same regime, for each regime."""
    looks = regime_looks(regime.name for regime in config.regimes)
    grids, tokens = [], config.max_length
    for index, regime in enumerate(config.regimes):
        labels = torch.full((math.ceil(tokens / _stride(tokens)),), index)
        title, look = f"every token {regime.name}", looks[regime.name]
        grids.append(_grid(title, look, labels, labels, config, tokens))
    return grids


def routed_grids(c: Comparison, variant: str) -> list[SupportGrid]:
    """What a trained model chose for the first tokens of the evaluation text, one grid per layer.

    A record may hold fewer tokens than the training length.
    """
    config, record = c.geometry(variant), example_record(c, variant)
    if config is None or record is None:
        return []
    letters = _letters(record.regimes)
    if len(letters) != config.num_regimes:
        return []
    look = c.looks[variant]
    grids = []
    sides = zip(record.example_labels["query"], record.example_labels["key"], strict=True)
    for layer, (query, key) in enumerate(sides, start=1):
        if len(query) != len(key) or not query or not set(query + key) <= set(letters):
            return []
        tokens = len(query)
        of_query, of_key = (
            torch.tensor([letters.index(letter) for letter in side[:: _stride(tokens)]])
            for side in (query, key)
        )
        title = f"{look.label}, layer {layer}"
        grids.append(_grid(title, look, of_query, of_key, config, tokens))
    return grids


def example_record(c: Comparison, variant: str) -> EvaluationRecord | None:
    """The evaluation with the longest example, at the shortest length."""
    found = [record for record in c.records(variant) if record.example_labels.get("query")]
    return max(found, key=lambda r: len(r.example_labels["query"][0]), default=None)


def median_layer(grids: Sequence[SupportGrid]) -> int:
    """The layer whose density is in the middle: neither the most open nor the most closed."""
    order = sorted(range(len(grids)), key=lambda index: grids[index].density)
    return order[len(order) // 2] if order else 0


def _letters(names: Sequence[str]) -> list[str]:
    """As evaluations write them: the first letter of a name that no other regime has taken."""
    taken: list[str] = []
    for name in names:
        taken.append(next(c for c in (*name, *ascii_uppercase, *digits) if c not in taken))
    return taken


def _grid(
    title: str, look: Look, query: Tensor, key: Tensor, config: MoSARConfig, tokens: int
) -> SupportGrid:
    """`query` and `key` are the labels of the drawn ones of `tokens` tokens."""
    stride = _stride(tokens)
    positions = stride * torch.arange(len(query))[None]
    domain = build_hard_domain(
        query[None], key[None], config, query_positions=positions, key_positions=positions
    )
    mask = domain.mask
    assert mask is not None
    mask, causal = mask[0], torch.ones_like(mask[0]).tril()
    block = math.ceil(len(query) / MAX_CELLS)
    size = math.ceil(len(query) / block)
    inside, all_pairs = (_sums(m, block, size) for m in (mask, causal))
    shares = (inside / all_pairs.clamp_min(1)).tolist()
    return SupportGrid(
        title=title,
        look=look,
        tokens=tokens,
        block=block * stride,
        density=float(mask.sum() / causal.sum()),
        shares=tuple(tuple(row[: index + 1]) for index, row in enumerate(shares)),
    )


def _stride(tokens: int) -> int:
    return math.ceil(tokens / _MAX_DRAWN)


def _sums(mask: Tensor, block: int, size: int) -> Tensor:
    """How many are true in each square."""
    whole = torch.zeros(size * block, size * block)
    whole[: len(mask), : len(mask)] = mask
    return whole.view(size, block, size, block).sum(dim=(1, 3))


def shade(portion: float) -> int:
    """Which of the shades shows this share; -1: none."""
    return -1 if portion <= 0 else min(int(portion * len(SHADES) - 1e-9), len(SHADES) - 1)
