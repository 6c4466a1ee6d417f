"""What goes wrong in a newcomer's first hour: one line each, and nothing harmed."""

import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from mosar.cli import app
from mosar.training.learner import Learner
from training.runs import losses, steps


def mosar(*words):
    return CliRunner().invoke(app, [*map(str, words)])


@pytest.mark.parametrize("variant", ["rope", "mosar"])
def test_a_run_that_diverges_says_at_which_step(dataset, tmp_path, variant):
    line = failed(
        *("train", "--variant", variant, "--preset", "smoke", "--data", dataset, "--no-progress"),
        *("--out", tmp_path / "run", "--set", "train.learning_rate=1e4"),
        *("--set", "train.grad_clip=null"),
    )
    assert line.startswith("mosar: error: step ") and "the run stopped" in line


def test_folders_of_others_are_left_alone(dataset, tmp_path):
    (tmp_path / "notes.md").write_text("mine")
    words = ("--preset", "smoke", "--data", dataset, "--out", tmp_path)
    for command in (("train",), ("reproduce", "--variants", "rope")):
        result = mosar(*command, *words)
        assert result.exit_code == 1
        (line,) = result.stderr.splitlines()
        assert "notes.md" in line and "give another --out" in line
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == ["notes.md"]


def test_an_experiment_does_not_take_over_a_run(dataset, tmp_path):
    out = tmp_path / "run"
    words = ("--preset", "smoke", "--data", dataset, "--out", out, "--set", "train.steps=2")
    assert mosar("train", *words, "--no-progress").exit_code == 0
    before = sorted(out.rglob("*"))
    result = mosar("reproduce", "--variants", "rope", *words)
    assert result.exit_code == 1
    assert f"{out} holds a run; give another --out" in result.stderr
    assert sorted(out.rglob("*")) == before
    again = mosar("train", "--out", out)
    assert "finished already, at step 2" in again.stderr


def failed(*words):
    """The one line of a command that failed."""
    result = mosar(*words)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    line = result.stderr.splitlines()[-1]
    assert line.startswith("mosar: error: ")
    return line


@pytest.mark.parametrize(
    "key",
    [
        *("model.hidden_size", "model.vocab_size", "model.head_dim"),
        *("model.ffn_size", "attention.router_hidden"),
    ],
)
def test_a_model_larger_than_the_memory_is_refused_by_name(dataset, tmp_path, key):
    words = ("train", "--preset", "smoke", "--data", dataset, "--out", tmp_path / "run")
    line = failed(*words, "--set", f"{key}=999999999998")
    assert f"{key}=999999999998" in line and "GB of memory, and this machine has" in line
    assert not (tmp_path / "run").exists()


def test_more_routing_groups_than_heads_are_refused_by_name(dataset, tmp_path):
    words = ["train", "--preset", "smoke", "--data", str(dataset), "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, [*words, "--set", "attention.routing_groups=999999999999"])
    assert result.exit_code == 2
    assert "num_kv_heads=2, got 999999999999" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_that_never_made_a_step_does_not_keep_its_folder(dataset, tmp_path, monkeypatch):
    out = tmp_path / "run"
    words = ("train", "--preset", "smoke", "--data", dataset, "--out", out, "--no-progress")
    words = (*words, "--set", "train.steps=2")

    def no_memory(*arguments, **options):
        raise MemoryError

    # While the model is built, and in the first step.
    for place in ("build", "update"):
        monkeypatch.setattr(Learner, place, no_memory)
        line = failed(*words, "--variant", "rope")
        assert "out of memory; no checkpoint is lost; a smaller train.micro_batch" in line
        assert (out / "config.json").exists() == (place == "update")
        monkeypatch.undo()
    for option in ((), ("--no-resume",)):
        assert mosar(*words, "--variant", "alibi", *option).exit_code == (1 if option else 0)
    assert json.loads((out / "config.json").read_text())["variant"] == "alibi"
    assert steps(out) == [2] and len(losses(out)) == 2
    assert "holds a run of another configuration" in failed(*words, "--variant", "rope")


def test_the_configuration_of_others_is_not_taken_for_a_run(dataset, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    words = ("train", "--preset", "smoke", "--data", dataset, "--out", tmp_path)
    assert "is not a run's configuration" in failed(*words)
    assert (tmp_path / "config.json").read_text() == '{"model_type": "llama"}'


def test_a_mistyped_folder_starts_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = failed("train", "--out", "runs/typo", "--set", "train.steps=60")
    assert "there is no run in runs/typo to resume; start one with" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["train", "reproduce", "consolidate", "export", "import"])
def test_a_place_that_cannot_be_a_folder(dataset, tmp_path, trained, exported, command):
    (tmp_path / "file").write_text("mine")
    words = {
        "train": ("train", "--preset", "smoke", "--data", dataset),
        "reproduce": ("reproduce", "--preset", "smoke", "--data", dataset, "--variants", "rope"),
        "consolidate": ("consolidate", trained),
        "export": ("export", trained),
        "import": ("import", exported),
    }[command]
    for out, why in (
        (tmp_path / "file", "a file|already exists"),
        (tmp_path / "file" / "below", "a file is in the place of a folder; give another --out"),
        ("/proc/x", r"/proc/x: the folder cannot be made \(No such file or directory\); give"),
    ):
        assert re.search(why, failed(*words, "--out", out))
    assert (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    words = ("train", "--preset", "smoke", "--data", dataset, "--out", out, "--no-progress")
    assert mosar(*words, "--set", "train.steps=2").exit_code == 0
    words = ("evaluate", out, "--lengths", "1x", "--tokens", "256", "--no-progress")
    assert mosar(*words).exit_code == 0
    return out


@pytest.fixture(scope="module")
def exported(trained):
    out = trained.with_name("exported")
    assert mosar("export", trained, "--out", out).exit_code == 0
    return out


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("run/config.json", "train --out run"),
        ("run/config.json", "evaluate run"),
        ("run/config.json", "generate run --prompt a"),
        ("run/metrics.jsonl", "train --out run"),
        ("run/metrics.jsonl", "export run --out new"),
        ("run/checkpoints/step-00000002/state.json", "train --out run"),
        ("run/checkpoints/step-00000002/state.json", "evaluate run"),
        ("run/evaluations/step-00000002-len-00064-soft.json", "report run"),
        ("exported/config.json", "generate exported --prompt a"),
        ("exported/config.json", "import exported --out new"),
        ("exported/checksums.json", "import exported --out new"),
        ("exported/generation_config.json", "import exported --out new"),
        ("data/manifest.json", "train --preset smoke --data data --out new"),
        ("lines.jsonl", "prepare lines.jsonl --out new"),
        ("records/a.jsonl", "report ."),
        ("experiment.json", "report ."),
        ("experiment.json", "reproduce --preset smoke --variants rope --data data --out ."),
        ("geometry.json", "figure decay-kernels --config geometry.json --out a.png"),
    ],
)
def test_json_nested_deeply_is_an_error_of_one_line(
    dataset, trained, exported, tmp_path, monkeypatch, file, command
):
    monkeypatch.chdir(tmp_path)
    for source, name in ((trained, "run"), (exported, "exported"), (dataset, "data")):
        if name in (file + command).replace("/", " ").split() or name == "data":
            shutil.copytree(source, tmp_path / name)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(DEEP + "\n")
    line = failed(*command.split())
    assert len(line) < 1000 and "Error" not in line
    assert not (tmp_path / "new").exists()
