"""Settings that a geometry alone knows: stated in its class, and carried everywhere from there."""

import json
from dataclasses import dataclass, replace

import pytest

from model.models import small_model
from mosar.experiments.settings import Axis
from mosar.geometries import (
    GEOMETRIES,
    VARIANTS,
    AttentionConfig,
    Geometry,
    HeadShape,
    OwnSettings,
    setting,
)
from mosar.training.config import RunConfig, changed_config, resolve_config


class Blocks(Geometry):
    @dataclass(frozen=True, kw_only=True)
    class Own(OwnSettings):
        block: int = setting(16, least=1, most=64)
        share: float = setting(0.5, above=0.0, most=1.0)
        rule: str = setting("near", among=("near", "far"))
        overlap: bool = setting(False)
        windows: tuple[int, ...] = setting((8, 16), least=1)


class Words(Geometry):
    @dataclass(frozen=True, kw_only=True)
    class Own(OwnSettings):
        block: str = setting("small", among=("small", "16"))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(GEOMETRIES, "blocks", Blocks)
    monkeypatch.setitem(GEOMETRIES, "words", Words)
    attention = AttentionConfig(geometry="blocks", own={"share": 1})
    monkeypatch.setitem(VARIANTS, "blocks", attention)
    monkeypatch.setitem(VARIANTS, "words", AttentionConfig(geometry="words"))


def resolve(*changes, variant="blocks"):
    given = {"variant": variant, "preset": "smoke", "data": "nowhere", "vocab_size": 257}
    return resolve_config(**given, changes=changes)


def test_a_run_is_set_saved_and_changed_by_them():
    config = resolve("attention.own.block=32", "attention.own.windows=[4, 2]")
    own = config.attention.own
    assert own == Blocks.Own(block=32, share=1.0, windows=(4, 2)) and type(own.share) is float
    assert config.attention.build(HeadShape(2, 1, 8, 64)).own.block == 32
    saved = json.loads(json.dumps(config.to_dict()))
    assert saved["attention"]["own"]["windows"] == [4, 2]
    assert RunConfig.from_dict(saved) == config
    del saved["attention"]["own"]["overlap"]  # of an older version, before that was a setting
    assert RunConfig.from_dict(saved) == config
    assert changed_config(config, ["attention.own.block=32"]) == config
    assert changed_config(config, ["attention.own.block=8"]).attention.own.block == 8
    # Another geometry has other settings, and none of the former ones.
    assert changed_config(config, ["attention.geometry=words"]).attention.own == Words.Own()
    assert resolve("attention.own.block=16", variant="words").attention.own.block == "16"


def test_the_fingerprint_has_what_differs_from_the_defaults():
    base = resolve()
    assert resolve("attention.own.block=16").fingerprint() == base.fingerprint()
    for change in ("block=8", "overlap=true", "share=0.5", "rule=far"):
        assert resolve(f"attention.own.{change}").fingerprint() != base.fingerprint(), change


def test_an_axis_runs_those_who_read_it():
    axis = Axis.parse("attention.own.share=0.5,1")
    assert [axis.is_read_by(name) for name in ("rope", "words", "blocks")] == [False, False, True]


def test_transformers_carry_them(tmp_path):
    from mosar.integrations.hf import MosarDecoderConfig

    attention = AttentionConfig(geometry="blocks", own=Blocks.Own(rule="far", windows=(3,)))
    MosarDecoderConfig.from_decoder(small_model(), attention).save_pretrained(tmp_path)
    assert MosarDecoderConfig.from_pretrained(tmp_path).attention_config == attention


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"block": 0}, "own.block must be an integer >= 1, got 0"),
        ({"block": 65}, "own.block must be an integer <= 64, got 65"),
        ({"block": 1.5}, "own.block must be an integer >= 1, got 1.5"),
        ({"share": 0}, r"own.share must be a number in \(0.0, 1.0\], got 0"),
        ({"rule": "up"}, "own.rule must be one of near, far, got 'up'"),
        ({"overlap": 1}, "own.overlap must be true or false, got 1"),
        ({"windows": 3}, "own.windows must be a list, got 3"),
        ({"windows": [3, 0]}, "own.windows must be an integer >= 1, got 0"),
        ({"blok": 3}, r"'blocks' has no setting 'own.blok', .*; did you mean 'own.block'\?"),
    ],
)
def test_wrong_values_are_named(own, said):
    with pytest.raises(ValueError, match=said):
        AttentionConfig(geometry="blocks", own=own)


def test_those_of_another_geometry_are_refused():
    with pytest.raises(ValueError, match=r"'rope' has no setting 'own.block', it has none of its"):
        replace(VARIANTS["blocks"], geometry="rope")
    with pytest.raises(ValueError, match=r"attention: geometry 'rope' has no setting 'own.block'"):
        resolve("attention.own.block=3", variant="rope")
    with pytest.raises(ValueError, match=r"did you mean 'attention.own.block'"):
        resolve("attention.own.blok=3")
