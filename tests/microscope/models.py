"""Small models whose routers choose every regime, over bytes."""

from dataclasses import replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mosar import MoSARConfig
from mosar.geometries import VARIANTS
from mosar.integrations.retrofit import retrofit
from mosar.model.config import ModelConfig
from mosar.model.decoder import Decoder

SIZES = {"vocab_size": 257, "hidden_size": 32, "head_dim": 8, "max_length": 32}
HEADS = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48}
SCORES = {"query_pre_attn_scalar": 8, "attn_softcap": 50.0, "final_softcap": 30.0}


def make_decoder(variant="mosar", **changes):
    attention = replace(VARIANTS[variant], **changes)
    decoder = Decoder(ModelConfig(**SIZES, **HEADS, **SCORES), attention)
    decoder.init_weights(seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "router" in name:
                parameter.normal_(std=0.7, generator=generator)
            elif "_proj" in name:
                parameter.mul_(8)
    return decoder.eval().requires_grad_(False)


def make_retrofit():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    geometry = MoSARConfig.scaled(32, routing_groups=2, num_sinks=2, composition="min")
    attached = retrofit(LlamaForCausalLM(config).eval(), geometry)
    with torch.no_grad():
        for parameter in attached.parameters():
            parameter.normal_(std=0.5)
    return attached
