"""What a geometry says about itself, which everything else relies on."""

import dataclasses
import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from mosar import Regime
from mosar.cli import app
from mosar.geometries import (
    GEOMETRIES,
    MODES,
    UNROUTED,
    VARIANTS,
    AttentionConfig,
    Geometry,
    HeadShape,
)

SHAPE = HeadShape(num_heads=4, num_kv_heads=2, head_dim=8, max_length=512, hidden_size=16)


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
    if not base.rope_fraction:
        # Without a rotation its base would change nothing.
        base = dataclasses.replace(base, rope_fraction=1.0)
    fields = {field.name for field in dataclasses.fields(AttentionConfig)} - {"geometry"}
    assert base.geometry_class.settings <= fields
    changes = {
        "rope_theta": 500.0,
        "rope_fraction": 0.5,
        "regimes": (Regime("S", 2, 0.5), Regime("M", 7, 0.5), Regime("G", 40, 1.0)),
        "regime": {"S": "M", "M": "S"}.get(base.regime, "G"),
        "barrier": 3.0,
        "exponent": 1.0,
    }
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 150, heads, 8, generator=generator) for heads in (4, 2, 2))
    hidden = torch.randn(1, 150, 16, generator=generator)

    def output(config):
        torch.manual_seed(0)
        return config.geometry_class(config, SHAPE)(q, k, v, scale=0.3, hidden=hidden)[0]

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


def test_the_table_of_variants():
    """With what the settings were chosen for: shares of pairs at N = 512 and 2048."""
    told = CliRunner().invoke(app, ["variants", "--json"])
    facts = {fact["variant"]: fact for fact in json.loads(told.stdout)}
    assert list(facts) == list(VARIANTS)
    expected = {
        "rope": (1.0, 1.0),
        "rope-m-mask": (0.440, 0.122),
        "bigbird": (0.415, 0.114),
        "moba": (0.290, 0.077),
        "nsa": (0.556, 0.239),
        "dsa": (0.437, 0.121),
        "linformer": (0.181, 0.139),
    }
    for name, density in expected.items():
        assert facts[name]["density"] == pytest.approx(density, abs=1e-3), name
    sizes = {"mosar": 150_564, "dsa": 150_528, "inkling": 147_456, "linformer": 1536, "moba": 0}
    assert {name: facts[name]["parameters"] for name in sizes} == sizes
    assert facts["reformer"]["density"] == facts["mosar"]["density"] == [None, None]
    assert {name for name, fact in facts.items() if fact["learns"] == "–"} == {
        name for name, fact in facts.items() if not fact["parameters"]
    }
    # As the report's table of related methods has them.
    shown_facts = {name: (fact["adaptive"], fact["decays"]) for name, fact in facts.items()}
    assert shown_facts["mosar"] == (True, "learned")
    assert shown_facts["alibi"] == (False, "fixed")
    assert shown_facts["rope"] == (False, "no")
    shown = CliRunner().invoke(app, ["variants"], env={"COLUMNS": "200"}).stdout
    assert all(name in shown for name in (*VARIANTS, *MODES))
    assert "a router of queries" in shown and "its law; x-transformers" in shown
    rows = {line.split()[0]: line.split()[1] for line in shown.splitlines() if line.strip()}
    assert [name for name in MODES if rows[name] == "no"] == ["pi", "ntk", "yarn"]
    assert facts["fox"]["modes"] == ["acp"]
