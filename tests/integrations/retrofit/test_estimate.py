"""The estimate before any training: windows and choices, counted again by hand."""

import math
from itertools import pairwise

import pytest
import torch

import mosar
from integrations.retrofit.models import GEOMETRY, tiny_model, tokens
from mosar.integrations.retrofit.estimate import DENSITIES, attention_share, estimate_frontier

LENGTH = 128


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_more_pairs_lose_less_and_choices_lose_less_than_windows(family):
    attached = mosar.retrofit(tiny_model(family), GEOMETRY)
    found = estimate_frontier(attached, tokens(2, LENGTH))
    assert found.length == LENGTH and found.density == list(DENSITIES)
    for losses in (found.window, found.choice):
        assert all(0 <= later <= earlier <= 1 for earlier, later in pairwise(losses))
    assert all(c <= w + 1e-6 for c, w in zip(found.choice, found.window, strict=True))
    assert found.choice[1] < 0.9 * found.window[1]
    assert attached.routing == "dense" and all(layer.observer is None for layer in attached)


def test_the_attention_a_window_loses_is_what_lies_outside():
    """Where attention is the same for every key: 1 - a + a log a of a window of a n tokens."""
    model = tiny_model()
    for block in model.model.layers:
        block.self_attn.q_proj.weight.data.zero_()
    attached = mosar.retrofit(model, GEOMETRY)
    found = estimate_frontier(attached, tokens(1, 512)[:, :256])
    # A window of a n tokens reads 1 - (1 - a)^2 of the pairs.
    a = 1 - math.sqrt(1 - found.density[-1])
    assert found.window[-1] == pytest.approx(1 - a + a * math.log(a), abs=0.02)
    # Keys are all the same here, but early queries read all of them for little.
    assert found.choice[-1] < found.window[-1]


def test_the_share_of_attention_is_counted():
    attached = mosar.retrofit(tiny_model(), GEOMETRY)
    weights = sum(
        p.numel() for name, p in attached.model.model.named_parameters() if "embed" not in name
    )
    pairs = 2 * 2 * 6 * 8 * sum(range(1, 101))
    assert attention_share(attached, 100) == pytest.approx(pairs / (pairs + 100 * weights))
    found = estimate_frontier(attached, tokens(1, 64))
    assert found.speedup(1.0) == 1 and found.speedup(0.0) == pytest.approx(
        1 / (1 - found.attention_share)
    )
    assert torch.is_grad_enabled()
