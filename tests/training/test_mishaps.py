"""What goes wrong in a newcomer's first hour: one line each, and nothing harmed."""

import pytest
from typer.testing import CliRunner

from mosar.cli import app


def mosar(*words):
    return CliRunner().invoke(app, [*map(str, words)])


@pytest.mark.parametrize("variant", ["rope", "mosar"])
def test_a_run_that_diverges_says_at_which_step(dataset, tmp_path, variant):
    result = mosar(
        *("train", "--variant", variant, "--preset", "smoke", "--data", dataset, "--no-progress"),
        *("--out", tmp_path / "run", "--set", "train.learning_rate=1e4"),
        *("--set", "train.grad_clip=null"),
    )
    assert result.exit_code == 1, result.output
    line = result.stderr.splitlines()[-1]
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
