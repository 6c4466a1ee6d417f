"""The sizes of the decoder, without the attention geometry and the training."""

from __future__ import annotations

from dataclasses import dataclass

from mosar.core.checks import check_counts, check_number
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
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        check_counts(self, dict.fromkeys((*sizes, "ffn_size", "max_length"), 1))
        for name in ("query_pre_attn_scalar", "norm_eps", "init_std"):
            check_number(self, name, above=0, keep_integers=True)
        for name in ("attn_softcap", "final_softcap"):
            check_number(self, name, above=0, optional=True, keep_integers=True)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads={self.num_kv_heads}, "
                f"got {self.num_heads}"
            )

    @property
    def head_shape(self) -> HeadShape:
        """What a geometry needs to know of the model."""
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        sizes = {"hidden_size": self.hidden_size, "num_layers": self.num_layers}
        return HeadShape(*heads, self.max_length, **sizes)
