"""Parameters and operations are counted as the real model has them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mosar.geometries import VARIANTS
from mosar.model.decoder import Decoder
from mosar.model.parameters import parameter_parts, total
from mosar.planning.flops import (
    attention_flops,
    causal_pairs,
    matrix_flops,
    router_flops,
    training_flops,
)
from mosar.planning.parameters import tensor_part
from mosar.training.distributed.mesh import Mesh
from mosar.training.presets import PRESETS
from planning.configs import small_config

ROUTERS = ("routing_groups=2", "router_hidden=7", "num_sinks=3")


@pytest.mark.parametrize(
    ("variant", "preset", "changes"),
    [
        *((variant, "smoke", ()) for variant in VARIANTS),
        *((variant, preset, ()) for variant in ("rope", "mosar") for preset in PRESETS),
        *(("mosar", "smoke", (f"attention.{change}",)) for change in ROUTERS),
    ],
)
def test_count_is_the_models(variant, preset, changes):
    config = small_config(variant, preset, *changes)
    with torch.device("meta"):
        decoder = Decoder(config.model, config.attention)
    parts = parameter_parts(config.model, config.attention)
    assert total(parts) == sum(p.numel() for p in decoder.parameters())
    in_layers = sum(p.numel() for p in decoder.layers.parameters())
    assert total(part for part in parts if part.place != "root") == in_layers
    if (variant, preset) == ("rope", "paper"):
        assert total(parts) == 800_138_240


def test_ranks_hold_their_part():
    config = small_config()
    model, parts = config.model, parameter_parts(config.model, config.attention)
    whole = sum(part.count for part in parts if part.split == "whole")
    # Two key heads: four ranks hold both.
    keys = sum(part.count for part in parts if part.split == "keys")
    heads = sum(part.count for part in parts if part.split == "heads")
    assert tensor_part(parts, model, Mesh(tensor=1)) == total(parts)
    assert tensor_part(parts, model, Mesh(tensor=2)) == whole + keys / 2 + heads / 2
    assert tensor_part(parts, model, Mesh(tensor=4)) == whole + keys + heads / 4


@pytest.mark.parametrize("variant", ["rope", "mosar"])
def test_operations_are_those_that_torch_counts(variant):
    config = small_config(variant)
    decoder = Decoder(config.model, config.attention)
    decoder.init_weights(0)
    tokens = torch.randint(0, 500, (2, 24))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        decoder.logits(decoder(tokens).hidden)
    counted = counter.get_total_flops()
    ours = matrix_flops(config) + router_flops(config)
    # The attention kernel is an operator of its own, which torch does not know how to count.
    assert counted == tokens.numel() * ours


def test_training_counts_what_is_computed_again():
    config = small_config()
    plain = training_flops(config, 64)
    again = training_flops(small_config("mosar", "smoke", "train.checkpoint_activations=true"), 64)
    forward = matrix_flops(config) + router_flops(config)
    pairs = attention_flops(config.model, causal_pairs(64))
    head = 2 * config.model.vocab_size * config.model.hidden_size
    assert plain == 3 * forward + 3.5 * pairs
    assert again - plain == pytest.approx(forward - head + pairs)


def test_a_tensor_rank_computes_what_it_holds():
    """Divided: heads and feed-forward. Not divided: the output head, and keys that are copied."""
    config = small_config("mosar", "smoke", "model.num_kv_heads=1")
    model, four = config.model, Mesh(tensor=4)
    size, query, key = model.hidden_size, model.num_heads * model.head_dim, model.head_dim
    divided = 2 * size * query + 3 * size * model.ffn_size
    copied = 2 * size * key
    head = model.vocab_size * size
    ours = 2 * (model.num_layers * (divided / 4 + copied) + head)
    assert matrix_flops(config, four) == ours
    hidden, regimes = 64, 3
    routers = hidden * (query / 4 + key) + 2 * hidden * regimes
    assert router_flops(config, four) == 2 * model.num_layers * routers
    grouped = small_config("mosar", "smoke", "attention.routing_groups=2")
    assert router_flops(grouped, Mesh(tensor=2)) == router_flops(grouped) / 2
    alone = attention_flops(model, 10)
    assert attention_flops(model, 10, four) == alone / 4
