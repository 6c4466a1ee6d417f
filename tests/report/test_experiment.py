"""Reading an experiment folder: what is there, and what is wrong with it in one line."""

import json
from dataclasses import replace

import pytest

from mosar.records import Cell, append_record
from mosar.report.experiment import ReportError, load_experiment
from report.synthetic import (
    make_evaluation,
    make_retrieval,
    make_training,
    write_cell,
    write_experiment,
)

CELL = Cell(variant="mosar", preset="small", seed=0)


def test_everything_is_read(folder):
    experiment = load_experiment(folder)
    assert experiment.name == "small"
    assert len(experiment.trainings) == 8 * 3 + 3
    assert len(experiment.evaluations) == (6 * 3 + 2 * 3 * 3) * 3 + 3 * 9
    assert len(experiment.retrievals) == (6 * 2 + 2 * 4) * 3
    assert len(experiment.benchmarks) == 12
    assert [failure.cell for failure in experiment.failures] == ["alibi-seed7"]
    assert experiment.asked["preset"] == "small"


def test_records_alone_are_enough(tmp_path, folder):
    """The small files may be moved without the rest."""
    (tmp_path / "moved").mkdir()
    for path in (folder / "records").glob("*.jsonl"):
        (tmp_path / "moved" / path.name).write_bytes(path.read_bytes())
    moved = load_experiment(tmp_path / "moved")
    assert moved.evaluations == load_experiment(folder).evaluations
    assert moved.asked == {} and moved.failures == ()


def test_a_task_beside_text_does_not_hide_it(tmp_path):
    """Two experiments may be put together: cells of both have the same names."""
    text = make_training(CELL)
    task = replace(
        text,
        cell=replace(CELL, preset="retrieval"),
        config=text.config | {"data": {"task": "passkey"}},
        valid_curve=[[100, 0.5]],
    )
    (tmp_path / "records" / "passkey").mkdir(parents=True)
    append_record(tmp_path / "records" / "mosar-seed0.jsonl", text)
    append_record(tmp_path / "records" / "passkey" / "mosar-seed0.jsonl", task)
    found = load_experiment(tmp_path).trainings
    assert found == {"mosar-seed0": text, "mosar-seed0 (passkey)": task}


def test_unfinished_cells_are_those_without_record_or_failure(tmp_path):
    write_cell(write_experiment(tmp_path, variants=(), benchmarks=False), CELL)
    asked = {"cells": [CELL.name, "rope-seed0", "alibi-seed0"]}
    (tmp_path / "experiment.json").write_text(json.dumps(asked))
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures" / "alibi-seed0.json").write_text('{"cell": "alibi-seed0"}')
    assert load_experiment(tmp_path).unfinished == ["rope-seed0"]


def test_records_of_another_experiment_finish_no_cell(tmp_path):
    write_cell(write_experiment(tmp_path, variants=(), benchmarks=False), CELL)
    asked = {"preset": "small", "cells": [CELL.name, "mosar-seed1"]}
    (tmp_path / "experiment.json").write_text(json.dumps(asked))
    beside = replace(CELL, preset="retrieval", seed=1)
    (tmp_path / "records" / "retrieval").mkdir()
    path = tmp_path / "records" / "retrieval" / f"{beside.name}.jsonl"
    append_record(path, make_retrieval(beside, "recall", "soft"))
    assert load_experiment(tmp_path).unfinished == ["mosar-seed1"]


def test_a_run_folder_is_read_by_its_evaluations(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "lm_loss": 5.0}\n')
    (tmp_path / "evaluations").mkdir()
    failing(tmp_path, "it is a run that was not evaluated", f"mosar evaluate {tmp_path}")
    records = [make_evaluation(CELL, factor, "soft") for factor in (1, 2)]
    for record in records:
        append_record(tmp_path / "evaluations" / f"{record.length}.json", record)
    assert load_experiment(tmp_path).evaluations == tuple(records)


def failing(folder, *parts):
    with pytest.raises(ReportError) as caught:
        load_experiment(folder)
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert str(part) in text
    return text


def test_no_records(tmp_path):
    failing(tmp_path, f"no records in {tmp_path}", "mosar reproduce --out")
    (tmp_path / "records").mkdir()
    failing(tmp_path, "no records in")


def test_only_failures(tmp_path):
    write_experiment(
        tmp_path, variants=(), retrieval=False, benchmarks=False, failures=["rope-seed0"]
    )
    failing(tmp_path, "all its cells failed", "rope-seed0 with: loss is not finite at step 17")


@pytest.mark.parametrize(
    ("record", "change", "part"),
    [
        ("evaluation", {"loss": "low"}, "loss must be a finite number >= 0, got 'low'"),
        ("evaluation", {"loss": None}, "loss must be a finite number"),
        ("evaluation", {"density": 7.0}, "density must be a finite number in [0, 1], got 7.0"),
        ("evaluation", {"length": 0}, "length must be an integer >= 1, got 0"),
        ("evaluation", {"train_length": 1.5}, "train_length must be an integer"),
        ("evaluation", {"routing": ""}, "routing must be a text of printable characters"),
        ("evaluation", {"routing": "a\0b"}, "of printable characters, got 'a\\x00b'"),
        ("evaluation", {"routing": "\x1b[2J"}, "routing must be a text"),
        ("evaluation", {"routing": "\ud800"}, "routing must be a text"),
        ("evaluation", {"buckets": [[1, 2]]}, "buckets must have rows of 4 numbers, got [1, 2]"),
        ("evaluation", {"buckets": 5}, "buckets must be a list, got 5"),
        ("evaluation", {"shares_soft": {"query": []}}, "must have the fields query and key"),
        ("evaluation", {"shares_top1": {"query": [[1.0]], "key": [[1.0]]}}, "rows of 3 numbers"),
        ("evaluation", {"discarded_mass": [{"mean": 0.1}]}, "discarded_mass p95 must be"),
        ("evaluation", {"example_labels": {"query": ["S"], "key": []}}, "as many layers"),
        ("evaluation", {"example_labels": {"query": [1], "key": [2]}}, "must hold texts"),
        ("evaluation", {"reach_soft": "far"}, "reach_soft must be a finite number"),
        ("evaluation", {"environment": []}, "environment must be an object"),
        ("training", {"valid_curve": [[1]]}, "valid_curve must have rows of 2 numbers"),
        ("training", {"seconds": -1}, "seconds must be a finite number >= 0, got -1"),
        ("training", {"config": []}, "config must be an object"),
        ("training", {"tokens": True}, "tokens must be an integer >= 0, got True"),
        ("retrieval", {"accuracy": 1.5}, "accuracy must be a finite number in [0, 1]"),
        ("retrieval", {"reaches": {"S": "x"}}, "reaches S must be a finite number"),
        ("retrieval", {"by_distance": [[1, 2, 3]]}, "by_distance must have rows of 4"),
    ],
)
def test_a_field_that_is_not_what_it_should_be_is_named(tmp_path, record, change, part):
    made = {
        "evaluation": make_evaluation(CELL, 1, "top1"),
        "training": make_training(CELL),
        "retrieval": make_retrieval(CELL, "passkey", "soft"),
    }[record]
    path = tmp_path / "a.jsonl"
    append_record(path, make_training(CELL))
    with path.open("a") as file:
        file.write(json.dumps(made.to_dict() | change) + "\n")
    failing(tmp_path, f"{path}, line 2: ", part)


@pytest.mark.parametrize("cell", [{"seed": -1}, {"grid": []}, {"variant": 3}])
def test_a_damaged_cell_is_named(tmp_path, cell):
    record = make_training(CELL).to_dict()
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record | {"cell": record["cell"] | cell}) + "\n")
    failing(tmp_path, "line 1: ", f"cell.{next(iter(cell))} must be")


@pytest.mark.parametrize("name", ["experiment.json", "failures/rope-seed0.json"])
@pytest.mark.parametrize("text", ["{", "[]"])
def test_other_damaged_files_are_named(tmp_path, name, text):
    write_cell(write_experiment(tmp_path, variants=(), benchmarks=False), CELL)
    (tmp_path / "failures").mkdir()
    (tmp_path / name).write_text(text)
    failing(tmp_path, tmp_path / name)


def test_a_failure_may_name_its_cell_in_full(tmp_path):
    write_cell(write_experiment(tmp_path, variants=(), benchmarks=False), CELL)
    (tmp_path / "failures").mkdir()
    values = {"cell": {"variant": "rope", "preset": "small", "seed": 2, "grid": {}}}
    (tmp_path / "failures" / "x.json").write_text(json.dumps(values | {"error": "a\nb"}))
    (failure,) = load_experiment(tmp_path).failures
    assert (failure.cell, failure.error) == ("rope-seed2", "a b")
