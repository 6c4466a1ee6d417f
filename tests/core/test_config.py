"""The configuration: the paper's defaults, JSON, and an error for every wrong value."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given

from cases import configs
from mosar import MoSARConfig, Regime

S, M, G = Regime("S", 128, 0.75), Regime("M", 512, 0.5), Regime("G", 2048, 1.0)


def test_defaults_are_the_papers():
    assert MoSARConfig() == MoSARConfig(
        max_length=2048,
        regimes=(S, M, G),
        router_hidden=64,
        temperature=1.0,
        barrier=6.0,
        exponent=2.0,
        epsilon=1e-6,
        composition="mean",
        routing_groups=1,
        num_sinks=0,
    )


@given(configs(kv_heads=12))
def test_json_round_trip(config):
    assert MoSARConfig.from_json(config.to_json()) == config
    assert MoSARConfig.from_dict(config.to_dict()) == config


def test_json_holds_every_field_and_custom_regimes():
    config = MoSARConfig(regimes=(Regime("near", 2.5, 0.1), Regime("all", 9, 1.0)), num_sinks=4)
    values = json.loads(config.to_json())
    assert set(values) == {field.name for field in dataclasses.fields(MoSARConfig)}
    assert values["regimes"][0] == {"name": "near", "reach": 2.5, "plateau": 0.1}
    assert values["num_sinks"] == 4


def test_numpy_numbers_become_plain_ones():
    config = MoSARConfig(
        max_length=np.int64(64),
        barrier=np.float32(4),
        regimes=(Regime("S", np.float64(4), 0.5), Regime("G", np.int32(64), 1)),
    )
    assert MoSARConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("max_length", [1, 100, 8192])
def test_scaled_keeps_the_proportions(max_length):
    config = MoSARConfig.scaled(max_length, barrier=4.0)
    reaches = [max_length / 16, max_length / 4, max_length]
    assert [regime.reach for regime in config.regimes] == reaches
    assert [regime.plateau for regime in config.regimes] == [0.75, 0.5, 1.0]
    assert (config.max_length, config.barrier) == (max_length, 4.0)
    assert MoSARConfig.scaled(2048) == MoSARConfig()
    assert MoSARConfig.scaled(64, regimes=(S, G)).regimes == (S, G)


WRONG_COUNTS = [
    (name, value)
    for name, minimum in (
        ("max_length", 1),
        ("router_hidden", 1),
        ("routing_groups", 1),
        ("num_sinks", 0),
    )
    for value in (minimum - 1, -7, True, False, 2.0, "3", None, math.nan)
]
WRONG_NUMBERS = [
    (name, value)
    for name in ("temperature", "barrier", "exponent", "epsilon")
    for value in (0, -1.0, True, math.nan, math.inf, -math.inf, "1", None)
]
WRONG_CHOICES = [
    ("composition", "average"),
    ("composition", None),
    ("composition", ["mean"]),
    ("epsilon", 0.1),
    ("epsilon", math.exp(-6)),
    ("barrier", 20.0),
    ("regimes", 3),
    ("regimes", None),
    ("regimes", ()),
    ("regimes", (G,)),
    ("regimes", (S, "M", G)),
]


@pytest.mark.parametrize(("name", "value"), WRONG_COUNTS + WRONG_NUMBERS + WRONG_CHOICES)
def test_a_wrong_value_is_named(name, value):
    with pytest.raises(ValueError) as error:
        MoSARConfig(**{name: value})
    assert name in str(error.value)
    shown = value[1] if name == "regimes" and isinstance(value, tuple) and len(value) > 1 else value
    assert repr(shown) in str(error.value)


@pytest.mark.parametrize(
    ("regimes", "shown"),
    [
        ((M, S, G), "[512.0, 128.0, 2048.0]"),
        ((S, Regime("M", 128, 0.5), G), "[128.0, 128.0, 2048.0]"),
        ((S, Regime("S", 512, 0.5), G), "['S', 'S', 'G']"),
        (({"name": "S", "reach": 1}, G), "{'name': 'S', 'reach': 1}"),
        (({"name": "S", "reach": 1, "plateau": 1, "gain": 2}, G), "'gain': 2"),
    ],
    ids=["not-increasing", "equal-reaches", "duplicate-names", "missing-field", "unknown-field"],
)
def test_wrong_regimes_are_named(regimes, shown):
    with pytest.raises(ValueError, match="regime") as error:
        MoSARConfig(regimes=regimes)
    assert shown in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("reach", value) for value in (0, -1.0, True, math.nan, math.inf, "8", None)),
        *(("plateau", value) for value in (-0.1, 1.1, True, math.nan, math.inf, "1", None)),
        *(("name", value) for value in ("", 3, None)),
    ],
)
def test_a_wrong_regime_is_named(field, value):
    values = {"name": "S", "reach": 8.0, "plateau": 0.5} | {field: value}
    with pytest.raises(ValueError, match=field) as error:
        Regime(**values)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "valid JSON"),
        ("", "valid JSON"),
        ("[1, 2]", "JSON object, got list"),
        ("null", "JSON object, got NoneType"),
        ('{"barier": 6.0}', r"unknown fields .*barier.*barrier"),
        ('{"regimes": "SMG"}', "regimes .*'SMG'"),
        ('{"barrier": NaN}', "barrier .*nan"),
        ('{"max_length": 2048.5}', r"max_length .*2048\.5"),
    ],
)
def test_wrong_json_is_named(text, match):
    with pytest.raises(ValueError, match=match):
        MoSARConfig.from_json(text)


@pytest.mark.parametrize("value", [0, -1, 2.5, True, None])
def test_scaled_names_a_wrong_length(value):
    with pytest.raises(ValueError, match=f"max_length .*{value}"):
        MoSARConfig.scaled(value)
