"""With the same weights, our rope variant is transformers' Gemma 2."""

import pytest
import torch

from mosar.model.config import ModelConfig
from mosar.model.decoder import Decoder

from .models import small_decoder

transformers = pytest.importorskip("transformers")

# Ours -> theirs, by part of the name.
RENAMED = {
    "embedding.": "embed_tokens.",
    ".attention.": ".self_attn.",
    ".ffn.": ".mlp.",
    ".pre_attention_norm.": ".input_layernorm.",
    ".post_attention_norm.": ".post_attention_layernorm.",
    ".pre_ffn_norm.": ".pre_feedforward_layernorm.",
    ".post_ffn_norm.": ".post_feedforward_layernorm.",
}


def their_name(name: str) -> str:
    for ours, theirs in RENAMED.items():
        name = name.replace(ours, theirs)
    return f"model.{name}"


def their_model(model: ModelConfig):
    config = transformers.Gemma2Config(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        intermediate_size=model.ffn_size,
        query_pre_attn_scalar=model.query_pre_attn_scalar,
        attn_logit_softcapping=model.attn_softcap,
        final_logit_softcapping=model.final_softcap,
        rms_norm_eps=model.norm_eps,
        layer_types=["full_attention"] * model.num_layers,
        pad_token_id=None,
        attn_implementation="eager",
    )
    return transformers.Gemma2ForCausalLM(config).eval()


def copy_weights(decoder: Decoder, theirs) -> None:
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            theirs.get_parameter(their_name(name)).copy_(parameter)


def lively_decoder(**changes) -> Decoder:
    """Weights large enough that soft-caps, norms and rotation all show in the logits."""
    decoder = small_decoder("rope", init_std=0.2, **changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 1:
                parameter.normal_(std=0.3, generator=generator)
    return decoder


@pytest.mark.parametrize(
    ("heads", "kv_heads", "softcaps"),
    [(4, 4, (None, None)), (6, 2, (50.0, 30.0)), (8, 1, (2.0, 1.5))],
)
def test_same_logits_as_transformers(heads, kv_heads, softcaps):
    decoder = lively_decoder(
        hidden_size=48,
        num_heads=heads,
        num_kv_heads=kv_heads,
        num_layers=3,
        query_pre_attn_scalar=16,
        attn_softcap=softcaps[0],
        final_softcap=softcaps[1],
    )
    theirs = their_model(decoder.model_config)
    copy_weights(decoder, theirs)
    tokens = torch.randint(0, 61, (2, 50), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours = decoder.logits(decoder(tokens).hidden)
        expected = theirs(tokens).logits
    assert ours.std() > 0.1
    assert (ours - expected).abs().max() <= 1e-5


def test_same_gradients_as_transformers():
    decoder = lively_decoder()
    theirs = their_model(decoder.model_config)
    copy_weights(decoder, theirs)
    tokens = torch.randint(0, 61, (2, 30), generator=torch.Generator().manual_seed(3))
    loss = torch.nn.functional.cross_entropy
    loss(decoder.logits(decoder(tokens).hidden).flatten(0, 1), tokens.flatten()).backward()
    loss(theirs(tokens).logits.flatten(0, 1), tokens.flatten()).backward()
    for name, parameter in decoder.named_parameters():
        expected = theirs.get_parameter(their_name(name)).grad
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-3, atol=1e-5)
