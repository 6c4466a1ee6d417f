"""An experiment as resumable cells, with real processes that are really killed."""

import json
import shutil
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from mosar.cli import app
from mosar.experiments import run as experiment_run
from mosar.experiments.run import ExperimentError, run_experiment
from mosar.experiments.settings import Axis, ExperimentSettings
from mosar.experiments.work import spoken
from mosar.records import EvaluationRecord, TrainingRecord, read_records
from mosar.training.errors import TrainingError
from mosar.training.run_folder import read_metrics

STEPS = 6
CHANGES = (f"train.steps={STEPS}", "train.checkpoint_every=2", "train.eval_every=3")


@pytest.fixture
def small(dataset):
    def make(*variants, **given):
        base = {"changes": CHANGES, "lengths": ("1x", "2x"), "eval_tokens": 512}
        return ExperimentSettings(preset="smoke", variants=variants, data=dataset, **(base | given))

    return make


def run(settings, out):
    return run_experiment(settings, out, progress=False)


def records_of(out):
    return {path.stem: read_records(path) for path in (out / "records").glob("*.jsonl")}


def stamps(out):
    return {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}


def test_records_of_each_cell(small, tmp_path):
    result = run(small("rope", "mosar"), tmp_path / "e")
    assert [cell.name for cell in result.finished] == ["rope-seed0", "mosar-seed0"]
    assert not result.failed
    found = records_of(tmp_path / "e")
    for name, routings in (("rope-seed0", ["native"]), ("mosar-seed0", ["soft", "top1", "sparse"])):
        training, *evaluations = found[name]
        assert isinstance(training, TrainingRecord) and training.cell.name == name
        assert training.step == STEPS and training.tokens == STEPS * 8 * 64
        assert training.parameters > 10_000 and training.seconds > 0
        assert [step for step, _ in training.valid_curve] == [0, 3, 6]
        assert len(training.train_curve) == STEPS
        assert bool(training.reach_curve) == (name == "mosar-seed0")
        # Nothing of this machine travels with a record but its description.
        assert training.config["data"]["folder"] == "corpus"
        assert all(isinstance(record, EvaluationRecord) for record in evaluations)
        expected = [(length, routing) for length in (64, 128) for routing in routings]
        assert [(e.length, e.routing) for e in evaluations] == expected
        assert len({e.tokens for e in evaluations}) == 1
    asked = json.loads((tmp_path / "e" / "experiment.json").read_text())
    assert asked["preset"] == "smoke" and asked["cells"] == ["rope-seed0", "mosar-seed0"]


def test_a_finished_cell_is_not_run_again(small, tmp_path):
    out = tmp_path / "e"
    run(small("rope"), out)
    before = stamps(out)
    result = run(small("rope", "alibi"), out)
    assert len(result.finished) == 2
    after = stamps(out)
    changed = {path for path in before if before[path] != after[path]}
    assert {path.name for path in changed} <= {"experiment.json", ".lock"}
    assert (out / "records" / "alibi-seed0.jsonl").exists()
    # The records alone say that it is finished: the run folder may be gone.
    shutil.rmtree(out / "cells")
    assert len(run(small("rope", "alibi"), out).finished) == 2
    assert not (out / "cells").exists()


def test_a_failed_cell_does_not_stop_the_others(small, tmp_path, monkeypatch):
    real, out = experiment_run.train, tmp_path / "e"

    def failing(config, run, **options):
        if config.variant == "alibi":
            raise TrainingError("the loss is\nnan")
        return real(config, run, **options)

    monkeypatch.setattr(experiment_run, "train", failing)
    result = run(small("rope", "alibi", "p-rope"), out)
    assert result.failed == {"alibi-seed0": "the loss is nan"}
    assert [cell.variant for cell in result.finished] == ["rope", "p-rope"]
    failure = json.loads((out / "failures" / "alibi-seed0.json").read_text())
    assert failure["error"] == "the loss is nan" and failure["cell"] == "alibi-seed0"
    monkeypatch.undo()
    assert not run(small("rope", "alibi", "p-rope"), out).failed
    assert not list((out / "failures").iterdir())


def test_along_an_axis(small, tmp_path):
    axis = Axis.parse("attention.barrier=2,6")
    result = run(small("rope", "fixed-s", grid=axis), tmp_path / "e")
    assert len(result.finished) == 3
    found = records_of(tmp_path / "e")
    cells = {name: records[0].cell.grid for name, records in found.items()}
    assert cells == {
        "rope-seed0": {},
        "fixed-s-seed0-attention.barrier=2": {"attention.barrier": "2"},
        "fixed-s-seed0-attention.barrier=6": {"attention.barrier": "6"},
    }
    barriers = [
        found[f"fixed-s-seed0-attention.barrier={b}"][0].config["attention"]["barrier"]
        for b in (2, 6)
    ]
    assert barriers == [2.0, 6.0]


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"changes": ("train.steps=7",)}, "holds an experiment with changes"),
        ({"lengths": ("1x",)}, "holds an experiment with lengths"),
        ({"eval_tokens": 64}, "holds an experiment with eval_tokens"),
    ],
)
def test_another_experiment_in_the_folder(small, tmp_path, changed, said):
    run(small("rope"), tmp_path / "e")
    with pytest.raises(ExperimentError, match=said):
        run(small("rope", **changed), tmp_path / "e")


def test_a_damaged_record_is_named(small, tmp_path):
    run(small("rope"), tmp_path / "e")
    path = tmp_path / "e" / "records" / "rope-seed0.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ExperimentError, match=r"rope-seed0.jsonl, line 3: .*remove the file"):
        run(small("rope"), tmp_path / "e")


def command(dataset, out):
    words = [sys.executable, "-m", "mosar.cli", "reproduce", "--preset", "smoke"]
    words += ["--variants", "rope,mosar", "--data", str(dataset), "--out", str(out)]
    words += ["--lengths", "1x,2x", "--eval-tokens", "512", "--threads", "1"]
    for change in CHANGES:
        words += ["--set", change]
    return words


def without_clock(out):
    """Metrics of all cells without what depends on the clock."""
    return {
        path.name: [{**line, "tokens_per_second": None} for line in read_metrics(path)]
        for path in sorted((out / "cells").iterdir())
    }


def losses_of(out):
    return {
        name: [record.loss for record in records[1:]] for name, records in records_of(out).items()
    }


def test_killed_and_gone_on_with(dataset, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "e"
    done = subprocess.run(command(dataset, whole), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 cells to run, " in done.stderr
    assert f"The report: {whole / 'report' / 'index.html'}" in done.stdout
    kills = 0
    for wanted in ("cells/rope-seed0/metrics.jsonl", "records/rope-seed0.jsonl"):
        process = subprocess.Popen(command(dataset, out), stderr=subprocess.PIPE)
        while process.poll() is None and not (out / wanted).exists():
            time.sleep(0.002)
        process.kill()
        process.communicate()
        kills += process.returncode != 0
    assert kills
    done = subprocess.run(command(dataset, out), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert without_clock(out) == without_clock(whole)
    assert losses_of(out) == losses_of(whole)


def test_the_records_make_the_same_report_elsewhere(small, tmp_path):
    run(small("rope", "mosar"), tmp_path / "e")
    (tmp_path / "moved").mkdir()
    shutil.copytree(tmp_path / "e" / "records", tmp_path / "moved" / "records")
    result = CliRunner().invoke(app, ["report", str(tmp_path / "moved")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "moved" / "report" / "index.html").stat().st_size > 1000


@pytest.mark.parametrize(
    "words, said, code",
    [
        (["--preset", "huge"], "preset must be one of", 2),
        (["--variants", "rope,mosaar"], "did you mean 'mosar'", 2),
        (["--grid", "attention.barrier"], "a grid is written", 2),
        (["--lengths", "2y"], "a length is a multiple", 2),
        (["--data", "nowhere"], "nowhere", 1),
    ],
)
def test_bad_options(dataset, tmp_path, words, said, code):
    base = ["reproduce", "--preset", "smoke", "--data", str(dataset), "--out", str(tmp_path / "e")]
    result = CliRunner().invoke(app, [*base, *words])
    assert result.exit_code == code, result.output
    assert said in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "e" / "cells").exists()


@pytest.mark.parametrize(
    "seconds, said",
    [
        (5, "less than a minute"),
        (61, "about 1 minute"),
        (100, "about 1.7 minutes"),
        (601, "about 11 minutes"),
        (2 * 3600, "about 2 hours"),
        (3 * 86400, "about 3 days"),
    ],
)
def test_spoken(seconds, said):
    assert spoken(seconds) == said
