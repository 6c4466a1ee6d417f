"""Tiny random models of the families that are held to their own attention."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mosar import MoSARConfig, Regime

VOCAB = 97
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDING = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
# Windows shorter than the prompts of the tests, and scores large enough for the soft-cap to act.
FAMILIES = {
    "llama": {"head_dim": 8},
    "mistral": {"head_dim": 8, "sliding_window": 16},
    "qwen2": _SLIDING,
    "qwen3": {"head_dim": 8, **_SLIDING},
    "gemma2": {
        "head_dim": 8,
        "sliding_window": 16,
        "query_pre_attn_scalar": 11,
        "attn_logit_softcapping": 5.0,
    },
}
WINDOWS = {
    "llama": [None, None],
    "mistral": [15, 15],
    "qwen2": [None, 15],
    "qwen3": [None, 15],
    "gemma2": [15, None],
}
GEOMETRY = MoSARConfig(
    max_length=256,
    regimes=(Regime("S", 4, 1.0), Regime("M", 12, 1.0), Regime("G", 256, 1.0)),
    composition="min",
    routing_groups=2,
    num_sinks=2,
    router_hidden=16,
)


def tiny_model(family="llama", seed=0, **changes):
    """A model whose weights are large enough for attention to matter."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **_SHAPE | FAMILIES[family] | changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3)
    return model


def tokens(batch, length, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)


def scatter_choices(attached, seed=2):
    """Routers that choose every regime, by the token."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in attached:
            for router in layer.routers:
                router.weight2.normal_(std=20.0, generator=generator)
                router.bias2.zero_()
