"""Input at the edge of what numbers are: not-a-number, infinity, boundless reaches."""

import math

import pytest
import torch

from mosar import MoSARConfig, Regime, distance_attention, mosar_attention

ROUTINGS = ("soft", "top1", "sparse")
LENGTH = 450  # beyond the contexts that sparse routing serves with a dense pass
CONFIG = MoSARConfig.scaled(256)


def attend(kind, impl, q, k, v, **options):
    if kind == "distance":
        slopes = torch.full((q.shape[1],), 0.01)
        return distance_attention(q, k, v, slopes=slopes, return_lse=True, impl=impl, **options)
    generator = torch.Generator().manual_seed(1)
    pi = torch.softmax(3 * torch.randn(1, q.shape[2], 3, generator=generator), dim=-1)
    return mosar_attention(
        q, k, v, pi, pi, CONFIG, routing=kind, return_lse=True, impl=impl, **options
    )


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("poisoned", ["q", "k"])
@pytest.mark.parametrize("kind", [*ROUTINGS, "distance"])
def test_nothing_hides_a_diverging_model(kind, poisoned, value, softcap):
    """A NaN or infinity of a real token shows in every row that reads it, as in the reference."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(1, 2, LENGTH, 16, generator=generator) for name in "qkv"}
    tensors[poisoned][0, 0, 3] = value
    expected = attend(kind, "reference", **tensors, softcap=softcap)
    found = attend(kind, "native", **tensors, softcap=softcap)
    for ours, true in zip(found, expected, strict=True):
        assert torch.equal(ours.isfinite(), true.isfinite())
    assert not expected[0].isfinite().all() or (softcap and value == math.inf)


@pytest.mark.parametrize("impl", ["native", "tiled"])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("reach", [1e6, 1e9, 1e30])
def test_a_boundless_reach_costs_nothing(reach, routing, impl):
    config = MoSARConfig(regimes=(Regime("S", 4, 0.5), Regime("G", reach, 1.0)))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 20, 8, generator=generator)
    pi = torch.softmax(torch.randn(1, 20, 2, generator=generator), dim=-1)
    expected = mosar_attention(q, q, q, pi, pi, config, routing=routing, impl="reference")
    found = mosar_attention(q, q, q, pi, pi, config, routing=routing, impl=impl)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slopes", math.nan),
        ("slopes", math.inf),
        ("log_gate", math.nan),
        ("log_gate", math.inf),
        ("log_gate", -2e30),
        ("softcap", 1e-50),
        ("softcap", 1e39),
        ("scale", 1e39),
        ("scale", 10**400),
    ],
)
def test_numbers_that_float32_cannot_use_are_refused(name, value):
    q = torch.randn(1, 2, 4, 8)
    given = {"slopes": torch.full((2,), 0.1), "log_gate": torch.zeros(1, 4)}
    if name in given:
        given[name].fill_(value)
    options = {name: given.get(name, value)}
    with pytest.raises(ValueError, match=name):
        distance_attention(q, q, q, **options)
