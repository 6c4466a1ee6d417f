"""The loop: what it records, that it learns, and that accumulation is only a way to compute."""

import math

import pytest
import torch

from mosar.errors import NonFiniteError, TrainingError
from mosar.geometries import VARIANTS
from mosar.training import learner as learner_module
from mosar.training.batches import Batches
from mosar.training.learner import Learner
from mosar.training.loop import train
from mosar.training.run_folder import read_metrics
from training.runs import leftovers, lines, losses, saved_config, steps, tensors

SHORT = ("train.steps=6", "train.checkpoint_every=3", "train.eval_every=4", "train.warmup_steps=2")
FIELDS = (
    *("step", "split", "tokens", "loss", "lm_loss", "learning_rate", "grad_norm"),
    *("tokens_per_second", "expected_reach", "cost_weight", "regime_shares"),
)


def test_a_run_leaves_config_metrics_and_checkpoints(smoke, tmp_path):
    config = smoke("mosar-cost", *SHORT)
    result = train(config, tmp_path / "run", progress=False)
    assert (result.step, result.resumed_from) == (6, 0)
    saved = saved_config(tmp_path / "run")
    assert {name: saved[name] for name in config.to_dict()} == config.to_dict()
    assert {"mosar", "torch", "python"} <= saved["environment"].keys()
    assert steps(tmp_path / "run") == [3, 6]
    assert not leftovers(tmp_path / "run")
    metrics = read_metrics(tmp_path / "run")
    assert all(tuple(line) == FIELDS for line in metrics)
    assert [(line["step"], line["split"]) for line in metrics] == [
        *[(0, "valid"), (1, "train"), (2, "train"), (3, "train"), (4, "train")],
        *[(4, "valid"), (5, "train"), (6, "train"), (6, "valid")],
    ]
    first, last = metrics[1], metrics[-2]
    assert first["tokens"] == 4 * 2 * 64
    assert first["learning_rate"] == pytest.approx(1.5e-3)
    assert first["cost_weight"] == pytest.approx(0.01 / 25)
    assert first["loss"] == pytest.approx(
        first["lm_loss"] + first["cost_weight"] * first["expected_reach"], rel=1e-6
    )
    assert last["learning_rate"] == config.train.min_learning_rate
    assert last["grad_norm"] > 0 and last["tokens_per_second"] > 0
    for role in ("query", "key"):
        shares = torch.tensor(last["regime_shares"][role])
        assert shares.shape == (2, 3)
        torch.testing.assert_close(shares.sum(dim=1), torch.ones(2))
    assert (result.loss, result.valid_loss) == (last["lm_loss"], metrics[-1]["lm_loss"])


def test_variants_without_routers_have_no_reach(smoke, tmp_path):
    train(smoke("alibi", *SHORT), tmp_path / "run", progress=False)
    for line in read_metrics(tmp_path / "run"):
        assert line["regime_shares"] is None and line["expected_reach"] is None
        assert line["loss"] == line["lm_loss"] and line["cost_weight"] == 0


def test_the_same_configuration_gives_the_same_bits(smoke, tmp_path):
    for name in "ab":
        train(smoke("mosar", *SHORT), tmp_path / name, progress=False)
    assert lines(tmp_path / "a") == lines(tmp_path / "b")
    assert tensors(tmp_path / "a") == tensors(tmp_path / "b")


@pytest.mark.parametrize("change", ["train.seed=1", "data.seed=1"])
def test_seeds_matter(smoke, tmp_path, change):
    train(smoke("rope", *SHORT), tmp_path / "a", progress=False)
    train(smoke("rope", *SHORT, change), tmp_path / "b", progress=False)
    assert losses(tmp_path / "a") != losses(tmp_path / "b")


@pytest.mark.parametrize(
    "changes",
    [
        ("train.micro_batch=8", "train.accumulation=1"),
        ("train.micro_batch=1", "train.accumulation=8"),
        ("train.loss_chunk=50",),
        ("train.checkpoint_activations=true",),
    ],
)
def test_how_a_step_is_computed_changes_rounding_only(smoke, tmp_path, changes):
    train(smoke("mosar-cost", *SHORT), tmp_path / "a", progress=False)
    train(smoke("mosar-cost", *SHORT, *changes), tmp_path / "b", progress=False)
    for one, other in zip(
        read_metrics(tmp_path / "a", "train"), read_metrics(tmp_path / "b", "train"), strict=True
    ):
        for name in ("loss", "lm_loss", "grad_norm", "expected_reach"):
            assert one[name] == pytest.approx(other[name], rel=2e-4), name


def test_bf16_is_close_and_keeps_float32_parameters(smoke, tmp_path):
    train(smoke("mosar", *SHORT), tmp_path / "a", progress=False)
    config = smoke("mosar", *SHORT, "train.precision=bf16")
    train(config, tmp_path / "b", progress=False)
    assert losses(tmp_path / "a") != losses(tmp_path / "b")
    assert losses(tmp_path / "a") == pytest.approx(losses(tmp_path / "b"), abs=0.05)
    learner = Learner.of(config, Batches(config))
    learner.update(1)
    assert all(parameter.dtype == torch.float32 for parameter in learner.decoder.parameters())
    moments = [value for state in learner.optimizer.state.values() for value in state.values()]
    assert all(value.dtype == torch.float32 for value in moments)


def test_isolated_documents_train(smoke, tmp_path):
    train(smoke("mosar", *SHORT), tmp_path / "a", progress=False)
    train(smoke("mosar", *SHORT, "data.isolate_documents=true"), tmp_path / "b", progress=False)
    assert losses(tmp_path / "a") != losses(tmp_path / "b")


def test_only_matrices_decay(smoke):
    config = smoke("mosar")
    learner = Learner.of(config, Batches(config))
    decaying, others = learner.optimizer.param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = [{learner.names[p] for p in group["params"]} for group in (decaying, others)]
    assert names[0] | names[1] == {name for name, _ in learner.decoder.named_parameters()}
    assert all("norm" in name or "bias" in name for name in names[1])
    assert not any("norm" in name or "bias" in name for name in names[0])


def test_the_gradient_is_clipped_as_a_whole(smoke):
    config = smoke("rope", "train.grad_clip=0.01")
    learner = Learner.of(config, Batches(config))
    line = learner.update(1)
    clipped = torch.nn.utils.get_total_norm([p.grad for p in learner.names])
    assert line["grad_norm"] > 0.1
    assert float(clipped) == pytest.approx(0.01, rel=1e-3)
    free = Learner.of(smoke("rope", "train.grad_clip=none"), Batches(config))
    assert free.update(1)["grad_norm"] == line["grad_norm"]
    norm = torch.nn.utils.get_total_norm([p.grad for p in free.names])
    assert float(norm) == pytest.approx(line["grad_norm"], rel=1e-6)


def test_evaluation_sees_the_same_windows_every_time_and_changes_nothing(smoke):
    config = smoke("mosar")
    learner = Learner.of(config, Batches(config))
    first = learner.evaluate(0)
    assert learner.evaluate(0) == first
    assert all(parameter.grad is None for parameter in learner.names)
    windows = list(learner.batches.of_evaluation())
    assert [len(tokens) for tokens, _ in windows] == [4, 4]


def test_evaluation_of_a_short_split_weighs_windows_alike(smoke):
    config = smoke("rope", "train.eval_batches=100", "train.micro_batch=3")
    learner = Learner.of(config, Batches(config))
    sizes = [len(tokens) for tokens, _ in learner.batches.of_evaluation()]
    assert sizes[-1] < 3 == sizes[0]
    assert sum(sizes) == learner.batches.valid.num_windows(64)
    one_by_one = smoke("rope", "train.eval_batches=100", "train.micro_batch=1")
    other = Learner.of(one_by_one, Batches(one_by_one))
    assert learner.evaluate(0)["loss"] == pytest.approx(other.evaluate(0)["loss"], rel=1e-6)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_that_is_not_finite_stops_the_run_and_nothing_else(
    smoke, tmp_path, monkeypatch, what
):
    config = smoke("mosar", *SHORT)
    train(config, tmp_path / "whole", progress=False)
    with monkeypatch.context() as patch:
        _spoil(patch, what, step=5)
        with pytest.raises(NonFiniteError) as error:
            train(config, tmp_path / "run", progress=False)
    message = str(error.value)
    assert f"step 5: the {what} is nan" in message
    assert "the last checkpoint is that of step 3" in message
    if what == "gradient":
        assert "embedding.weight" in message
    assert steps(tmp_path / "run") == [3]
    assert max(line["step"] for line in read_metrics(tmp_path / "run")) == 4
    # Whatever it was, the run goes on from where it was good.
    train(config, tmp_path / "run", progress=False)
    assert tensors(tmp_path / "run") == tensors(tmp_path / "whole")
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


def _spoil(patch, what, step):
    real = learner_module.Objective.__call__

    def spoilt(self, decoder, tokens, segments, *, step):
        terms = real(self, decoder, tokens, segments, step=step)
        if step == 5 and torch.is_grad_enabled():
            if what == "loss":
                object.__setattr__(terms, "loss", terms.loss * math.nan)
            else:
                decoder.embedding.weight.register_hook(lambda gradient: gradient * math.nan)
        return terms

    assert step == 5
    patch.setattr(learner_module.Objective, "__call__", spoilt)


def test_a_learning_rate_that_explodes_is_reported(smoke, tmp_path):
    config = smoke("rope", *SHORT, "train.learning_rate=1e30", "train.weight_decay=0")
    with pytest.raises(NonFiniteError, match=r"step \d: the (validation )?(loss|gradient) is"):
        train(config, tmp_path / "run", progress=False)


def test_too_little_data_and_too_small_a_vocabulary(smoke, tmp_path):
    with pytest.raises(TrainingError, match=r"valid split in .* fewer than a window of .* 4097"):
        train(smoke("rope", "model.max_length=4096"), tmp_path / "run", progress=False)
    with pytest.raises(TrainingError, match=r"vocab_size is 100, but .* 257 different tokens"):
        train(smoke("rope", "model.vocab_size=100"), tmp_path / "run", progress=False)


def test_a_larger_vocabulary_than_the_data_needs(smoke, tmp_path):
    train(smoke("rope", *SHORT, "model.vocab_size=300"), tmp_path / "run", progress=False)
    assert read_metrics(tmp_path / "run", "train")[-1]["step"] == 6


def test_log_every(smoke, tmp_path):
    train(smoke("rope", *SHORT, "train.log_every=4"), tmp_path / "run", progress=False)
    assert [line["step"] for line in read_metrics(tmp_path / "run", "train")] == [4, 6]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_order_of_the_data_is_the_same_for_all(smoke, variant):
    config = smoke(variant)
    base = Batches(smoke("rope"))
    for step in (1, 2, 40):
        for (one, _), (other, _) in zip(
            Batches(config).of_step(step), base.of_step(step), strict=True
        ):
            assert torch.equal(one, other)


def test_tensorboard_writes_events(smoke, tmp_path):
    pytest.importorskip("tensorboard")
    train(smoke("mosar", *SHORT, "train.tensorboard=true"), tmp_path / "run", progress=False)
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


def test_missing_tensorboard_is_said_before_anything_is_made(smoke, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(TrainingError, match=r'pip install "mosar\[tensorboard\]"'):
        train(smoke("mosar", "train.tensorboard=true"), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
