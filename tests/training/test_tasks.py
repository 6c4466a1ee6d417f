"""Runs that learn a task: what counts, what resumes, what old run folders mean."""

import shutil

import pytest
import torch
import torch.nn.functional as F

from mosar.data.config import DataConfig
from mosar.data.tasks import TASKS
from mosar.errors import TrainingError
from mosar.model.decoder import Decoder
from mosar.training.batches import open_batches
from mosar.training.config import RunConfig, resolve_config
from mosar.training.loop import train
from mosar.training.objective import Objective
from mosar.training.run_folder import read_metrics
from training.runs import assert_same_run

SHORT = (
    *("train.steps=6", "train.checkpoint_every=3", "train.eval_every=4", "train.warmup_steps=2"),
    *("train.micro_batch=2", "train.accumulation=2", "train.eval_batches=2"),
)


def configure(task="recall", variant="mosar", *changes):
    return resolve_config(
        variant=variant,
        preset="smoke",
        data="nowhere",
        changes=[f"data.task={task}", *SHORT, *changes],
    )


@pytest.mark.parametrize("task", TASKS)
def test_only_answers_count(task):
    config = configure(task)
    decoder = Decoder(config.model, config.attention)
    decoder.init_weights(0)
    for tokens, segments, scored in open_batches(config).of_step(3):
        assert segments is None
        terms = Objective(config)(decoder, tokens, segments, scored, step=3)
        logits = decoder.logits(decoder(tokens[:, :-1]).hidden)
        exact = F.cross_entropy(logits[scored], tokens[:, 1:][scored])
        torch.testing.assert_close(terms.lm_loss, exact.detach())
        ours = torch.autograd.grad(terms.loss, decoder.embedding.weight, retain_graph=True)
        torch.testing.assert_close(
            ours, torch.autograd.grad(exact, decoder.embedding.weight), rtol=1e-4, atol=1e-6
        )


def test_batches_follow_from_seed_and_step():
    config = configure()
    batches = open_batches(config)
    steps_of = {step: list(batches.of_step(step)) for step in (1, 2, 3)}
    assert [len(tokens) for tokens, _, _ in steps_of[1]] == [2, 2]
    again = list(open_batches(config).of_step(2))
    for one, other in zip(steps_of[2], again, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[2], other[2])
    flat = [row for step in steps_of.values() for tokens, *_ in step for row in tokens]
    assert len({tuple(row.tolist()) for row in flat}) == 12
    regrouped = configure("recall", "mosar", "train.micro_batch=4", "train.accumulation=1")
    (whole,) = open_batches(regrouped).of_step(2)
    assert torch.equal(whole[0], torch.cat([tokens for tokens, *_ in steps_of[2]]))
    other = open_batches(configure("recall", "mosar", "data.seed=1"))
    assert not torch.equal(next(other.of_step(1))[0], steps_of[1][0][0])
    # Validation is the same for all seeds, and apart from the training.
    valid, theirs = (torch.cat([t for (t, *_), _ in b.of_evaluation()]) for b in (batches, other))
    assert torch.equal(valid, theirs) and len(valid) == 8
    assert not {tuple(row.tolist()) for row in valid} & {tuple(row.tolist()) for row in flat}


@pytest.mark.parametrize("task", TASKS)
def test_a_task_resumes_bit_for_bit_and_others_are_refused(task, tmp_path, monkeypatch):
    config, out = configure(task), tmp_path / "run"
    train(config, tmp_path / "whole", progress=False)
    shutil.copytree(tmp_path / "whole", out)
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    result = train(config, out, progress=False)
    assert (result.step, result.resumed_from) == (6, 3)
    assert_same_run(out, tmp_path / "whole")
    (other,) = set(TASKS) - {task}
    with pytest.raises(TrainingError, match=f"data.task is '{task}', not '{other}'"):
        train(configure(other, "mosar", "model.vocab_size=96"), out, progress=False)
    monkeypatch.setattr("mosar.training.batches.VERSION", 0)
    with pytest.raises(TrainingError, match=f"learnt {task} from windows that this version no"):
        train(config, out, progress=False)


def test_a_task_needs_no_data_and_brings_its_vocabulary():
    assert configure("recall").model.vocab_size == 96
    assert configure("passkey").model.vocab_size == 66
    assert configure("recall", "mosar", "model.vocab_size=300").model.vocab_size == 300
    assert configure("recall", "mosar", "model.max_length=256").model.vocab_size == 288
    config = resolve_config(variant="rope", preset="retrieval", data="nowhere")
    assert config.data.task == "recall" and config.model.vocab_size == 288


def test_what_cannot_be_learnt_is_said(tmp_path):
    for changes, message in (
        (("model.vocab_size=50",), "vocab_size is 50, but the task recall has 96 different tokens"),
        (("model.max_length=7",), "max_length must be at least 8 for the task recall, got 7"),
    ):
        with pytest.raises(TrainingError, match=message):
            train(configure("recall", "rope", *changes), tmp_path / "run", progress=False)
    with pytest.raises(ValueError, match=r"data.task must be one of text, passkey, recall"):
        configure("needle")
    with pytest.raises(ValueError, match="isolate_documents must be false if task is 'recall'"):
        configure("recall", "rope", "data.isolate_documents=true")
    with pytest.raises(ValueError, match="task must be one of"):
        DataConfig(task="poem")  # pyright: ignore


# What the configurations of text were known by before there were tasks.
FINGERPRINTS = {
    "mosar": "eb02d8968e1452f1baa2766bd6b5501d768a03a4a350486cf8efd3c93311f7df",
    "rope": "be420e691a14e3df1d1f671377c4c61acfe6b2c0da38d0b6bdc4cdcaec2aad9f",
}


@pytest.mark.parametrize("variant", FINGERPRINTS)
def test_runs_of_before_tasks_are_those_of_text(variant):
    config = resolve_config(variant=variant, preset="smoke", data="nowhere", vocab_size=257)
    assert config.fingerprint() == FINGERPRINTS[variant]
    old = config.to_dict()
    assert old["data"].pop("task") == "text"
    again = RunConfig.from_dict(old)
    assert again == config and again.fingerprint() == FINGERPRINTS[variant]
    assert configure("recall").fingerprint() != configure("passkey").fingerprint()
    # Only what may be absent may be.
    del old["data"]["seed"]
    with pytest.raises(ValueError, match=r"data lacks the keys \['seed'\]"):
        RunConfig.from_dict(old)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["rope", "mosar"])
@pytest.mark.parametrize(("task", "steps"), [("passkey", 3000), ("recall", 1000)])
def test_the_preset_learns_its_tasks(variant, task, steps, tmp_path):
    """Minutes each: the validation loss ends far below that of guessing among what is there."""
    config = resolve_config(
        variant=variant,
        preset="retrieval",
        data="nowhere",
        changes=[f"data.task={task}", f"train.steps={steps}"],
    )
    train(config, tmp_path / "run", progress=False)
    assert read_metrics(tmp_path / "run", "valid")[-1]["lm_loss"] < 0.5
