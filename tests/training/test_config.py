"""Configurations: presets, changes by dotted keys, and errors that name the nearest key."""

import json
from dataclasses import replace

import pytest

from mosar.core.config import Regime
from mosar.geometries import VARIANTS
from mosar.training.config import (
    RunConfig,
    changed_config,
    known_keys,
    parse_changes,
    resolve_config,
)
from mosar.training.presets import PRESETS


def resolve(*changes, variant="mosar", preset="smoke"):
    return resolve_config(
        variant=variant, preset=preset, data="nowhere", changes=changes, vocab_size=257
    )


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_preset_and_variant_resolves_and_survives_json(preset, variant):
    config = resolve(preset=preset, variant=variant)
    assert (config.preset, config.variant) == (preset, variant)
    again = RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.fingerprint() == config.fingerprint()


@pytest.mark.parametrize("preset", PRESETS)
def test_variants_differ_in_attention_only(preset):
    base = resolve(preset=preset, variant="rope").flat()
    for variant in VARIANTS:
        other = resolve(preset=preset, variant=variant).flat()
        differing = {key for key in base if base[key] != other[key]}
        assert all(key.startswith("attention.") for key in differing)


def test_the_paper_preset_is_the_papers():
    config = resolve(preset="paper")
    model, train = config.model, config.train
    assert (model.num_layers, model.hidden_size, model.num_heads, model.num_kv_heads) == (
        *(18, 1024, 8, 1),
    )
    assert (model.head_dim, model.query_pre_attn_scalar, model.ffn_size) == (256, 256, 8192)
    assert (model.vocab_size, model.max_length) == (256_000, 2048)
    assert (model.attn_softcap, model.final_softcap) == (50, 30)
    assert (train.micro_batch, train.accumulation, train.steps) == (1, 8, 610_000)
    assert (train.learning_rate, train.min_learning_rate, train.warmup_steps) == (3e-4, 3e-5, 100)
    assert config.tokens_per_step == 16_384
    assert train.checkpoint_activations
    assert 0 < train.loss_chunk < 2048
    regimes = config.attention.mosar_config(model.max_length).regimes
    assert [regime.reach for regime in regimes] == [128, 512, 2048]


def test_the_vocabulary_is_that_of_the_data_unless_set():
    assert [resolve(*c).model.vocab_size for c in ((), ("model.vocab_size=300",))] == [257, 300]


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("train.steps=60", 60),
        ("train.steps=610_000", 610_000),
        (" train.steps = 60 ", 60),
        ("train.learning_rate=1e-3", 1e-3),
        ("train.learning_rate=1", 1.0),
        ("train.checkpoint_activations=true", True),
        ("train.checkpoint_activations=False", False),
        ("train.grad_clip=none", None),
        ("train.precision=bf16", "bf16"),
        ("train.betas=[0.8, 0.9]", (0.8, 0.9)),
        ("model.attn_softcap=none", None),
        ("model.attn_softcap=20", 20.0),
        ("attention.regime=S", "S"),
        ("attention.composition=max", "max"),
        ("data.folder=a=b", "a=b"),
        (
            'attention.regimes=[{"name": "S", "reach": 8, "plateau": 0.5},'
            ' {"name": "G", "reach": 64, "plateau": 1}]',
            (Regime("S", 8, 0.5), Regime("G", 64, 1.0)),
        ),
    ],
)
def test_changes(change, value):
    (parsed,) = parse_changes([change]).values()
    assert parsed == value and type(parsed) is type(value)
    section, name = change.partition("=")[0].strip().split(".")
    assert getattr(getattr(resolve(change), section), name) == value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.step=60", r"no key 'train.step'; did you mean 'train.steps'\?"),
        ("train.lerning_rate=1", r"did you mean 'train.learning_rate'\?"),
        ("steps=60", r"did you mean 'train.steps'\?"),
        ("model.steps=60", r"did you mean 'train.steps'\?"),
        ("seed=1", r"did you mean 'data.seed' or 'train.seed'\?"),
        ("hiden_size=60", r"did you mean 'model.hidden_size'\?"),
        ("zzz=1", "no key 'zzz'$"),
        ("train.steps", "written key=value, got 'train.steps'"),
        ("train.steps=many", "train.steps must be an integer, got 'many'"),
        ("train.steps=1.5", "train.steps must be an integer, got '1.5'"),
        ("train.learning_rate=fast", "train.learning_rate must be a number, got 'fast'"),
        ("train.precision=fp8", "train.precision must be one of fp32, bf16, auto, got 'fp8'"),
        ("train.tensorboard=1", "train.tensorboard must be true or false, got '1'"),
        ("train.betas=0.9", "train.betas must be a list in JSON, got 0.9"),
        ("train.betas=[0.9", "train.betas must be a list in JSON"),
        ("model.attn_softcap=x", "model.attn_softcap must be a number or none, got 'x'"),
        ("train.steps=0", "train: steps must be an integer >= 1, got 0"),
        ("train.min_learning_rate=1", "train: min_learning_rate must be a number in"),
        ("train.grad_clip=0", "train: grad_clip must be none or a finite number > 0, got 0.0"),
        ("train.betas=[0.9, 1]", "train: betas must be two numbers"),
        ("train.learning_rate=nan", "train: learning_rate must be a finite number >= 0, got nan"),
        ("attention.barrier=-1", "attention: barrier must be"),
        ("model.num_kv_heads=3", "model: "),
    ],
)
def test_wrong_changes_say_what_is_right(change, message):
    with pytest.raises(ValueError, match=message):
        resolve(change)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variant": "mosarcost"}, r"variant must be one of rope, .*; did you mean 'mosar-cost'\?"),
        ({"preset": "papr"}, r"preset must be one of smoke, .* got 'papr'; did you mean 'paper'\?"),
    ],
)
def test_unknown_names(arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve(**arguments)


def test_the_end_of_the_decay_follows_the_steps_until_it_is_set():
    config = resolve("train.steps=60")
    assert config.train.decay_steps == 60
    assert changed_config(config, ["train.steps=80"]).train.decay_steps == 80
    kept = changed_config(config, ["train.steps=80", "train.decay_steps=60"])
    assert (kept.train.steps, kept.train.decay_steps) == (80, 60)
    assert changed_config(kept, ["train.steps=90"]).train.decay_steps == 60
    assert changed_config(config, ["train.seed=3"]) == replace(
        config, train=replace(config.train, seed=3)
    )


def test_from_dict_names_what_is_wrong():
    values = resolve().to_dict()
    wrong = r"lacks the keys \['model'\] and has unknown keys \['modle'\]; did you mean 'model'"
    with pytest.raises(ValueError, match=wrong):
        RunConfig.from_dict({**{k: v for k, v in values.items() if k != "model"}, "modle": {}})
    values["train"].pop("steps")
    with pytest.raises(ValueError, match=r"train lacks the keys \['steps'\]"):
        RunConfig.from_dict(values)


def test_the_fingerprint_tells_results_apart_and_nothing_else():
    base = resolve()
    same = ("train.eval_every=7", "train.keep_last=9", "train.log_every=3", "data.folder=else")
    same += ("train.loss_chunk=32", "train.steps=50 ")
    for change in same:
        changes = [change, "train.decay_steps=40"]
        assert resolve(*changes).fingerprint() == base.fingerprint(), change
    # That of run folders which exist: another one would refuse to resume them.
    assert base.fingerprint() == (
        "eb02d8968e1452f1baa2766bd6b5501d768a03a4a350486cf8efd3c93311f7df"
    )
    regrouped = resolve("train.micro_batch=2", "train.accumulation=4")
    assert regrouped.fingerprint() == base.fingerprint()
    for change in ("train.seed=1", "data.seed=1", "attention.barrier=5", "train.micro_batch=2"):
        assert resolve(change).fingerprint() != base.fingerprint(), change


def test_every_key_is_known():
    assert set(known_keys()) == set(resolve().flat())
