"""Density and kept keys from shares: against exact counts, and against the records."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mosar import MoSARConfig, build_hard_domain
from mosar.errors import PlanError
from mosar.planning.density import (
    DensityCurve,
    covered,
    curves_from_records,
    modelled_density,
    outer,
    packaged_curves,
)

RESULTS = Path(__file__).parents[2] / "results" / "small"


@given(st.floats(0.5, 60), st.integers(1, 40), st.integers(0, 50))
def test_covered_counts_sinks(reach, context, sinks):
    pairs = [(i, j) for i in range(context) for j in range(i + 1)]
    inside = sum(i - j <= reach or j < sinks for i, j in pairs)
    assert covered(reach, context, sinks) == pytest.approx(inside / len(pairs))


@pytest.mark.parametrize("sinks", [0, 5])
@pytest.mark.parametrize("length", [256, 1024])
def test_density_of_independent_choices_is_the_exact_count(length, sinks):
    config = replace(MoSARConfig.scaled(256), num_sinks=sinks)
    query, key = (0.7, 0.2, 0.1), (0.6, 0.25, 0.15)
    generator = torch.Generator().manual_seed(0)
    labels = [
        torch.multinomial(torch.tensor(side), 8 * length, replacement=True, generator=generator)
        for side in (query, key)
    ]
    exact = build_hard_domain(*(x.view(8, length) for x in labels), config, materialize=False)
    drawn = [(x.bincount() / len(x)).tolist() for x in labels]
    # What remains is where in the rows the few global tokens fell.
    assert modelled_density(outer(*drawn), config, length) == pytest.approx(exact.density, rel=0.02)


@pytest.mark.parametrize("name", ["small/mosar", "small/mosar-cost"])
def test_the_model_is_near_what_was_measured(name):
    curve = packaged_curves()[name]
    config = curve.geometry
    assert config == MoSARConfig.scaled(512)
    assert [point.factor for point in curve.points] == [1, 2, 4]
    for point in curve.points:
        context = round(point.factor * config.max_length)
        assert modelled_density(point.pairs, config, context) == pytest.approx(
            point.density, rel=0.01
        )
        assert curve.density(config, context)[:2] == (point.density, "measured")
        # The same multiple of another length is no measurement, nor is another geometry.
        assert curve.density(MoSARConfig(), 4 * context)[1] == "modelled"
        for change in ({"num_sinks": 4}, {"composition": "min"}, {"barrier": 12.0}):
            other = replace(config, **change | {"epsilon": 1e-7})
            assert curve.density(other, context)[1] == "modelled"


def test_between_and_beyond_points():
    curve = packaged_curves()["paper/mosar"]
    config = MoSARConfig()
    densities = [curve.density(config, n)[0] for n in (1024, 2048, 3000, 4096, 8192, 65536)]
    assert densities == sorted(densities, reverse=True)
    assert "beyond what was measured" in curve.density(config, 65536)[2]
    assert curve.shares(config, 204800) == curve.points[-1].pairs
    context = round(2048 * 2**0.5)
    middle, t = curve.shares(config, context)[0][0], math.log2(context / 2048)
    low, high = (point.pairs[0][0] for point in curve.points[:2])
    assert middle == pytest.approx((1 - t) * low + t * high)


def test_kept_keys_are_bounded_but_for_the_global_ones():
    curve, config = packaged_curves()["small/mosar"], MoSARConfig()
    key_g = sum(row[-1] for row in curve.points[-1].pairs)
    near, far = (curve.kept_keys(config, n) for n in (65536, 131072))
    assert far - near == pytest.approx(key_g * 65536)
    assert curve.kept_keys(config, 100) == pytest.approx(100, rel=1e-5)


def test_sinks_are_kept_and_read():
    curve = packaged_curves()["small/mosar"]
    config, with_sinks = MoSARConfig(), MoSARConfig(num_sinks=4)
    for count in (DensityCurve.kept_keys, DensityCurve.last_keys):
        more = count(curve, with_sinks, 65536) - count(curve, config, 65536)
        # All but the keys that are read or kept wherever they stand.
        assert 3.8 < more < 4
        assert count(curve, with_sinks, 100) == pytest.approx(100, abs=0.1)


def test_other_regimes_are_refused():
    two = MoSARConfig.from_dict(
        {
            "regimes": [
                {"name": "S", "reach": 8, "plateau": 1},
                {"name": "G", "reach": 64, "plateau": 1},
            ]
        }
    )
    curve = packaged_curves()["paper/mosar"]
    for ask in (curve.density, curve.kept_keys, curve.last_keys):
        with pytest.raises(PlanError, match="curve has 3 regimes, but the model has 2"):
            ask(two, 100)


def test_other_settings_under_one_name_are_no_measurement(tmp_path):
    """Records of one variant along an axis: the mean of both is a measurement of neither."""
    text = (RESULTS / "records" / "mosar-seed0.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(text)
    (alone,) = curves_from_records(tmp_path).values()
    assert alone.geometry == MoSARConfig.scaled(512)
    (tmp_path / "b.jsonl").write_text(text.replace('"num_sinks": 0', '"num_sinks": 4'))
    (both,) = curves_from_records(tmp_path).values()
    assert both.geometry is None and both.density(alone.geometry, 512)[1] == "modelled"
