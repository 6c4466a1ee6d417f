"""A mode: a way to execute a trained model that it was not trained with.

    rope · yarn, rope · streaming, fox · acp, ...      mosar evaluate RUN --mode yarn,streaming

A mode stands in for the two hooks of a geometry (`transform` and `attend`) while it lasts. It
states its facts once: which geometries it serves, whether it is prefix-invariant, whom it follows.

Shapes: B batch, H query heads, K key/value heads, T tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mosar.geometries.geometry import Attended, Geometry

MODES: dict[str, type[Mode]] = {}
"""The known modes by name; the package fills it, and so may anybody else."""


class Mode:
    """Executes a geometry as it is; subclasses override `transform` or `attend`."""

    name: ClassVar[str]
    geometries: ClassVar[tuple[type[Geometry], ...]]
    """The geometries that it serves: these classes, not their subclasses."""
    prefix_invariant: ClassVar[bool] = True
    """Whether later tokens change nothing of what comes before."""
    source: ClassVar[str]
    """The paper or repository that it follows."""

    def __init__(self, geometry: Geometry, length: int):
        """length: the number of tokens of the texts that follow."""
        self.geometry, self.length = geometry, length

    @classmethod
    def serves(cls, geometry: Geometry) -> bool:
        return type(geometry) in cls.geometries

    def transform(self, q: Tensor, k: Tensor, at_q: Tensor, at_k: Tensor) -> tuple[Tensor, Tensor]:
        """As `Geometry.transform`."""
        return self.geometry.transform(q, k, at_q, at_k)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Attended:
        """As `Geometry.attend`."""
        return self.geometry.attend(q, k, v, **options)

    def count_pairs(self, shape: tuple[int, int], **options: Any) -> tuple[float, int] | None:
        """As `Geometry.count_pairs`, of the text that was read last."""
        return None


class TextMode(Mode):
    """A mode that reads whole documents, one after the other: no cache, no padding."""

    _counted: tuple[float, int] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Attended:
        placement = ("key_positions", "query_positions", "key_valid")
        if q.shape[2] != k.shape[2] or any(options.get(name) is not None for name in placement):
            raise ValueError(
                f"the mode {self.name} reads whole texts: it takes no cache, no padding and no "
                f"positions, got {q.shape[2]} queries and {k.shape[2]} keys"
            )
        scores = {name: options[name] for name in ("scale", "softcap")}
        out, pairs, causal = torch.empty_like(q), 0.0, 0
        for rows, tokens in _documents(options.get("segment_ids"), *q.shape[0:3:2]):
            text = (x[rows, :, tokens] for x in (q, k, v))
            out[rows, :, tokens], read = self.attend_text(*text, **scores)
            count, length = rows.stop - rows.start, tokens.stop - tokens.start
            pairs, causal = pairs + read, causal + count * length * (length + 1) // 2
        self._counted = pairs, causal
        return out, None

    def attend_text(self, q: Tensor, k: Tensor, v: Tensor, **scores: Any) -> tuple[Tensor, float]:
        """Documents of one length: q [B, H, T, D]; k, v [B, K, T, D] -> [B, H, T, D], pairs read.

        The pairs are those of all rows, a mean over the heads. scores: scale and softcap.
        """
        raise NotImplementedError

    def count_pairs(self, shape: tuple[int, int], **options: Any) -> tuple[float, int] | None:
        return self._counted


def _documents(segment_ids: Tensor | None, rows: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Rows and tokens of each document; all rows at once where a row is one document."""
    if segment_ids is None:
        yield slice(0, rows), slice(0, length)
        return
    for row in range(rows):
        _, counts = torch.unique_consecutive(segment_ids[row], return_counts=True)
        end = 0
        for count in counts.tolist():
            start, end = end, end + count
            yield slice(row, row + 1), slice(start, end)
