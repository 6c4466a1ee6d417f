"""What a geometry says about itself, which everything else relies on."""

import dataclasses

import pytest
import torch
from torch import nn

from mosar import Regime
from mosar.geometries import GEOMETRIES, UNROUTED, VARIANTS, AttentionConfig, Geometry, HeadShape

SHAPE = HeadShape(num_heads=4, num_kv_heads=2, head_dim=8, max_length=512)


def windowed(reach):
    """A geometry whose hard window is `reach`."""

    class Windowed(Geometry):
        def band(self, routing):
            return reach

    return Windowed(AttentionConfig(), SHAPE)


@pytest.mark.parametrize("window", [0.5, 1, 9.99, 16, 63, 64, 1000])
@pytest.mark.parametrize("length", [1, 2, 64])
def test_pairs_of_a_window(window, length):
    distances = torch.arange(length)[:, None] - torch.arange(length)
    causal = 3 * int((distances >= 0).sum())
    inside = 3 * int(((distances >= 0) & (distances <= window)).sum())
    assert windowed(window).count_pairs((3, length)) == (inside, causal)


def test_pairs_of_a_window_in_documents():
    segments = torch.tensor([[0] * 5 + [1] * 15, [3] * 20])
    inside = (1 + 2 + 3 + 4 + 4) + (6 + 12 * 4) + (6 + 17 * 4)
    assert windowed(3).count_pairs((2, 20), segment_ids=segments) == (inside, 15 + 120 + 210)


@pytest.mark.parametrize(
    ("variant", "routings"),
    [
        ("rope", (UNROUTED,)),
        ("alibi", (UNROUTED,)),
        ("rope-m-mask", (UNROUTED,)),
        ("fixed-s", (UNROUTED, "sparse")),
        ("mosar", ("soft", "top1", "sparse")),
    ],
)
def test_routings(variant, routings):
    geometry = VARIANTS[variant].build(SHAPE)
    assert geometry.routings == routings
    assert geometry.routed is (len(routings) == 3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_settings_are_those_that_change_it(variant):
    """A setting that is not named changes nothing, and is a field."""
    base = VARIANTS[variant]
    fields = {field.name for field in dataclasses.fields(AttentionConfig)} - {"geometry"}
    assert base.geometry_class.settings <= fields
    changes = {
        "rope_theta": 500.0,
        "rope_fraction": 0.5,
        "regimes": (Regime("S", 2, 0.5), Regime("M", 7, 0.5), Regime("G", 40, 1.0)),
        "regime": "M" if base.regime == "S" else "S",
        "barrier": 3.0,
        "exponent": 1.0,
    }
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 150, heads, 8, generator=generator) for heads in (4, 2, 2))

    def output(config):
        torch.manual_seed(0)
        return config.geometry_class(config, SHAPE)(q, k, v, scale=0.3)[0]

    for name, value in changes.items():
        changed = dataclasses.replace(base, **{name: value})
        same = torch.equal(output(changed), output(base))
        assert same is (name not in base.geometry_class.settings), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_parts_are_all_parameters(variant):
    geometry = VARIANTS[variant].build(SHAPE)
    parts = geometry.parameter_parts()
    assert sum(part.count for part in parts) == sum(p.numel() for p in geometry.parameters())
    assert all(0 <= part.weights <= part.count for part in parts)
    assert all(p.is_meta for p in geometry.parameters())


def test_parameters_that_nothing_divides(monkeypatch):
    class Learned(Geometry):
        def __init__(self, attention, shape):
            super().__init__(attention, shape)
            self.slope = nn.Parameter(torch.zeros(shape.num_heads))

    monkeypatch.setitem(GEOMETRIES, "learned", Learned)
    geometry = AttentionConfig(geometry="learned").build(SHAPE)
    assert "learned has parameters" in str(geometry.split_obstacle(2))
    (part,) = geometry.parameter_parts()
    assert (part.count, part.weights, part.split) == (4, 0, "whole")
