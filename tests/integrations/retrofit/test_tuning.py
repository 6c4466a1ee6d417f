"""The second phase: all routers learn from the whole model's predictions, and a density is met."""

import signal

import pytest
import torch

import mosar
from integrations.retrofit.models import GEOMETRY, routed_model, tiny_model, tokens
from integrations.retrofit.test_train import LENGTH, SETTINGS, lines, timeless, windows
from mosar.core.hard_domain import build_hard_domain
from mosar.errors import TrainingInterrupted
from mosar.integrations.retrofit import tuning
from mosar.integrations.retrofit.calibration import calibrate
from mosar.integrations.retrofit.config import RetrofitSettings
from mosar.integrations.retrofit.train import RouterLearner, train_retrofit
from mosar.integrations.retrofit.tuning import tune

WINDOW, POSITIONS = tokens(1, LENGTH)[0], torch.arange(LENGTH)
TUNED = RetrofitSettings.from_dict(
    SETTINGS.to_dict()
    | {"steps": 3, "tune_steps": 4, "tune_rate": 1e-2, "updates": 2, "checkpoint_every": 4}
)


def soft_model(family="llama"):
    """A tiny model whose routers doubt."""
    model, attached = routed_model(family)
    with torch.no_grad():
        for parameter in attached.parameters():
            parameter.requires_grad_(True)
        for layer in attached:
            for router in layer.routers:
                router.weight2 *= 0.1
    return model, attached


def gradients(attached):
    found = [parameter.grad.flatten() for parameter in attached.parameters()]
    for parameter in attached.parameters():
        parameter.grad = None
    return torch.cat(found)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
def test_routers_learn_what_the_model_predicts_and_nothing_else_learns(family):
    model, attached = soft_model(family)
    measure = tune(attached, WINDOW, POSITIONS, 0.1, seed=0)
    assert measure.kl > 0 and measure.density.shape == (len(attached), 2)
    assert all(parameter.grad is None for parameter in model.parameters())
    first = gradients(attached)
    assert first.isfinite().all() and first.abs().max() > 0
    # A function of the seed: a resumed run draws the same labels.
    tune(attached, WINDOW, POSITIONS, 0.1, seed=0)
    assert torch.equal(gradients(attached), first)
    tune(attached, WINDOW, POSITIONS, 0.1, seed=1)
    assert not torch.equal(gradients(attached), first)
    assert all(layer.labelling is None for layer in attached)


def test_global_tokens_predict_what_the_dense_model_does():
    attached = mosar.retrofit(tiny_model(), GEOMETRY)
    for parameter in attached.parameters():
        parameter.requires_grad_(True)
    assert tune(attached, WINDOW, POSITIONS, 0.1, seed=0).kl < 1e-5


def test_steps_along_the_gradient_bring_the_predictions_back():
    _, attached = soft_model()
    optimizer = torch.optim.Adam(attached.parameters(), lr=1e-2)
    divergences = []
    for step in range(12):
        optimizer.zero_grad()
        divergences.append(tune(attached, WINDOW, POSITIONS, 0.0, seed=step).kl)
        optimizer.step()
    assert sum(divergences[-3:]) < 0.7 * sum(divergences[:3])


def test_a_sample_of_the_positions_estimates_the_divergence(monkeypatch):
    _, attached = soft_model()
    whole = tune(attached, WINDOW, POSITIONS, 0.0, seed=0).kl
    monkeypatch.setattr(tuning, "_POSITIONS", LENGTH // 2)
    monkeypatch.setattr(tuning, "_CHUNK", 24)
    assert tune(attached, WINDOW, POSITIONS, 0.0, seed=0).kl == pytest.approx(whole, rel=0.3)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("target", [0.3, 0.6])
def test_calibration_meets_the_density(family, target):
    _, attached = soft_model(family)
    text = tokens(2, LENGTH, seed=5)
    reached = calibrate(attached, text, target)
    assert reached == pytest.approx(target, rel=0.05)
    # Counted by the domain of the labels, of a new pass with the routers as they are now.
    densities = []

    def observer(layer, q, k, v, options):
        labels = layer.route(q, k).labels
        domain = build_hard_domain(*labels, GEOMETRY, window=layer.window, materialize=False)
        densities.append(domain.density)

    attached.observe(observer)
    with torch.no_grad():
        for window in text:
            attached.model(input_ids=window[None], use_cache=False)
    # Layers after the first read other inputs once the first has changed.
    assert sum(densities) / len(densities) == pytest.approx(target, rel=0.1)


def test_both_phases_run_end_at_the_target_and_resume_bit_for_bit(tmp_path, monkeypatch):
    def run(out):
        attached = mosar.retrofit(tiny_model(num_hidden_layers=2), GEOMETRY)
        return attached, train_retrofit(attached, windows(7), TUNED, out, progress=False)

    attached, result = run(tmp_path / "whole")
    assert result.step == 7
    assert result.density == pytest.approx(TUNED.target_density, rel=0.1)
    train = lines(tmp_path / "whole", "train")
    assert ["kl" in line for line in train] == [False] * 3 + [True] * 4
    steer = RouterLearner._steer
    calls = []

    def interrupting(self, price, density):
        calls.append(density)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGTERM)
        return steer(self, price, density)

    monkeypatch.setattr(RouterLearner, "_steer", interrupting)
    with pytest.raises(TrainingInterrupted, match="saved at step 5 of 7"):
        run(tmp_path / "run")
    monkeypatch.undo()
    again, result = run(tmp_path / "run")
    assert result.resumed_from == 5
    for name, parameter in attached.named_parameters().items():
        assert torch.equal(again.named_parameters()[name], parameter), name
    for split in ("train", "valid"):
        assert timeless(tmp_path / "run", split) == timeless(tmp_path / "whole", split)
