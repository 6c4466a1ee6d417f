"""`mosar plan`: its output, its files, and one line where something does not fit."""

import json

import pytest
from typer.testing import CliRunner

from mosar.cli import app
from mosar.cli.plan import _PACKAGED
from mosar.geometries import PAPER_VARIANTS, VARIANTS, HeadShape
from mosar.planning.density import packaged_curves
from mosar.planning.lines import BASES, brief, say


def run(*arguments):
    return CliRunner().invoke(
        app, ["plan", *map(str, arguments)], env={"COLUMNS": "160"}, terminal_width=160
    )


def as_json(*arguments):
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_every_line_says_what_it_rests_on():
    result = run("--preset", "paper", "--context", 8192, "--gpus", 64)
    assert result.exit_code == 0, result.output
    assert "mesh: 64 ranks = data 64 x shard 1 x tensor 1" in result.stdout
    assert "802,801,772" in result.stdout
    plan = as_json("--preset", "paper", "--context", 8192, "--gpus", 64)
    assert {line["basis"] for line in plan["lines"]} <= set(BASES)
    assert all(line["how"] for line in plan["lines"])
    for line in plan["lines"]:
        assert line["name"][:12] in result.stdout
    assert all(meaning in result.stdout for meaning in BASES.values())


def test_the_mesh_is_chosen_by_memory():
    roomy = as_json("--preset", "paper", "--gpus", 8, "--memory", 80)
    tight = as_json("--preset", "paper", "--gpus", 8, "--memory", 6)
    assert roomy["mesh"] == {"data": 8, "shard": 1, "tensor": 1}
    assert tight["mesh"]["shard"] > 1
    assert run("--preset", "paper", "--memory", 1).stdout.count("Note: No such mesh fits") == 1


@pytest.mark.parametrize(
    "variant", [*PAPER_VARIANTS, "mosar-hard", "mosar-plus", "switch", "gemma3", "dsa", "reformer"]
)
def test_every_kind_of_variant_has_a_plan(variant):
    plan = as_json("--preset", "small", "--variant", variant)
    (density,) = [x for x in plan["lines"] if x["name"] == "support density"]
    if variant in ("mosar-hard", "mosar-plus", "switch"):
        assert density["basis"] == "modelled" and density["value"] == 100
    elif variant.startswith("mosar"):
        assert density["basis"] == "measured" and 0 < density["value"] < 50
    else:
        assert density["basis"] == "exact"
        geometry = VARIANTS[variant].build(HeadShape(4, 2, 64, 512, hidden_size=256))
        sparse = geometry.count_pairs((1, 512), routing="sparse") is not None
        assert (density["value"] < 100) == sparse
    assert [cost["context"] for cost in plan["attention_by_context"]][:2] == [256, 512]


def test_settings_of_a_run_count():
    fp32, bf16 = (
        as_json("--preset", "small", "--set", f"train.precision={p}") for p in ("fp32", "bf16")
    )
    cache = [x["value"] for p in (fp32, bf16) for x in p["lines"] if x["name"] == "every key"]
    assert cache[1] < 0.6 * cache[0]
    assert as_json("--preset", "paper")["config"]["train"]["precision"] == "bf16"
    meshed = as_json("--preset", "small", "--set", "distributed.tensor=2")
    assert meshed["mesh"] == {"data": 1, "shard": 1, "tensor": 2}


def test_files(tmp_path):
    result = run(
        *("--preset", "small", "--json", tmp_path / "a.json", "--plot", tmp_path / "a.png")
    )
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "a.json").read_text())["kind"] == "plan"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.png"]


def test_density_of_records_and_of_numbers(tmp_path, request):
    records = request.config.rootpath / "results" / "small"
    ours, packaged = (
        as_json("--preset", "small", "--density", source) for source in (records, "small")
    )
    curves = [[c["density"] for c in p["attention_by_context"][:7]] for p in (ours, packaged)]
    assert curves[0] == pytest.approx(curves[1], abs=1e-6)
    stated = as_json("--preset", "small", "--density", 0.5)
    assert {cost["density"] for cost in stated["attention_by_context"]} == {0.5}


def test_the_sources_of_density_that_the_help_names():
    assert set(_PACKAGED) == {name.split("/")[0] for name in packaged_curves()}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpus", 6, "--tensor", 4), "--tensor 4 must multiply to --gpus 6, or divide it, got 4"),
        (("--gpus", 3, "--tensor", 3), "--tensor 3 must divide model.num_heads=8"),
        (("--gpus", 4, "--data", 4, "--windows", 6), "--windows must be a multiple of"),
        (("--density", "nowhere"), "--density must be paper, small, a number, or a folder"),
        (("--density", ""), "--density must be paper, small, a number, or a folder"),
        (("--density", "1.5"), "--density must be a share in (0, 1], got 1.5"),
        (("--variant", "rope", "--density", "small"), "rope has no routers"),
        (
            ("--variant", "rope", "--set", "attention.geometry=mosar"),
            "no density curve of rope with attention.geometry=mosar; give --density a number",
        ),
        (("--plot", "a.gif"), "--plot must end in one of .png, .svg, .pdf"),
    ],
)
def test_what_does_not_fit_is_one_line(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("mosar: error: ") and said in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--preset", "papr"), "paper"),
        (("--variant", "mosra"), "mosar"),
        (("--set", "train.stpes=3"), "train.steps"),
        (("--gpus", 0), "--gpus"),
    ],
)
def test_wrong_names_are_wrong_usage(arguments, said):
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_folder_without_such_records(tmp_path):
    result = run("--density", tmp_path)
    assert result.exit_code == 1
    assert "no evaluation of mosar under sparse routing" in result.stderr
    (tmp_path / "a.jsonl").write_text("{}\n")
    result = run("--density", tmp_path)
    assert result.exit_code == 1 and "a.jsonl" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        *((1023, "B", "1,023 B"), (1536, "B", "1.50 KiB"), (3 * 2**40, "B", "3.00 TiB")),
        *((2.5e9, "FLOP", "2.50 GFLOP"), (12.345, "%", "12.35 %"), (1234, "", "1,234")),
    ],
)
def test_numbers_are_said_in_units(value, unit, text):
    assert say(value, unit) == text
    assert (brief(12.34 * 2**30, "B"), brief(604.05e6, "FLOP")) == ("12.3 GiB", "604 MFLOP")
    assert (brief(4.7, "%"), brief(34.12, "%")) == ("4.70 %", "34.1 %")


def test_a_narrow_terminal_shows_every_column():
    result = CliRunner().invoke(app, ["plan", "--context", "8192"], env={"COLUMNS": "80"})
    lines = result.stdout.splitlines()
    heads = [
        i for i, line in enumerate(lines) if line.startswith("attention of a token, forward: ")
    ]
    assert [lines[i].rpartition(" ")[2] for i in heads] == ["paper/mosar", "small/mosar"]
    for i in heads:
        assert lines[i + 1].split() == [
            *("context", "all", "pairs", "support", "density", "basis", "part", "cache"),
            *("all", "keys"),
        ]
        assert all("modelled" in line and "…" not in line for line in lines[i + 2 : i + 9])


def test_density_of_a_run_that_was_evaluated(request, tmp_path):
    """What `mosar evaluate` and `mosar reproduce` leave behind, each where it lies."""
    records = request.config.rootpath / "results" / "small" / "records" / "mosar-seed0.jsonl"
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    run, experiment = tmp_path / "run", tmp_path / "experiment"
    (run / "evaluations").mkdir(parents=True)
    (experiment / "records").mkdir(parents=True)
    (experiment / "cells" / "mosar-seed0").mkdir(parents=True)
    (experiment / "records" / records.name).write_text(records.read_text())
    for folder in (run, experiment / "cells" / "mosar-seed0"):
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (config,) = [line["config"] for line in lines if line["kind"] == "training"]
    (run / "config.json").write_text(
        json.dumps({"schema": 1, "environment": {}, "data_fingerprint": "", **config})
    )
    for number, line in enumerate(line for line in lines if line["kind"] == "evaluation"):
        (run / "evaluations" / f"{number}.json").write_text(json.dumps(line) + "\n")
        line["step"] -= 1
        # An older step, of another density, does not count.
        older = json.dumps(line | {"density": 0.9})
        (run / "evaluations" / f"{number}-older.json").write_text(older + "\n")
    plans = [
        as_json("--preset", "small", "--density", folder)
        for folder in (run, run / "evaluations", experiment)
    ]
    densities = [
        [(cost["density"], cost["basis"]) for cost in plan["attention_by_context"]]
        for plan in plans
    ]
    assert densities[0] == densities[1] == densities[2]
    assert [basis for _, basis in densities[0]][1:4] == ["measured"] * 3
    assert densities[0][1][0] < 0.2
