"""The configuration of a decoder as transformers keeps it: sizes by their usual names, a geometry.

`model_config` and `attention_config` give back what `Decoder` takes; they hold the rules, so that a
value that fits nowhere is refused here with the text it has everywhere.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

from mosar.attention import ROUTINGS
from mosar.core.config import MoSARConfig, Regime
from mosar.geometries import AttentionConfig
from mosar.model.config import ModelConfig

# Our name of a size -> that of transformers.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_size": "intermediate_size",
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "attn_softcap": "attn_logit_softcapping",
    "final_softcap": "final_logit_softcapping",
    "max_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}


class MosarDecoderConfig(PreTrainedConfig):
    """What the models are built from; without arguments, a mosar of preset "small"."""

    model_type = "mosar"
    keys_to_ignore_at_inference = ["past_key_values", "routing_cost"]  # noqa: RUF012

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    query_pre_attn_scalar: float = 64.0
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    max_position_embeddings: int = 512
    """N: the training length; a longer input is allowed."""
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    attention: dict[str, Any] | None = None
    """The fields of an `AttentionConfig` that differ from its defaults; None: geometry "mosar"."""
    routing: str = "soft"
    """How routers are used: "soft", "top1" or "sparse"; `set_routing` changes it."""
    provenance: dict[str, Any] | None = None
    """The training run it was exported from: its configuration, step and checksums."""
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = True
    """Whether the embedding is the output head, as it is in every run of ours."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.attention is None:
            self.attention = {"geometry": "mosar"}
        if self.routing not in ROUTINGS:
            raise ValueError(f"routing must be one of {ROUTINGS}, got {self.routing!r}")
        # Regimes that do not fit the sizes are refused now, not by the first layer.
        _ = self.model_config, self.mosar_config

    @property
    def model_config(self) -> ModelConfig:
        """The sizes, checked."""
        return ModelConfig(**{ours: getattr(self, theirs) for ours, theirs in _SIZES.items()})

    @property
    def attention_config(self) -> AttentionConfig:
        """The geometry, checked."""
        given = dict(self.attention or {})
        known = [field.name for field in fields(AttentionConfig)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ValueError(f"attention has unknown keys {unknown}; there are {known}")
        if given.get("regimes") is not None:
            given["regimes"] = tuple(
                regime if isinstance(regime, Regime) else Regime(**regime)
                for regime in given["regimes"]
            )
        return AttentionConfig(**given)

    @property
    def mosar_config(self) -> MoSARConfig:
        """The regimes at the training length."""
        return self.attention_config.mosar_config(self.max_position_embeddings)

    @classmethod
    def from_decoder(
        cls, model: ModelConfig, attention: AttentionConfig, **options: Any
    ) -> MosarDecoderConfig:
        """The configuration of `Decoder(model, attention)`; options: its other fields."""
        sizes = {theirs: getattr(model, ours) for ours, theirs in _SIZES.items()}
        # transformers checks types to the letter.
        for name in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
            sizes[name] = None if sizes[name] is None else float(sizes[name])
        default = AttentionConfig().to_dict()
        chosen = {
            name: value
            for name, value in attention.to_dict().items()
            if value != default[name] or name == "geometry"
        }
        if chosen.get("regimes") is not None:
            chosen["regimes"] = list(chosen["regimes"])
        return cls(**sizes, attention=chosen, **options)
