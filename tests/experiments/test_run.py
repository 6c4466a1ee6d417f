"""An experiment as resumable cells, with real processes that are really killed."""

import json
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import processes
from evaluation.conftest import SMALL_TASK
from mosar.cli import app
from mosar.data.prepare import prepare
from mosar.errors import TrainingError, TrainingInterrupted
from mosar.experiments import run as experiment_run
from mosar.experiments import work
from mosar.experiments.jobs import count_rest, default_threads, fitting_jobs
from mosar.experiments.progress import Display
from mosar.experiments.run import run_experiment
from mosar.experiments.settings import Axis, ExperimentSettings
from mosar.experiments.work import duration_text
from mosar.records import EvaluationRecord, TrainingRecord, read_records, record_line
from mosar.report.comparison import Comparison, Setting
from mosar.report.experiment import load_experiment
from mosar.report.milestones import density_by_tokens, perplexity_by_tokens
from mosar.training.learner import Learner
from mosar.training.run_folder import locked, read_metrics

STEPS = 6
CHANGES = (f"train.steps={STEPS}", "train.checkpoint_every=2", "train.eval_every=3")


@pytest.fixture
def small(dataset):
    def make(*variants, **given):
        base = {"data": dataset, "changes": CHANGES, "lengths": ("1x", "2x"), "eval_tokens": 512}
        return ExperimentSettings(preset="smoke", variants=variants, **(base | given))

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


def test_milestones_are_evaluated_and_drawn(small, tmp_path):
    changes = (*CHANGES, "train.keep_every=4")
    run(small("rope", "mosar", changes=changes, lengths=("1x",)), tmp_path / "e")
    for name, records in records_of(tmp_path / "e").items():
        steps = [record.step for record in records if isinstance(record, EvaluationRecord)]
        assert steps == sorted(steps) and set(steps) == {4, STEPS}, name
    c = Comparison(load_experiment(tmp_path / "e"))
    # The comparison is of the last step; the chart has both.
    assert {record.step for record in c.records("mosar")} == {STEPS}
    chart = perplexity_by_tokens(c, 1.0)
    assert {line.key for line in chart.series} == {"rope", "mosar"}
    for line in chart.series:
        found = c.by_tokens(Setting(line.key, 1.0))
        assert [p.x * 1e6 for p in line.points] == pytest.approx([4 * 8 * 64, STEPS * 8 * 64])
        assert [p.y for p in line.points] == pytest.approx([e.mean for e in found.values()])
    densities = [p.y for p in density_by_tokens(c, 1.0).series[0].points]
    assert len(densities) == 2 and all(0 < density <= 1 for density in densities)


def test_chosen_milestones_are_evaluated(small, tmp_path):
    changes = (*CHANGES, "train.keep_every=2")
    chosen = {"changes": changes, "lengths": ("1x",)}
    run(small("rope", milestones=(4,), **chosen), tmp_path / "e")
    (records,) = records_of(tmp_path / "e").values()
    assert [r.step for r in records if isinstance(r, EvaluationRecord)] == [4, STEPS]
    with pytest.raises(TrainingError, match=r"with milestones \[4\], not None"):
        run(small("rope", "alibi", **chosen), tmp_path / "e")
    for steps in ((3,), (STEPS,), (0,)):
        with pytest.raises(ValueError, match=rf"train.keep_every=2 keeps .* got {steps[0]}"):
            run(small("rope", milestones=steps, **chosen), tmp_path / "other")


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


def test_a_record_without_a_newer_setting_is_finished_at_its_default(small, tmp_path):
    """An earlier version had no `own.gate_bias`: its record is that of the default, 0."""
    out = tmp_path / "e"
    run(small("fox"), out)
    path = out / "records" / "fox-seed0.jsonl"
    training, *evaluations = read_records(path)
    assert training.config["attention"].pop("own") == {"gate_bias": 0.0}
    path.write_bytes(b"".join(map(record_line, [training, *evaluations])))
    before = stamps(out)[path]
    assert len(run(small("fox"), out).finished) == 1 and stamps(out)[path] == before
    cell = replace(training.cell, grid={"attention.own.gate_bias": "5"})
    path.with_name(f"{cell.name}.jsonl").write_bytes(record_line(replace(training, cell=cell)))
    with pytest.raises(TrainingError, match=r"attention\.own is .*0\.0.*not .*5\.0"):
        run(small("fox", grid=(Axis.parse("attention.own.gate_bias=5"),)), out)


def test_a_failed_cell_does_not_stop_the_others(small, tmp_path, monkeypatch):
    """Whether the error is ours or torch's own."""
    real, out = experiment_run.train, tmp_path / "e"
    errors = {"alibi": TrainingError("the loss is\nnan"), "p-rope": RuntimeError("no memory")}
    errors["fixed-s"] = MemoryError()

    def failing(config, run, **options):
        if config.variant in errors:
            raise errors[config.variant]
        return real(config, run, **options)

    monkeypatch.setattr(experiment_run, "train", failing)
    result = run(small(*errors, "rope"), out)
    said = {"alibi": "the loss is nan", "p-rope": "no memory", "fixed-s": "MemoryError"}
    assert result.failed == {f"{variant}-seed0": error for variant, error in said.items()}
    assert [cell.variant for cell in result.finished] == ["rope"]
    for variant, error in said.items():
        failure = json.loads((out / "failures" / f"{variant}-seed0.json").read_text())
        assert (failure["error"], failure["cell"]) == (error, f"{variant}-seed0")
    monkeypatch.undo()
    assert not run(small("rope", "alibi"), out).failed
    assert not (out / "failures" / "alibi-seed0.json").exists()


def test_the_estimate_passes_over_a_cell_that_cannot_run(small, monkeypatch):
    asked, errors = [], {"rope": RuntimeError("no memory"), "alibi": ValueError("odd")}

    def measured(config):
        asked.append(config.variant)
        if config.variant in errors:
            raise errors[config.variant]
        return 1.0

    monkeypatch.setattr(work, "_measured", measured)
    settings = small("rope", "alibi", "p-rope")
    cells = settings.cells()
    units = sum(
        work.training_work(config) + work.evaluation_work(settings, config)
        for config in map(settings.config, cells)
    )
    guess = work.guess_seconds(settings, cells, lambda cell: 0)
    assert asked == ["rope", "alibi", "p-rope"] and guess >= units
    assert work.guess_seconds(settings, cells[:2], lambda cell: 0) == 0.0


def test_a_decoder_that_cannot_be_built_fails_alone(small, tmp_path):
    # Two KV heads cannot be three groups; only variants with routers are asked.
    out = tmp_path / "e"
    result = run(small("mosar", "rope", changes=(*CHANGES, "attention.routing_groups=3")), out)
    assert [cell.variant for cell in result.finished] == ["rope"]
    assert "num_kv_heads=2, got 3" in result.failed["mosar-seed0"]


def test_other_data_is_refused(small, dataset, tmp_path):
    out = tmp_path / "e"
    run(small("rope"), out)
    # The same contents elsewhere are the same data.
    moved = shutil.copytree(dataset, tmp_path / "moved")
    assert len(run(small("rope", data=moved), out).finished) == 1
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"Another text {name}. " * 400)
    other = tmp_path / "other"
    prepare([str(tmp_path / "a.txt")], other, valid=[str(tmp_path / "b.txt")])
    before = (out / "experiment.json").read_bytes()
    refused = r"holds an experiment on other data than .*other: .* another --out"
    for variants in (("rope",), ("alibi",)):
        with pytest.raises(TrainingError, match=refused):
            run(small(*variants, data=other), out)
    assert (out / "experiment.json").read_bytes() == before
    # A folder that does not say so is known by its records.
    asked = json.loads(before)
    assert len(asked.pop("data_fingerprint")) == 64
    (out / "experiment.json").write_text(json.dumps(asked))
    with pytest.raises(TrainingError, match=refused):
        run(small("rope", data=other), out)


def test_tasks_as_an_axis_need_no_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = ExperimentSettings(
        preset="retrieval",
        variants=("rope", "mosar"),
        data=Path("nowhere"),
        grid=(Axis.parse("data.task=passkey,recall"),),
        changes=SMALL_TASK,
        lengths=("1x",),
        eval_tokens=256,
    )
    result = run(settings, Path("e"))
    assert len(result.finished) == 4 and not result.failed
    assert [path.name for path in tmp_path.iterdir()] == ["e"]
    asked = json.loads((tmp_path / "e" / "experiment.json").read_text())
    assert asked["data_fingerprint"] is None
    experiment = load_experiment(tmp_path / "e")
    found = {(r.task, r.cell.variant, r.routing) for r in Comparison(experiment).retrievals}
    expected = [("rope", "native"), *(("mosar", r) for r in ("soft", "top1", "sparse"))]
    assert found == {(task, *which) for task in ("passkey", "recall") for which in expected}
    assert experiment.unfinished == []


def test_a_signal_in_the_last_step_of_a_cell_stops_the_experiment(small, tmp_path, monkeypatch):
    real = Learner.update

    def update(self, step, stop=None):
        line = real(self, step, stop)
        if step == STEPS and stop is not None:  # not the steps that the forecast times
            signal.raise_signal(signal.SIGINT)
        return line

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "update", update)
        with pytest.raises(TrainingInterrupted) as caught:
            run_experiment(small("rope", "mosar"), tmp_path / "e", jobs=1, progress=False)
    assert caught.value.exit_code == 130
    assert [path.name for path in (tmp_path / "e" / "cells").iterdir()] == ["rope-seed0"]
    # Its training is complete; the same command goes on with its evaluation.
    assert (
        len(run_experiment(small("rope", "mosar"), tmp_path / "e", jobs=1, progress=False).finished)
        == 2
    )


def test_another_experiment_or_a_damaged_record_in_the_folder(small, tmp_path):
    run(small("rope"), tmp_path / "e")
    changes = {"changes": ("train.steps=7",), "lengths": ("1x",), "eval_tokens": 256}
    for name, value in changes.items():
        with pytest.raises(TrainingError, match=f"holds an experiment with {name}"):
            run(small("rope", **{name: value}), tmp_path / "e")
    path = tmp_path / "e" / "records" / "rope-seed0.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(TrainingError, match=r"rope-seed0.jsonl, line 3: .*or remove it"):
        run(small("rope"), tmp_path / "e")


def command(dataset, out, *more):
    words = [sys.executable, "-m", "mosar.cli", "reproduce", "--preset", "smoke"]
    words += ["--variants", "rope,mosar", "--data", str(dataset), "--out", str(out)]
    words += ["--lengths", "1x,2x", "--eval-tokens", "512", "--jobs", "2", *more]
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


def test_killed_and_gone_on_with(small, dataset, tmp_path):
    """Two cells at a time give what one process gives, and end with their parent."""
    whole, out = tmp_path / "whole", tmp_path / "e"
    run(small("rope", "mosar"), whole)
    # More seeds than it could ever do.
    process = processes.start(command(dataset, out, "--seeds", "100"))
    processes.wait_for((out / "records/rope-seed0.jsonl").exists, process)
    processes.stop(process, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    result = CliRunner().invoke(app, command(dataset, out)[3:])
    assert f"The report: {out / 'report' / 'index.html'}" in result.stdout
    # Other seeds may have begun.
    for read in (without_clock, losses_of):
        found, expected = read(out), read(whole)
        assert {name: found[name] for name in expected} == expected


def test_stopped_side_by_side(dataset, tmp_path):
    """One Ctrl-C saves all cells that run."""
    cells = tmp_path / "e" / "cells"
    many = ("--set", "train.steps=100000", "--set", "train.eval_every=100000")
    process = processes.start(command(dataset, tmp_path / "e", *many))
    both = [cells / f"{variant}-seed0" for variant in ("rope", "mosar")]
    processes.wait_for(lambda: all(any(c.glob("checkpoints/step-*")) for c in both), process)
    _, said = processes.stop(process, signal.SIGINT)
    assert process.returncode == 130 and "stopped and saved; the same command resumes" in said
    assert "2 at a time" in said and "failed" not in said
    for cell in both:
        saved = max(int(p.name[5:]) for p in (cell / "checkpoints").iterdir())
        assert saved == max(line["step"] for line in read_metrics(cell, "train"))
        with locked(cell):
            pass


def test_a_cell_that_fails_side_by_side_does_not_stop_the_other(small, tmp_path):
    settings = small("rope", grid=(Axis.parse("train.learning_rate=0.001,1e30"),))
    result = run_experiment(settings, tmp_path / "e", jobs=2, progress=False)
    (name,) = result.failed
    assert "1e30" in name and "the gradient is nan" in result.failed[name]
    assert (tmp_path / "e" / "failures" / f"{name}.json").exists()
    assert [cell.grid["train.learning_rate"] for cell in result.finished] == ["0.001"]


def test_jobs_follow_from_cores_cells_and_memory(small, monkeypatch):
    settings = small("rope", "mosar", "alibi")
    cells = settings.cells()
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    assert fitting_jobs(settings, cells) == 3 and fitting_jobs(settings, cells[:1]) == 1
    # Threads follow from all cells of the experiment, so that resuming it changes nothing.
    assert default_threads(settings) == 2
    monkeypatch.setattr("mosar.experiments.jobs.available_memory", lambda: 2_000_000_000)
    assert fitting_jobs(settings, cells) == 2 and default_threads(settings) == 2
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2))
    assert default_threads(settings) == 1
    gpu = small("rope", "mosar", changes=(*CHANGES, "train.device=cuda"))
    assert fitting_jobs(gpu, gpu.cells()) == 1 and default_threads(gpu) is None


def test_the_forecast_is_corrected(monkeypatch):
    """Work counts at the speed it was done with, evaluations too; a failed cell says nothing."""
    clock = 0.0
    monkeypatch.setattr("time.monotonic", lambda: clock)
    display = Display(1000, 100.0, enabled=False)
    assert display._left() == "0:01:40"
    clock = 30.0
    assert display._left() == "0:01:40"
    # Five times as slow as it was guessed.
    clock = 250.0
    display.advance(400)
    count_rest(display, 100, "")
    assert display._left() == "0:03:51"
    count_rest(display, 250, "no memory")
    assert display._left() == "0:01:55"


@pytest.mark.parametrize(
    "words, said, code",
    [
        (["--preset", "huge"], "preset must be one of", 2),
        (["--variants", "rope,mosaar"], "did you mean 'mosar'", 2),
        (["--grid", "attention.barrier"], "a grid is written", 2),
        (["--lengths", "2y"], "a length is a multiple", 2),
        (["--lengths", "64x"], "too few for a window of 4096", 2),
        (["--eval-tokens", "9"], "eval_tokens must be at least 256", 2),
        (["--data", "nowhere"], "nowhere", 1),
    ],
)
def test_bad_options(dataset, tmp_path, words, said, code):
    base = ["reproduce", "--preset", "smoke", "--data", str(dataset), "--out", str(tmp_path / "e")]
    result = CliRunner().invoke(app, [*base, *words])
    assert result.exit_code == code, result.output
    text = " ".join(result.output.replace("│", " ").split())
    assert said in text and "Traceback" not in text
    assert not (tmp_path / "e" / "cells").exists()


def test_a_folder_that_another_process_holds_is_one_line(dataset, tmp_path):
    with locked(tmp_path / "e"):
        result = CliRunner().invoke(app, command(dataset, tmp_path / "e")[3:])
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("mosar: error: another process") and "wait for it" in line


def test_one_cell_is_not_cells(dataset, tmp_path, monkeypatch):
    def failing(config, run, **options):
        raise TrainingError("no luck")

    monkeypatch.setattr(experiment_run, "train", failing)
    words = command(dataset, tmp_path / "e")[3:]
    words[words.index("--variants") + 1] = "rope"
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert "\n1 cell to run on " in f"\n{result.stderr}"
    assert result.stderr.splitlines()[-1] == "mosar: error: 1 cell failed; rope-seed0: no luck"


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
    assert duration_text(seconds) == said
