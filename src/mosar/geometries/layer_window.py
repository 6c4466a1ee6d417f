"""Windows that depend on the layer, and first tokens that every query reads.

    pair (i, j) exists iff i - j <= w_layer or j is one of the first G tokens

Both run on the kernels of sparse routing or of a plain window: no mask is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mosar.attention import Routing, attend
from mosar.core.bias import LabelBias
from mosar.core.config import MoSARConfig, Regime
from mosar.geometries.geometry import Attended, plain_attention
from mosar.geometries.own_settings import OwnSettings, setting
from mosar.geometries.rope import Rope


class LayerWindow(Rope):
    """RoPE, and a window of this layer; subclasses say how wide."""

    family = "window"

    @property
    def window(self) -> float | None:
        """The largest distance that is read; None: all."""
        raise NotImplementedError

    @property
    def global_tokens(self) -> int:
        """The first tokens of a document, which every later one reads."""
        return 0

    def band(self, routing: str) -> float | None:
        return None if self.global_tokens else self.window

    def keys_read(self, positions: Tensor, routing: str) -> Tensor | None:
        window = self.window
        if window is None:
            return None
        beyond = (positions - math.floor(window)).clamp(0, self.global_tokens)
        return (positions + 1).clamp_max(math.floor(window) + 1) + beyond

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, routing: Routing, **options: Any
    ) -> Attended:
        window, sinks = self.window, self.global_tokens
        if window is None:
            return plain_attention(q, k, v, **options), None
        if not sinks:
            return plain_attention(q, k, v, window=window, **options), None
        far = max(2 * window, self.shape.max_length) + 1
        regimes = (Regime("window", window, 1.0), Regime("all", far, 1.0))
        config = MoSARConfig(max_length=self.shape.max_length, regimes=regimes, num_sinks=sinks)
        query, key = (
            torch.zeros(x.shape[0], 1, x.shape[2], dtype=torch.int64, device=x.device)
            for x in (q, k)
        )
        return attend(q, k, v, LabelBias(query, key, config, ends_at_reach=True), **options), None


class Gemma3(LayerWindow):
    """Five layers with a window, then one that reads everything."""

    source, checked = "Gemma 3 (2025)", "its law; transformers"

    @dataclass(frozen=True, kw_only=True)
    class Own(OwnSettings):
        window: float = setting(1 / 4, above=0)
        """Window of the layers that have one, as a share of the training length N."""
        every: int = setting(6, least=1)
        """The last of every so many layers reads everything; in a model with fewer, its last."""

    @property
    def window(self) -> float | None:
        every = min(self.own.every, self.shape.num_layers or self.own.every)
        full = (self.shape.layer + 1) % every == 0
        return None if full else self.tokens(self.own.window)


class Longformer(LayerWindow):
    """Windows that grow with the layer, and global tokens; the causal form of its language model.

    The global tokens have no projections of their own, and no head is dilated.
    """

    source, checked = "Beltagy et al. 2020 (Longformer)", "its law; local-attention"

    @dataclass(frozen=True, kw_only=True)
    class Own(OwnSettings):
        windows: tuple[float, ...] = setting(
            (1 / 32, 1 / 16, 1 / 16, 1 / 8, 7 / 32, 7 / 32), above=0
        )
        """Window of each layer, as a share of N; the last one holds for all further layers."""
        global_tokens: float = setting(1 / 32, least=0)
        """The first tokens that every query reads, as a share of N."""

    @property
    def window(self) -> float | None:
        windows = self.own.windows
        return self.tokens(windows[min(self.shape.layer, len(windows) - 1)])

    @property
    def global_tokens(self) -> int:
        return self.tokens(self.own.global_tokens) if self.own.global_tokens else 0
