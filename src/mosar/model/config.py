"""The size of the decoder: everything but the attention geometry and the training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

from mosar.geometries import HeadShape


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder's sizes and constants; all variants of one comparison share them."""

    vocab_size: int
    """Rows of the embedding, which is also the output head."""
    hidden_size: int
    """Width of the residual stream."""
    num_layers: int
    """Layers, each attention and feed-forward."""
    num_heads: int
    """H: query heads of a layer."""
    num_kv_heads: int
    """K: key/value heads of a layer; a divisor of num_heads."""
    head_dim: int
    """D: width of a head."""
    ffn_size: int
    """Width inside the gated feed-forward."""
    query_pre_attn_scalar: float
    """Scores are q·k divided by the square root of this; usually head_dim."""
    attn_softcap: float | None
    """c of c tanh(s/c) on the scaled scores, before any bias; None for no cap. Gemma 2 has 50."""
    final_softcap: float | None
    """The same on the output logits; Gemma 2 has 30."""
    max_length: int
    """N: the training length; a longer input is allowed."""
    norm_eps: float = 1e-6
    """Added to the mean square in every norm."""
    init_std: float = 0.02
    """Standard deviation of every weight matrix at initialisation."""

    def __post_init__(self) -> None:
        for name in (
            *("vocab_size", "hidden_size", "num_layers", "num_heads"),
            *("num_kv_heads", "head_dim", "ffn_size", "max_length"),
        ):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
            object.__setattr__(self, name, int(value))
        for name in ("query_pre_attn_scalar", "norm_eps", "init_std"):
            self._check_number(name, "a finite number > 0")
        for name in ("attn_softcap", "final_softcap"):
            if getattr(self, name) is not None:
                self._check_number(name, "None or a finite number > 0")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads={self.num_kv_heads}, "
                f"got {self.num_heads}"
            )

    @property
    def head_shape(self) -> HeadShape:
        """What a geometry must know of the model."""
        return HeadShape(self.num_heads, self.num_kv_heads, self.head_dim, self.max_length)

    def _check_number(self, name: str, rule: str) -> None:
        value = getattr(self, name)
        number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value <= 0:
            raise ValueError(f"{name} must be {rule}, got {value!r}")
        object.__setattr__(self, name, int(value) if isinstance(value, Integral) else float(value))
