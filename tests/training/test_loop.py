"""The loop: what it records, that it learns, and that accumulation is only a way to compute."""

import math

import pytest
import torch

from mosar.errors import NonFiniteError, TrainingError
from mosar.geometries import VARIANTS
from mosar.training.batches import open_batches
from mosar.training.learner import Learner
from mosar.training.loop import train
from mosar.training.objective import Objective
from mosar.training.run_folder import read_metrics
from training.runs import assert_same_run, leftovers, losses, saved_config, steps

SHORT = ("train.steps=6", "train.checkpoint_every=3", "train.eval_every=4", "train.warmup_steps=2")
FIELDS = (
    *("step", "split", "tokens", "loss", "lm_loss", "learning_rate", "grad_norm"),
    *("tokens_per_second", "expected_reach", "cost_weight", "regime_shares"),
)


@pytest.fixture(scope="module")
def base(smoke, tmp_path_factory):
    """The folder of a short run."""
    out = tmp_path_factory.mktemp("base") / "run"
    result = train(smoke("mosar-cost", *SHORT), out, progress=False)
    assert (result.step, result.resumed_from) == (6, 0)
    *_, last, valid = read_metrics(out)
    assert (result.loss, result.valid_loss) == (last["lm_loss"], valid["lm_loss"])
    return out


def changed(smoke, tmp_path, *changes, variant="mosar-cost"):
    """The folder of the same run with some changes."""
    train(smoke(variant, *SHORT, *changes), tmp_path / "changed", progress=False)
    return tmp_path / "changed"


def test_a_run_leaves_config_metrics_and_checkpoints(smoke, base):
    config = smoke("mosar-cost", *SHORT)
    saved = saved_config(base)
    assert {name: saved[name] for name in config.to_dict()} == config.to_dict()
    assert {"mosar", "torch", "python"} <= saved["environment"].keys()
    assert steps(base) == [3, 6]
    assert not leftovers(base)
    metrics = read_metrics(base)
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


def test_variants_without_routers_have_no_reach(smoke, tmp_path):
    out = changed(smoke, tmp_path, "train.log_every=4", "model.vocab_size=300", variant="alibi")
    for line in read_metrics(out):
        assert line["regime_shares"] is None and line["expected_reach"] is None
        assert line["loss"] == line["lm_loss"] and line["cost_weight"] == 0
    assert [line["step"] for line in read_metrics(out, "train")] == [4, 6]


def test_the_same_configuration_gives_the_same_bits(smoke, base, tmp_path):
    assert_same_run(changed(smoke, tmp_path), base)


@pytest.mark.parametrize(
    "change", ["train.seed=1", "data.seed=1", "data.isolate_documents=true", "train.precision=bf16"]
)
def test_seeds_documents_and_precision_matter(smoke, base, tmp_path, change):
    ours, theirs = losses(changed(smoke, tmp_path, change)), losses(base)
    assert ours != theirs
    assert ours == pytest.approx(theirs, abs=0.05) or "bf16" not in change


@pytest.mark.parametrize(
    "changes",
    [
        ("train.micro_batch=1", "train.accumulation=8", "train.loss_chunk=50"),
        ("train.micro_batch=8", "train.accumulation=1", "train.checkpoint_activations=true"),
    ],
)
def test_how_a_step_is_computed_changes_rounding_only(smoke, base, tmp_path, changes):
    other = changed(smoke, tmp_path, *changes)
    for a, b in zip(read_metrics(base, "train"), read_metrics(other, "train"), strict=True):
        for name in ("loss", "lm_loss", "grad_norm", "expected_reach"):
            assert a[name] == pytest.approx(b[name], rel=2e-4), name


def test_bf16_keeps_float32_parameters(smoke):
    config = smoke("mosar", *SHORT, "train.precision=bf16")
    learner = Learner.of(config, open_batches(config))
    learner.update(1)
    moments = [value for state in learner.optimizer.state.values() for value in state.values()]
    assert all(value.dtype == torch.float32 for value in (*learner.names, *moments))


def test_only_matrices_decay(smoke):
    config = smoke("mosar")
    learner = Learner.of(config, open_batches(config))
    decaying, others = learner.optimizer.param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = [{learner.names[p] for p in group["params"]} for group in (decaying, others)]
    assert names[0] | names[1] == {name for name, _ in learner.decoder.named_parameters()}
    assert all("norm" in name or "bias" in name for name in names[1])
    assert not any("norm" in name or "bias" in name for name in names[0])


def test_the_gradient_is_clipped_as_a_whole(smoke):
    config = smoke("rope", "train.grad_clip=0.01")
    learner = Learner.of(config, open_batches(config))
    line = learner.update(1)
    clipped = torch.nn.utils.get_total_norm([p.grad for p in learner.names])
    assert line["grad_norm"] > 0.1
    assert float(clipped) == pytest.approx(0.01, rel=1e-3)
    free = Learner.of(smoke("rope", "train.grad_clip=none"), open_batches(config))
    assert free.update(1)["grad_norm"] == line["grad_norm"]
    norm = torch.nn.utils.get_total_norm([p.grad for p in free.names])
    assert float(norm) == pytest.approx(line["grad_norm"], rel=1e-6)


def test_evaluation_sees_the_same_windows_every_time_and_changes_nothing(smoke):
    config = smoke("mosar")
    learner = Learner.of(config, open_batches(config))
    first = learner.evaluate(0)
    assert learner.evaluate(0) == first
    assert all(parameter.grad is None for parameter in learner.names)
    windows = list(learner.batches.of_evaluation())
    assert [len(tokens) for (tokens, _), _ in windows] == [4, 4]


def test_evaluation_of_a_short_split_weighs_windows_alike(smoke):
    config = smoke("rope", "train.eval_batches=100", "train.micro_batch=3")
    learner = Learner.of(config, open_batches(config))
    sizes = [len(tokens) for (tokens, _), _ in learner.batches.of_evaluation()]
    assert sizes[-1] < 3 == sizes[0]
    assert sum(sizes) == learner.batches.streams["valid"].num_windows(64)
    one_by_one = smoke("rope", "train.eval_batches=100", "train.micro_batch=1")
    other = Learner.of(one_by_one, open_batches(one_by_one))
    assert learner.evaluate(0)["loss"] == pytest.approx(other.evaluate(0)["loss"], rel=1e-6)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_that_is_not_finite_stops_the_run_and_nothing_else(
    smoke, base, tmp_path, monkeypatch, what
):
    config, out, real = smoke("mosar-cost", *SHORT), tmp_path / "run", Objective.__call__

    def spoilt(self, decoder, tokens, segments, *, step):
        terms = real(self, decoder, tokens, segments, step=step)
        if step == 5 and torch.is_grad_enabled():
            if what == "loss":
                object.__setattr__(terms, "loss", terms.loss * math.nan)
            else:
                decoder.embedding.weight.register_hook(lambda gradient: gradient * math.nan)
        return terms

    with monkeypatch.context() as patch:
        patch.setattr(Objective, "__call__", spoilt)
        where = r" \(in embedding.weight.*\)" if what == "gradient" else ""
        message = f"step 5: the {what} is nan{where}; .*the last checkpoint is that of step 3"
        with pytest.raises(NonFiniteError, match=message):
            train(config, out, progress=False)
    assert steps(out) == [3]
    assert max(line["step"] for line in read_metrics(out)) == 4
    # Whatever it was, the run goes on from where it was good.
    train(config, out, progress=False)
    assert_same_run(out, base)


def test_too_little_data_and_too_small_a_vocabulary(smoke, tmp_path):
    with pytest.raises(TrainingError, match=r"valid split in .* fewer than a window of .* 4097"):
        train(smoke("rope", "model.max_length=4096"), tmp_path / "run", progress=False)
    with pytest.raises(TrainingError, match=r"vocab_size is 100, but .* 257 different tokens"):
        train(smoke("rope", "model.vocab_size=100"), tmp_path / "run", progress=False)


def test_the_order_of_the_data_is_the_same_for_all(smoke):
    for step in (1, 40):
        first, *others = ([t for t, _ in open_batches(smoke(v)).of_step(step)] for v in VARIANTS)
        assert all(torch.equal(torch.cat(first), torch.cat(other)) for other in others)


def test_tensorboard_writes_events(smoke, tmp_path):
    pytest.importorskip("tensorboard")
    train(smoke("mosar", *SHORT, "train.tensorboard=true"), tmp_path / "run", progress=False)
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


def test_missing_tensorboard_is_said_before_anything_is_made(smoke, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(TrainingError, match='pip install "tensorboard>='):
        train(smoke("mosar", "train.tensorboard=true"), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
