"""`mosar evaluate`: tables, records in a file, one-line errors and their exit codes."""

import re

import pytest
from typer.testing import CliRunner

from mosar.cli import app
from mosar.evaluation.evaluate import evaluate
from mosar.records import read_records

QUICK = ("--lengths", "1x,4x", "--tokens", "512", "--no-progress")


def invoke(*arguments):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def cells(text):
    """The rows of the tables, as lists of cells."""
    lines = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_a_table_and_records(run, tmp_path):
    folder = run()
    result = invoke(folder, *QUICK, "--json", tmp_path / "out.jsonl")
    assert result.exit_code == 0, result.output
    records = read_records(tmp_path / "out.jsonl")
    assert records == evaluate(folder, lengths=("1x", "4x"), tokens=512, progress=False)
    rows = cells(result.stdout)
    assert [row[:2] for row in rows] == [
        [length, routing] for length in ("64", "256") for routing in ("soft", "top1", "sparse")
    ]
    soft = records[0].perplexity
    for row, record in zip(rows, records, strict=True):
        assert row[2] == f"{record.perplexity:.3f}"
        assert row[6:9] == [
            f"{value:.4f}" for value in (record.reach_soft, record.reach_top1, record.density)
        ]
    assert rows[2][5] == f"{100 * (records[2].perplexity / soft - 1):+.2f}"
    assert rows[0][5] == "–"
    assert rows[3][4] == f"{100 * (records[3].perplexity / soft - 1):+.2f}"
    ratio = records[5].seconds / records[4].seconds
    assert f"at 4x sparse takes {ratio:.2f} of the time of top1" in result.stdout


def test_against_another_run_and_details(run):
    mosar, rope = run("mosar"), run("rope")
    result = invoke(mosar, *QUICK, "--against", rope, "--details", "--routing", "soft,sparse")
    assert result.exit_code == 0, result.output
    rows = cells(result.stdout)
    ours = evaluate(
        mosar, lengths=("1x", "4x"), routings=["soft", "sparse"], tokens=512, progress=False
    )
    theirs = evaluate(rope, lengths=("1x", "4x"), tokens=512, progress=False)
    assert "Δ rope-seed0" in result.stdout
    for row, record, base in zip(rows, ours, [theirs[0]] * 2 + [theirs[1]] * 2, strict=False):
        assert row[5] == f"{100 * (record.perplexity / base.perplexity - 1):+.2f}"
    assert "perplexity by position at length 256" in result.stdout
    assert "layers at length 64, sparse" in result.stdout
    assert re.search(r"0–31", result.stdout)


def test_against_another_run_at_a_step(run):
    mosar, rope = run("mosar"), run("rope")
    result = invoke(mosar, *QUICK, "--against", rope, "--step", 3, "--routing", "soft")
    assert result.exit_code == 0, result.output
    asked = {"lengths": ("1x", "4x"), "tokens": 512, "progress": False}
    ours = evaluate(mosar, routings=["soft"], step=3, **asked)
    theirs, last = (evaluate(rope, step=step, **asked) for step in (3, 6))
    assert [record.loss for record in theirs] != [record.loss for record in last]
    for row, record, base in zip(cells(result.stdout), ours, theirs, strict=True):
        assert row[5] == f"{100 * (record.perplexity / base.perplexity - 1):+.2f}"


def test_against_a_run_without_that_step(run):
    mosar, rope = run("mosar"), run("rope", "train.checkpoint_every=6")
    result = invoke(mosar, *QUICK, "--against", rope, "--step", 3)
    assert result.exit_code == 1
    assert f"{rope} has no checkpoint of step 3; there are 6" in result.stderr
    assert not (mosar / "evaluations").exists()


def test_a_run_of_a_task(run, task_run):
    task = task_run("recall", "rope")
    result = invoke(task, "--tokens", 512, "--no-progress")
    assert result.exit_code == 0, result.output
    assert "recall, accuracy % by distance (guessing: 12.5)" in result.stdout
    assert [row[:2] for row in cells(result.stdout)] == [
        [length, "native"] for length in ("64", "128", "256")
    ]
    for one, other in ((run("rope"), task), (task, run("alibi"))):
        result = invoke(one, *QUICK, "--against", other)
        assert result.exit_code == 2
        assert "learnt the task recall" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (("--step", 5), 1, "no checkpoint of step 5; there are 3, 6"),
        (("--lengths", "64x"), 1, "too few for a window of 4096"),
        (("--data", "nowhere"), 1, "there is no dataset nowhere"),
        (("--against", "nowhere"), 1, "there is no run folder nowhere"),
        (("--lengths", "long"), 2, "a length is a multiple of the training length 64"),
        (("--routing", "hard"), 2, "routing must be one of soft, top1, sparse; got 'hard'"),
        (("--tokens", 10), 2, "tokens must be at least 256"),
        (("--tokens", 0), 2, "--tokens"),
        (("--json", "no/where.jsonl"), 1, "its folder does not exist"),
    ],
)
def test_bad_input_is_one_line(run, monkeypatch, tmp_path, arguments, code, part):
    folder = run()
    monkeypatch.chdir(tmp_path)
    result = invoke(folder, *QUICK, *arguments)
    assert result.exit_code == code
    text = " ".join(re.sub(r"[│╭╰─╮╯]", " ", result.stderr).split())
    assert part in text and "Traceback" not in text
    if code == 1:
        assert len(result.stderr.splitlines()) == 1
    assert not (folder / "evaluations").exists()
