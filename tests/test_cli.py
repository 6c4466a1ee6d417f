"""The command line: what it writes, its exit codes, and that nothing is left half-written."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import mosar
from mosar import MoSARConfig, Regime, __version__
from mosar.cli import app
from mosar.data.prepare import prepare
from mosar.geometries import VARIANTS
from mosar.lazy import install_line
from mosar.training.presets import PRESETS


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def draw(*arguments):
    return run("figure", "decay-kernels", *arguments)


def test_version():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"mosar {__version__}\n")


def commands(group=None, path=()):
    """Every command and group of commands, as the words that call it."""
    group = typer.main.get_command(app) if group is None else group
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


def test_help_is_complete_and_loads_no_heavy_module():
    """In 80 columns every command shows examples, each on one line, and no summary is cut off."""
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from mosar.cli import app\n"
        f"for command in {list(commands())}:\n"
        "    result = CliRunner().invoke(app, [*command, '--help'], env={'COLUMNS': '80'})\n"
        "    assert result.exit_code == 0, result.output\n"
        "    lines = result.stdout.splitlines()\n"
        "    assert 'Example: mosar ' in result.stdout, command\n"
        "    after = [b for a, b in zip(lines, lines[1:]) if a.startswith('  Example: ')]\n"
        "    assert not any(after), result.stdout\n"
        "    assert not any(line.endswith('...') for line in lines[1:]), result.stdout\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'transformers', 'tokenizers', 'datasets'}\n"
        "assert not heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


MISTYPED = (
    "evaluate TYPO",
    "report TYPO",
    "generate TYPO --prompt a",
    "look TYPO --text TYPO",
    "export TYPO --out out",
    "import TYPO --out out",
    "consolidate TYPO --out out",
    "train --data TYPO --out out",
    "train --out TYPO",
    "train --variant mosar --out TYPO",
    "train --variant TYPO --out out",
    "train --preset TYPO --out out",
    "reproduce --data TYPO --out out",
    "reproduce --variants TYPO --out out",
    "plan --preset TYPO",
    "plan --json TYPO/plan.json",
    "plan --density TYPO",
    "variants --preset TYPO",
    "retrofit ./TYPO --out out",
    "retrofit model --data TYPO --out out",
    "retrofit model --start-from TYPO --out out",
    "retrofit model --config TYPO --out out",
    "bench attention --json TYPO/a.jsonl",
    "bench decode --config TYPO",
    "bench decode --labels TYPO.npz",
    "figure decay-kernels --out TYPO/a.png",
    "prepare TYPO --out out",
    "prepare --check TYPO",
)


def test_mistyped_names_are_answered_before_heavy_imports(tmp_path):
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from mosar.cli import app\n"
        f"for command in {MISTYPED}:\n"
        "    result = CliRunner().invoke(app, command.split(), env={'COLUMNS': '500'})\n"
        "    assert result.exit_code in (1, 2), (command, result.output)\n"
        "    assert 'TYPO' in result.stderr.splitlines()[-1] or 'data/stdlib' in result.stderr\n"
        "    assert len(result.stderr.splitlines()) == 1 or result.exit_code == 2, result.stderr\n"
        "    assert not {'torch', 'matplotlib', 'transformers'} & set(sys.modules), command\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


def test_help_names_every_variant_and_preset():
    for command in ("train", "plan", "reproduce"):
        # Lines may break inside of a name.
        text = "".join(run(command, "--help").stdout.split())
        assert all(name in text for name in (*VARIANTS, *PRESETS)), command


@pytest.mark.parametrize(
    "words",
    [
        "train --data DATA --out run --preset smoke --set train.precision=bf16 --set train.steps=1",
        "bench attention --lengths 32 --shapes 2x1x8 --memory 32 --competitors ours --seconds 0.01",
    ],
    ids=["train in bfloat16", "bench with memory"],
)
def test_code_in_the_working_directory_is_not_run(tmp_path, words):
    """Commands that start a process of their own do so without the folder they are used in."""
    for name in ("torch", "numpy", "json", "mosar", "safetensors"):
        (tmp_path / f"{name}.py").write_text(f"open('{tmp_path / 'ran'}', 'a').write('{name}')")
    corpus = Path(__file__).parent / "training" / "corpus"
    prepare([str(corpus / "train.jsonl")], tmp_path / "data", valid=[str(corpus / "valid.jsonl")])
    # -P is what the installed command does; `python -m` itself would take the folder.
    command = [sys.executable, "-P", "-m", "mosar", *words.replace("DATA", "data").split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "memory failed" not in done.stdout + done.stderr
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


def test_every_python_process_is_started_without_the_working_directory():
    source = Path(mosar.__file__).parent
    started = [
        line
        for path in source.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if "sys.executable" in line
    ]
    assert started and all('sys.executable, "-P"' in line for line in started), started


@pytest.mark.parametrize(
    ("name", "magic"),
    [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF"), ("A.PNG", b"\x89PNG")],
)
def test_decay_kernels_by_suffix(tmp_path, name, magic):
    result = draw("--out", tmp_path / name, "--length", 64)
    assert (result.exit_code, result.output) == (0, "")
    assert (tmp_path / name).read_bytes().startswith(magic)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_decay_kernels_takes_a_config_and_options(tmp_path):
    config = MoSARConfig(regimes=(Regime("near", 10, 0.5), Regime("all", 50, 1.0)))
    (tmp_path / "config.json").write_text(config.to_json())
    out = tmp_path / "a.svg"
    result = draw(
        *("--out", out, "--config", tmp_path / "config.json", "--barrier", 3),
        *("--exponent", 1, "--composition", "max", "--max-distance", 80),
    )
    assert result.exit_code == 0
    svg = out.read_text()
    assert all(f'id="gate-{name}"' in svg for name in ("near–near", "near–all", "all–all"))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "--out"),
        (("--out", "a.png", "--length", 0), "--length"),
        (("--out", "a.png", "--max-distance", 0), "--max-distance"),
        (("--out", "a.png", "--barrier", -1), "barrier must be a finite number > 0, got -1.0"),
        (("--out", "a.png", "--composition", "sum"), "composition must be one of"),
        (("--out", "a.png", "--length", 64, "--config", "c.json"), "--length and --config"),
        (("--out", "a.png", "--colour", "red"), "--colour"),
    ],
)
def test_wrong_usage_exits_2(tmp_path, monkeypatch, arguments, part):
    monkeypatch.chdir(tmp_path)
    result = draw(*arguments)
    assert result.exit_code == 2
    assert part in result.stderr
    assert not list(tmp_path.iterdir())


def test_unknown_command_exits_2():
    assert run("draw").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "config", "parts"),
    [
        (("--out", "a.gif"), None, ("must end in one of .png, .svg, .pdf, got 'a.gif'",)),
        (("--out", "missing/a.png"), None, ("cannot write missing/a.png: its folder",)),
        (("--out", "taken.png"), None, ("cannot write taken.png",)),
        (("--config", "no.json"), None, ("cannot read no.json: No such file",)),
        ((), "{", ("c.json", "must be valid JSON")),
        ((), "[]", ("c.json", "must be a JSON object")),
        ((), '{"reach": 5}', ("c.json", "unknown fields of MoSARConfig: ['reach']")),
        ((), '{"barrier": 0}', ("c.json", "barrier must be a finite number > 0, got 0")),
    ],
)
def test_failures_are_one_line_and_leave_nothing(tmp_path, monkeypatch, arguments, config, parts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.png").mkdir()
    (tmp_path / "c.json").write_text(config or MoSARConfig().to_json())
    result = draw("--out", "a.png", "--config", "c.json", *arguments)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("mosar: error: ") and all(part in line for part in parts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.json", "taken.png"]
    assert not list((tmp_path / "taken.png").iterdir())


def test_missing_matplotlib_names_the_extra(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("matplotlib", "mosar.report"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = draw("--out", tmp_path / "a.png")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.endswith(f"matplotlib, which is not installed: {install_line('report')}")
    assert install_line("report").startswith('pip install "matplotlib>=')
