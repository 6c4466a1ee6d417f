"""Training routers: the objective falls, the density goes where it should, nothing is lost."""

import hashlib
import json
import signal
from dataclasses import replace

import pytest
import torch

import mosar
from integrations.retrofit.models import GEOMETRY, tiny_model, tokens
from mosar import MoSARConfig
from mosar.errors import ModelError, TrainingError, TrainingInterrupted
from mosar.integrations.retrofit import load_adapter
from mosar.integrations.retrofit.base_model import BaseIdentity
from mosar.integrations.retrofit.config import RetrofitConfig, RetrofitSettings
from mosar.integrations.retrofit.learner import LayerLearner
from mosar.integrations.retrofit.objective import head_attention
from mosar.integrations.retrofit.train import RouterLearner, train_retrofit
from mosar.integrations.retrofit.windows import Windows
from mosar.training.run_folder import read_metrics, read_saved

LENGTH = 128
SETTINGS = RetrofitSettings(
    length=LENGTH,
    steps=24,
    updates=4,
    queries=32,
    target_density=0.4,
    cost_weight=0.01,
    global_bias=0.5,
    learning_rate=2e-2,
    checkpoint_every=8,
)


def windows(steps=SETTINGS.steps):
    return Windows(tokens(steps, LENGTH, seed=3), tokens(2, LENGTH, seed=4))


def run(out, settings=SETTINGS, **options):
    model = tiny_model(num_hidden_layers=2)
    attached = mosar.retrofit(model, GEOMETRY)
    return attached, train_retrofit(
        attached, windows(settings.steps), settings, out, progress=False, **options
    )


def lines(out, split):
    return read_metrics(out, split)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("retrofit") / "run"
    attached, result = run(out)
    return out, attached, result


def test_density_approaches_the_target(trained):
    out, _, result = trained
    # The first losses, as they were before the loop was shared.
    golden = [0.01526896, 0.00959682, 0.00532622, 0.00516123]
    assert [line["loss"] for line in lines(out, "train")[:4]] == pytest.approx(golden, rel=1e-3)
    first, *_, last = lines(out, "valid")
    assert first["density"] > 0.7
    # Within 10 %, of sampled queries.
    assert last["density"] == pytest.approx(SETTINGS.target_density, rel=0.1)
    assert result.density == last["density"]


def test_the_objective_falls_at_a_fixed_price(tmp_path):
    settings = RetrofitSettings.from_dict(
        SETTINGS.to_dict() | {"steering": 0.0, "cost_weight": 0.1, "entropy_weight": 0.0}
    )
    run(tmp_path / "run", settings)
    losses = [line["loss"] for line in lines(tmp_path / "run", "valid")]
    assert losses[-1] < 0.9 * losses[0]


def test_windows_begin_at_every_position_of_the_context(tmp_path, monkeypatch):
    """Attention is the same wherever a window begins; the rotated keys are not."""
    seen = {}

    def learning(learner, given, step, cost_weight, *, learn=LayerLearner.learn):
        if learner.layer.index == 0:
            queries = torch.arange(LENGTH)
            seen[step] = given.k, head_attention(given.q, given.k, queries)
        return learn(learner, given, step, cost_weight)

    monkeypatch.setattr(LayerLearner, "learn", learning)
    attached = mosar.retrofit(tiny_model(num_hidden_layers=2), GEOMETRY)
    same = Windows(tokens(1, LENGTH).expand(3, -1), tokens(2, LENGTH))
    settings = RetrofitSettings.from_dict(SETTINGS.to_dict() | {"steps": 3})
    train_retrofit(attached, same, settings, tmp_path / "run", progress=False)
    (first_k, first), (other_k, other) = seen[1], seen[2]
    assert (first_k - other_k).abs().max() > 0.1
    torch.testing.assert_close(first, other, atol=1e-4, rtol=1e-3)
    learner = RouterLearner(attached, same, settings, BaseIdentity.of(attached.model))
    offsets = [learner._offset(step) for step in range(200)]
    # The tiny model reads 512 tokens.
    assert min(offsets) < 40 and 345 < max(offsets) <= 512 - LENGTH
    farther = RetrofitSettings.from_dict(settings.to_dict() | {"position_range": 3.0})
    learner = RouterLearner(attached, same, farther, BaseIdentity.of(attached.model))
    offsets = [learner._offset(step) for step in range(200)]
    assert min(offsets) < 60 and 1300 < max(offsets) <= 3 * 512 - LENGTH


def test_newer_settings_at_their_defaults_keep_the_fingerprint():
    base = BaseIdentity.of(tiny_model(num_hidden_layers=2))
    config = RetrofitConfig(start=None, base=base, geometry=GEOMETRY, settings=SETTINGS)
    older = config.to_dict()
    del older["dtype"], older["settings"]["position_range"]
    assert RetrofitConfig.from_dict(older) == config
    expected = hashlib.sha256(json.dumps(older, sort_keys=True).encode()).hexdigest()
    assert config.fingerprint() == expected
    assert replace(config, dtype="bfloat16").fingerprint() != expected
    farther = RetrofitSettings.from_dict(SETTINGS.to_dict() | {"position_range": 2.0})
    assert replace(config, settings=farther).fingerprint() != expected


def test_windows_beyond_the_context_are_refused(tmp_path):
    attached = mosar.retrofit(tiny_model(max_position_embeddings=96), GEOMETRY)
    with pytest.raises(ModelError, match=r"the 96 tokens .* got 128; give --length 96 or less"):
        train_retrofit(attached, windows(), SETTINGS, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_the_base_model_is_untouched(trained):
    _, attached, _ = trained
    fresh = tiny_model(num_hidden_layers=2)
    for (name, ours), theirs in zip(
        attached.model.named_parameters(), fresh.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_the_adapter_is_what_was_trained(trained):
    out, attached, _ = trained
    loaded = load_adapter(tiny_model(num_hidden_layers=2), out)
    for name, parameter in attached.named_parameters().items():
        assert torch.equal(loaded.named_parameters()[name], parameter), name


def test_a_run_that_was_interrupted_goes_on_bit_for_bit(trained, tmp_path, monkeypatch):
    out, attached, _ = trained
    steer = RouterLearner._steer
    calls = []

    def interrupting(self, price, density):
        calls.append(density)
        if len(calls) == 11:
            signal.raise_signal(signal.SIGTERM)
        return steer(self, price, density)

    monkeypatch.setattr(RouterLearner, "_steer", interrupting)
    message = "saved at step 11 of 24; the same command resumes"
    with pytest.raises(TrainingInterrupted, match=message):
        run(tmp_path / "run")
    monkeypatch.undo()
    again, result = run(tmp_path / "run")
    assert result.resumed_from == 11
    for name, parameter in attached.named_parameters().items():
        assert torch.equal(again.named_parameters()[name], parameter), name
    for split in ("train", "valid"):
        assert timeless(tmp_path / "run", split) == timeless(out, split)


def timeless(out, split):
    return [line | {"tokens_per_second": None} for line in lines(out, split)]


def test_a_run_begins_with_the_routers_of_another(trained, tmp_path):
    out, _, result = trained
    settings = RetrofitSettings.from_dict(SETTINGS.to_dict() | {"steps": 8, "target_density": 0.2})
    _, further = run(tmp_path / "run", settings, start_from=out)
    first, *_ = lines(tmp_path / "run", "valid")
    assert first["density"] == result.density
    assert (
        first["cost_weight"]
        == json.loads((out / "adapter.json").read_text())["notes"]["cost_weight"]
    )
    assert further.density < result.density
    # What began elsewhere is another run.
    with pytest.raises(ModelError, match="holds a run with other start"):
        run(tmp_path / "run", settings)


def test_without_steps_routers_move_to_another_density(trained, tmp_path):
    out, _, _ = trained
    changes = {"steps": 0, "target_density": 0.6}
    settings = RetrofitSettings.from_dict(SETTINGS.to_dict() | changes)
    _, result = run(tmp_path / "run", settings, start_from=out)
    assert result.density == pytest.approx(0.6, rel=0.05)
    before = load_adapter(tiny_model(num_hidden_layers=2), out).named_parameters()
    after = load_adapter(tiny_model(num_hidden_layers=2), tmp_path / "run").named_parameters()
    changed = {name for name, p in after.items() if not torch.equal(p, before[name])}
    assert changed and all(name.endswith("bias2") for name in changed)
    with pytest.raises(ModelError, match="holds an adapter already"):
        run(tmp_path / "run", settings, start_from=out)
    with pytest.raises(ValueError, match="must not both be 0 without routers to start from"):
        run(tmp_path / "other", settings)


def test_routers_of_another_model_or_geometry_are_no_start(trained, tmp_path):
    out, _, _ = trained
    other = mosar.retrofit(tiny_model(num_hidden_layers=2, seed=5), GEOMETRY)
    with pytest.raises(ModelError, match="belong to another base model"):
        train_retrofit(other, windows(), SETTINGS, tmp_path / "run", start_from=out)
    wider = MoSARConfig.from_dict(GEOMETRY.to_dict() | {"num_sinks": 3})
    other = mosar.retrofit(tiny_model(num_hidden_layers=2), wider)
    with pytest.raises(ModelError, match="another geometry"):
        train_retrofit(other, windows(), SETTINGS, tmp_path / "run", start_from=out)


def test_a_run_that_never_made_a_step_does_not_keep_its_folder(tmp_path, monkeypatch):
    def no_memory(*arguments):
        raise MemoryError

    monkeypatch.setattr(RouterLearner, "update", no_memory)
    with pytest.raises(TrainingError, match="out of memory; no checkpoint is lost; fewer queries"):
        run(tmp_path / "run")
    monkeypatch.undo()
    other = RetrofitSettings.from_dict(SETTINGS.to_dict() | {"steps": 2})
    _, result = run(tmp_path / "run", other)
    assert (result.resumed_from, result.step) == (0, 2)
    with pytest.raises(ModelError, match="holds a run with other settings"):
        run(tmp_path / "run")
    assert read_saved(tmp_path / "run", RetrofitConfig)[0].settings == other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_density": 0.0}, "target_density must be a number in"),
        ({"steps": -1}, "steps must be an integer >= 0"),
        ({"queries": 4096, "length": 128}, "queries must not exceed length=128"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"position_range": 0.5}, "position_range"),
        ({"speed": 1}, "unknown keys"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RetrofitSettings.from_dict(changes)
