"""The configuration: what a decoder is built from, through JSON and back."""

import pytest
from transformers import AutoConfig

from model.models import small_model
from mosar import Regime
from mosar.geometries import VARIANTS, AttentionConfig
from mosar.integrations.hf import MosarDecoderConfig

CUSTOM = AttentionConfig(
    geometry="mosar",
    regimes=(Regime("near", 3.5, 0.5), Regime("far", 32.0, 1.0)),
    num_sinks=2,
    routing_groups=2,
    barrier=4.0,
)


@pytest.mark.parametrize("attention", [*VARIANTS.values(), CUSTOM], ids=[*VARIANTS, "custom"])
def test_round_trip(attention, tmp_path):
    model = small_model(attn_softcap=None)
    config = MosarDecoderConfig.from_decoder(model, attention, routing="top1", eos_token_id=3)
    config.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(read, MosarDecoderConfig)
    assert (read.model_config, read.attention_config) == (model, attention)
    assert (read.routing, read.eos_token_id) == ("top1", 3)


def test_defaults_are_a_mosar():
    assert MosarDecoderConfig().attention_config == VARIANTS["mosar"]


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"routing": "hard"}, "routing must be one of"),
        ({"num_attention_heads": 3}, "num_heads must be a multiple of num_kv_heads=2, got 3"),
        ({"hidden_size": 0}, "hidden_size must be an integer >= 1, got 0"),
        ({"attention": {"geometry": "ring"}}, "geometry must be one of"),
        ({"attention": {"reach": 3}}, "attention has unknown keys ['reach']"),
        ({"attention": {"geometry": "mosar", "barrier": -1}}, "barrier must be"),
    ],
)
def test_wrong_values_are_named(values, rule):
    with pytest.raises(ValueError) as error:
        MosarDecoderConfig(**values)
    assert rule in str(error.value)
