"""Tiny random models of the families that are held to their own attention."""

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

import mosar
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
    # Its window is no longer than the longest reach below global: the local layer has no routers.
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 12,
        "query_pre_attn_scalar": 11,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {},
    "olmo2": {},
    "gpt_neox": {"num_key_value_heads": 6, "rotary_pct": 0.25},
}
WINDOWS = {
    "llama": [None, None],
    "mistral": [15, 15],
    "qwen2": [None, 15],
    "qwen3": [None, 15],
    "gemma2": [15, None],
    "gemma3_text": [11, None],
    "phi3": [None, None],
    "olmo2": [None, None],
    "gpt_neox": [None, None],
}
ROUTED = {family: [0, 1] for family in FAMILIES} | {"gemma3_text": [1]}
"""Layers with routers under `GEOMETRY`."""
_MIXED = {
    "num_hidden_layers": 4,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Here the attention modules say another window than the layers have, or none: EXAONE and Kolibri
# set it on layers that read everything, Qwen2-MoE and Phi-MoE name it in the mask alone.
MIXED_FAMILIES = {
    "exaone4": {"head_dim": 8, **_MIXED},
    "exaone4_5": {"head_dim": 8, **_MIXED},
    "exaone_moe": {
        **{"head_dim": 8, **_MIXED, **_EXPERTS, "num_shared_experts": 1, "n_group": 1},
        **{"topk_group": 1, "first_k_dense_replace": 1},
    },
    "kolibri1": {"head_dim": 8, **_MIXED, **_EXPERTS, "n_routed_experts": 4, "n_group": 1},
    "qwen2_moe": {
        **{**_MIXED, **_EXPERTS, "use_sliding_window": True},
        "shared_expert_intermediate_size": 32,
    },
    "phimoe": {"head_dim": 8, "sliding_window": 16, "num_local_experts": 4},
    "vaultgemma": {"head_dim": 8, "query_pre_attn_scalar": 11, **_MIXED},
}
FAMILIES_BY_MASK = [family for family in MIXED_FAMILIES if family in CONFIG_MAPPING]
WINDOWS |= {key: [15, None, 15, None] for key in MIXED_FAMILIES} | {"phimoe": [15, 15]}
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
    sizes = _SHAPE | (FAMILIES | MIXED_FAMILIES).get(family, {"head_dim": 8}) | changes
    if family == "exaone4_5":
        # A model of text and images, of which only the text is read.
        image = {"hidden_size": 48, "intermediate_size": 64, "depth": 1, "num_heads": 6}
        image |= {"num_key_value_heads": 2, "out_hidden_size": 48}
        text = {"model_type": "exaone4"} | sizes
        config = AutoConfig.for_model(family, text_config=text, vision_config=image)
        model = AutoModelForImageTextToText.from_config(config).eval()
    else:
        config = AutoConfig.for_model(family, **sizes)
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


def routed_model(family="llama", routing="sparse", config=GEOMETRY):
    """A tiny model whose tokens choose every regime, and its routers."""
    model = tiny_model(family)
    attached = mosar.retrofit(model, config)
    scatter_choices(attached)
    attached.set_routing(routing)
    return model, attached
