"""A run folder evaluated: what it leaves, what it uses again, and what it refuses."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from mosar.errors import ModelError, MosarError
from mosar.evaluation import evaluate as evaluate_module
from mosar.evaluation.evaluate import evaluate
from mosar.evaluation.loaded_run import _device
from mosar.records import Cell, read_records

QUICK = {"lengths": ("1x", "2x"), "tokens": 512, "progress": False}


@pytest.fixture
def counted(monkeypatch):
    """The lengths that were really computed."""
    lengths = []
    real = evaluate_module.evaluate_length

    def spy(loaded, text, length, *rest, **options):
        lengths.append(length)
        return real(loaded, text, length, *rest, **options)

    monkeypatch.setattr(evaluate_module, "evaluate_length", spy)
    return lengths


def untimed(records):
    return [replace(record, seconds=0.0, created="", environment={}) for record in records]


def test_records_are_left_in_the_run_folder(run):
    folder = run()
    records = evaluate(folder, **QUICK)
    names = {
        f"step-00000006-len-{n:05d}-{r}.json" for n in (64, 128) for r in ("soft", "top1", "sparse")
    }
    assert {path.name for path in (folder / "evaluations").iterdir()} == names
    assert [(record.length, record.routing) for record in records] == [
        (length, routing) for length in (64, 128) for routing in ("soft", "top1", "sparse")
    ]
    for record in records:
        name = f"step-00000006-len-{record.length:05d}-{record.routing}.json"
        assert read_records(folder / "evaluations" / name) == [record]


def test_what_is_there_is_used_again(run, counted):
    folder = run()
    first = evaluate(folder, **QUICK)
    assert counted == [64, 128]
    assert evaluate(folder, **QUICK) == first
    assert evaluate(folder, **QUICK | {"routings": ["sparse"]}) == [first[2], first[5]]
    assert counted == [64, 128]
    again = evaluate(folder, **QUICK, force=True)
    assert counted == [64, 128] * 2
    assert untimed(again) == untimed(first)


def test_other_text_and_another_checkpoint_are_computed(run, counted):
    folder = run("rope")
    evaluate(folder, **QUICK)
    for changes in ({"tokens": 640}, {"step": 3}, {"lengths": ("1x", "4x")}):
        counted.clear()
        evaluate(folder, **QUICK | changes)
        # Blocks of another length are another text, for every length.
        assert counted == [64, 256 if "lengths" in changes else 128]
    assert (folder / "evaluations" / "step-00000003-len-00064-native.json").exists()


def test_a_run_trained_on_is_computed_again(run, counted, trained):
    """The same step of other parameters: a run that was made again in the same folder."""
    folder = run("rope")
    evaluate(folder, **QUICK)
    other = trained("rope", "train.seed=1")
    shutil.rmtree(folder / "checkpoints")
    shutil.copytree(other / "checkpoints", folder / "checkpoints")
    shutil.copy(other / "config.json", folder / "config.json")
    counted.clear()
    (record, _) = evaluate(folder, **QUICK)
    assert counted == [64, 128] and record.cell.seed == 1


def test_modes_have_records_of_their_own(run):
    folder = run("rope")
    trained = evaluate(folder, **QUICK)
    records = evaluate(folder, **QUICK, modes=["yarn", "pi"])
    found = {(record.length, record.routing): record.loss for record in records}
    assert list(found) == [(length, mode) for length in (64, 128) for mode in ("pi", "yarn")]
    # At the training length nothing is rescaled; beyond it everything is.
    assert found[64, "pi"] == found[64, "yarn"] == trained[0].loss
    assert len({found[128, "pi"], found[128, "yarn"], trained[1].loss}) == 3
    assert evaluate(folder, **QUICK)[1].loss == trained[1].loss
    both = evaluate(folder, **QUICK, routings=["native"], modes=["pi"])
    assert [record.routing for record in both] == ["native", "pi"] * 2
    with pytest.raises(ValueError, match=r"mode must be one of pi, ntk, .*; got 'acp'"):
        evaluate(folder, **QUICK, modes=["acp"])


def test_a_mode_that_prunes_has_a_density(run):
    records = evaluate(run("fox"), **QUICK, routings=["native"], modes=["acp"])
    dense, pruned = records[2:]
    # Gates of a half leave e^-10 after (10 + ln 128) / ln 2 = 21 tokens: 0.3 of the pairs.
    assert dense.density == 1 and 0.27 < pruned.density < 0.35
    assert pruned.loss == pytest.approx(dense.loss, abs=1e-4)


def test_modes_that_choose_pairs_have_a_density(run):
    records = evaluate(run("rope"), **QUICK, modes=["streaming", "minference", "flexprefill"])
    streaming, *estimated = records[3:]
    # 4 sinks and 12 tokens of the smoke preset's 64, at 128.
    assert streaming.density == pytest.approx((16 * 17 / 2 + 112 * 16) / (128 * 129 / 2))
    assert all(0.1 < record.density < 0.95 for record in estimated)
    assert all(record.perplexity < 2 * streaming.perplexity for record in estimated)


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 99}', "altered"])
def test_a_damaged_or_altered_record_is_made_again_and_said(run, counted, content, capfd):
    folder = run("rope")
    first = evaluate(folder, **QUICK)
    path = folder / "evaluations" / "step-00000006-len-00128-native.json"
    values = json.loads(path.read_text())
    altered = json.dumps(values | {"loss": values["loss"] - 1}) + "\n"
    path.write_text(altered if content == "altered" else content)
    counted.clear()
    assert untimed(evaluate(folder, **QUICK)) == untimed(first)
    assert counted == [128]
    assert f"{path} is damaged or was altered; computing it again" in capfd.readouterr().err
    assert untimed(read_records(path)) == untimed(first[1:])


def test_an_interrupted_write_leaves_the_old_one(run, monkeypatch):
    folder = run("rope")
    (first, _) = evaluate(folder, **QUICK)
    monkeypatch.setattr("mosar.training.checkpoints.os.replace", _fail)
    with pytest.raises(ModelError, match=r"cannot write .*No space left"):
        evaluate(folder, **QUICK, force=True)
    monkeypatch.undo()
    kept = folder / "evaluations" / "step-00000006-len-00064-native.json"
    assert read_records(kept) == [first]
    assert len(list((folder / "evaluations").iterdir())) == 2


def _fail(*_):
    raise OSError(28, "No space left on device")


def test_a_cell_may_be_given(run, counted):
    folder = run("rope")
    cell = Cell(variant="rope", preset="smoke", seed=7, grid={"attention.barrier": 4})
    records = evaluate(folder, **QUICK, cell=cell)
    assert {record.cell.name for record in records} == {"rope-seed7-attention.barrier=4"}
    # Who asks decides, not who asked first.
    assert evaluate(folder, **QUICK)[0].cell == Cell(variant="rope", preset="smoke", seed=0)
    assert counted == [64, 128]


def test_a_moved_run_evaluates(run, dataset, tmp_path):
    folder = run()
    here = evaluate(folder, **QUICK)
    moved = tmp_path / "another machine" / "run"
    moved.parent.mkdir()
    shutil.move(folder, moved)
    shutil.rmtree(moved / "evaluations")
    config = json.loads((moved / "config.json").read_text())
    config["data"]["folder"] = "/where/it/was"
    (moved / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="no longer in /where/it/was; give its path with --data"):
        evaluate(moved, **QUICK)
    data = shutil.copytree(dataset, tmp_path / "another machine" / "data")
    assert untimed(evaluate(moved, **QUICK, data=data)) == untimed(here)


def test_a_run_folder_of_before_tasks_evaluates(run):
    """Configurations without data.task are those of text, and their checkpoints fit."""
    folder = run()
    new = evaluate(folder, **QUICK)
    config = json.loads((folder / "config.json").read_text())
    assert config["data"].pop("task") == "text"
    (folder / "config.json").write_text(json.dumps(config))
    assert untimed(evaluate(folder, **QUICK, force=True)) == untimed(new)


def test_evaluation_leaves_the_training_as_it_was(run):
    folder = run()
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    evaluate(folder, **QUICK)
    assert {p: p.read_bytes() for p in before} == before


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: shutil.rmtree(f), "there is no run folder"),
        (lambda f: (f / "config.json").unlink(), "is not a run folder: it has no config.json"),
        (lambda f: (f / "config.json").write_text("{}"), "not a run's configuration: its schema"),
        (lambda f: (f / "config.json").write_text("[1]"), "is not a run's configuration"),
        (
            lambda f: shutil.rmtree(f / "checkpoints"),
            "has no checkpoint yet; resume with: mosar tr",
        ),
        (
            lambda f: (f / "checkpoints/step-00000006/model.safetensors").write_bytes(b"x"),
            r"step 6 in .* is damaged \(model.safetensors was .*; others are there for --step: 3",
        ),
        (
            lambda f: [p.write_bytes(b"x") for p in f.glob("checkpoints/*/model.safetensors")],
            r"step 6 in .* is damaged \(model.safetensors was .*; no other one is complete",
        ),
        (
            lambda f: (f / "checkpoints/step-00000006/state.json").unlink(),
            r"step 6 in .* is damaged \(state.json is missing\)",
        ),
    ],
)
def test_what_is_wrong_with_the_run_is_said(run, spoil, message):
    folder = run("rope")
    spoil(folder)
    with pytest.raises(MosarError, match=message) as caught:
        evaluate(folder, **QUICK)
    assert "\n" not in str(caught.value)
    assert not (folder / "evaluations").exists()


def test_a_checkpoint_of_another_configuration_is_refused(run):
    folder = run("rope")
    config = json.loads((folder / "config.json").read_text())
    config["attention"]["rope_theta"] = 500.0
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="does not belong to the configuration in"):
        evaluate(folder, **QUICK)


@pytest.mark.parametrize("name", ["cpu", "cuda:63", "mps:9", "xpu:77"])
def test_a_device_that_is_not_there_becomes_the_cpu(name):
    assert _device(name) == torch.device("cpu")
