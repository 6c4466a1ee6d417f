"""transformers' models of our sizes, as competitors."""

from __future__ import annotations

from typing import Any

import torch

from mosar.bench.comparison import Unavailable
from mosar.geometries import VARIANTS
from mosar.lazy import install_line
from mosar.model.config import ModelConfig
from mosar.model.decoder import Decoder
from mosar.training.config import RunConfig


def build_gemma2(config: RunConfig, attention: str) -> Any:
    """Gemma 2 with the weights that our rope starts from, in training; raises Unavailable."""
    transformers, model = _transformers(), config.model
    theirs = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            **_sizes(model),
            query_pre_attn_scalar=int(model.query_pre_attn_scalar),
            attn_logit_softcapping=model.attn_softcap,
            final_logit_softcapping=model.final_softcap,
            rms_norm_eps=model.norm_eps,
            layer_types=["full_attention"] * model.num_layers,
            sliding_window=model.max_length,
            max_position_embeddings=model.max_length,
            pad_token_id=None,
            attn_implementation="eager",
        )
    )
    # Asked for openly it is refused, for its lack of a soft-cap; here there is none.
    theirs.config._attn_implementation_internal = attention
    ours = Decoder(model, VARIANTS["rope"])
    ours.init_weights(config.train.seed)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            theirs.get_parameter(_gemma2_name(name)).copy_(parameter)
    return theirs.train()


def build_llama(model: ModelConfig, length: int) -> tuple[Any, Any]:
    """Llama with SDPA, and the cache it uses when nothing is said; raises Unavailable."""
    transformers = _transformers()
    config = transformers.LlamaConfig(
        **_sizes(model),
        max_position_embeddings=length,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config).eval(), transformers.DynamicCache()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise Unavailable(f"needs transformers ({error}): {install_line('hf')}") from None
    return transformers


def _sizes(model: ModelConfig) -> dict[str, int]:
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_size,
    }


_RENAMED = {
    "embedding.": "embed_tokens.",
    ".attention.": ".self_attn.",
    ".ffn.": ".mlp.",
    ".pre_attention_norm.": ".input_layernorm.",
    ".post_attention_norm.": ".post_attention_layernorm.",
    ".pre_ffn_norm.": ".pre_feedforward_layernorm.",
    ".post_ffn_norm.": ".post_feedforward_layernorm.",
}


def _gemma2_name(name: str) -> str:
    for ours, theirs in _RENAMED.items():
        name = name.replace(ours, theirs)
    return f"model.{name}"
