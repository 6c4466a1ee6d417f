"""Retrieval: the accuracy of decoders whose answers are known, by distance."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from mosar.data.tasks import TASKS, make_windows
from mosar.evaluation.evaluate import evaluate
from mosar.evaluation.loaded_run import LoadedRun
from mosar.evaluation.retrieval import (
    Questions,
    answer,
    by_distance,
    distance_bounds,
    evaluate_retrieval,
)
from mosar.evaluation.routing import PairTally
from mosar.records import RetrievalRecord


class Oracle:
    """A decoder that knows the answers to questions up to a distance, and no others."""

    geometries = ()

    def __init__(self, windows, reach, vocab_size):
        self.windows, self.vocab_size = windows, vocab_size
        tokens, length = windows.tokens, windows.tokens.shape[1] - 1
        self.said = torch.zeros(len(tokens), length, dtype=torch.int64) + vocab_size - 1
        for row, (places, distances) in enumerate(
            zip(windows.answers, windows.distances, strict=True)
        ):
            for place, distance in zip(places, distances, strict=True):
                if distance <= reach:
                    self.said[row, place] = tokens[row, place + 1]

    def __call__(self, tokens, routing):
        assert torch.equal(tokens, self.windows.tokens[:, :-1])
        return SimpleNamespace(
            hidden=torch.nn.functional.one_hot(self.said, self.vocab_size).float(), routings=[]
        )

    def logits(self, hidden):
        return hidden


def as_run(oracle):
    return SimpleNamespace(
        decoder=oracle,
        device=torch.device("cpu"),
        executing=lambda routing, length: nullcontext(routing),
    )


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("reach", [0, 5, 32, 10_000])
def test_an_oracle_of_a_reach_is_seen_to_have_it(task, reach):
    made = TASKS[task](64)
    windows = make_windows(made, range(40), 200, split="test")
    right = answer(as_run(Oracle(windows, reach, made.vocab_size)), windows, "native", PairTally())
    assert right.shape == windows.distances.shape
    assert torch.equal(right, windows.distances <= reach)
    rows = by_distance(right.flatten(), windows.distances.flatten(), distance_bounds(200, [reach]))
    assert sum(row[3] for row in rows) == right.numel()
    assert {row[2] for row in rows if row[1] - 1 <= reach} <= {1.0}
    assert {row[2] for row in rows if row[0] > reach} <= {0.0}


def test_one_wrong_token_spoils_a_passkey():
    made = TASKS["passkey"](64)
    windows = make_windows(made, range(3), 64, split="test")
    oracle = Oracle(windows, 10_000, made.vocab_size)
    oracle.said[1, windows.answers[1, 0, 2]] = made.vocab_size - 1
    assert answer(as_run(oracle), windows, "soft", PairTally()).tolist() == [
        [True],
        [False],
        [True],
    ]


@pytest.mark.parametrize("length", [1, 2, 3, 64, 100, 256, 257, 1000])
def test_bounds_hold_every_distance_and_end_at_the_reaches(length):
    bounds = distance_bounds(length, [16.5, 24, length])
    assert bounds[0] == 1 and bounds == sorted(set(bounds))
    assert bounds[-1] > length
    if length > 24:
        # The last distance of a group is the reach itself.
        assert {17, 25} <= set(bounds)


@pytest.mark.parametrize("task", TASKS)
def test_a_run_of_a_task_is_asked(task, task_run):
    folder = task_run(task)
    records = evaluate(folder, tokens=512, progress=False)
    assert [(record.length, record.routing) for record in records] == [
        (length, routing) for length in (64, 128, 256) for routing in ("soft", "top1", "sparse")
    ]
    for record in records:
        assert isinstance(record, RetrievalRecord)
        assert (record.task, record.step, record.train_length) == (task, 2, 64)
        assert record.answers == (512 // record.length) * (8 if task == "recall" else 1)
        assert record.answers == sum(row[3] for row in record.by_distance)
        weighed = sum(row[2] * row[3] for row in record.by_distance)
        assert record.accuracy == pytest.approx(weighed / record.answers)
        assert 0 < record.density <= 1
        assert record.reaches == {"S": 4.0, "M": 16.0, "G": 64.0}
        assert record.chance == (1 / 8 if task == "recall" else 1 / 256)
    assert evaluate(folder, tokens=512, progress=False) == records
    assert evaluate(folder, tokens=256, progress=False) != records


def test_density_is_that_of_the_questions(task_run):
    dense, masked = (
        evaluate(task_run("recall", variant), lengths=(128,), tokens=512, progress=False)[0]
        for variant in ("rope", "rope-m-mask")
    )
    assert dense.density == 1
    assert masked.density == pytest.approx(
        sum(min(i + 1, 17) for i in range(128)) / (128 * 129 / 2)
    )


def test_accuracy_is_that_of_the_decoder(task_run):
    loaded = LoadedRun.open(task_run("recall", "rope"))
    questions = Questions(loaded, (64,), 1024)
    fields = {"cell": loaded.cell, "step": loaded.step, "train_length": 64, "inputs": {}}
    (record,) = evaluate_retrieval(loaded, questions, 64, ("native",), lambda: None, **fields)
    windows = make_windows(questions.task, range(16), 64, split="test")
    said = loaded.decoder.logits(loaded.decoder(windows.tokens[:, :-1]).hidden).argmax(dim=-1)
    right = (said == windows.tokens[:, 1:])[windows.scored]
    assert record.answers == right.numel() == 128
    assert record.accuracy == pytest.approx(float(right.double().mean()))


def test_wrong_arguments(task_run):
    folder = task_run("recall", "rope")
    with pytest.raises(
        ValueError, match="lengths must be at least 64 for recall learnt at 64, got"
    ):
        evaluate(folder, lengths=[16], progress=False)
    with pytest.raises(ValueError, match="tokens must be at least 256, one window; got 100"):
        evaluate(folder, tokens=100, progress=False)
    with pytest.raises(ValueError, match="learnt the task recall, which needs no data"):
        evaluate(folder, data="anywhere", progress=False)
