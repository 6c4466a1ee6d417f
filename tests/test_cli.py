"""The command line: what it writes, its exit codes, and that nothing is left half-written."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import mosar
from mosar import MoSARConfig, Regime, __version__
from mosar.cli import app
from mosar.data.prepare import prepare


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def draw(*arguments):
    return run("figure", "decay-kernels", *arguments)


def assert_one_line_failure(result, *parts):
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("mosar: error: ")
    for part in parts:
        assert str(part) in line


def test_version():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"mosar {__version__}\n")


COMMANDS = [
    (),
    ("figure",),
    ("figure", "decay-kernels"),
    ("bench",),
    ("bench", "attention"),
    ("bench", "decode"),
    ("bench", "train"),
    ("prepare",),
    ("train",),
    ("reproduce",),
    ("evaluate",),
    ("report",),
    ("plan",),
    ("retrofit",),
    ("generate",),
    ("export",),
    ("import",),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Example: mosar " in result.stdout


def test_help_does_not_load_torch():
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from mosar.cli import app\n"
        "for command in [], ['figure'], ['bench', 'attention']:\n"
        "    assert CliRunner().invoke(app, [*command, '--help']).exit_code == 0\n"
        "assert not {'torch', 'matplotlib', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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


def test_decay_kernels_is_reproducible(tmp_path):
    for name in ("a.svg", "b.svg"):
        assert draw("--out", tmp_path / name, "--length", 64).exit_code == 0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


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


def test_unknown_suffix_fails(tmp_path):
    assert_one_line_failure(draw("--out", tmp_path / "a.gif"), ".png, .svg, .pdf", "a.gif")
    assert not list(tmp_path.iterdir())


def test_missing_directory_fails(tmp_path):
    out = tmp_path / "missing" / "a.png"
    assert_one_line_failure(draw("--out", out, "--length", 64), f"cannot write {out}: No such file")


def test_failed_write_leaves_nothing_behind(tmp_path):
    out = tmp_path / "a.png"
    out.mkdir()
    assert_one_line_failure(draw("--out", out, "--length", 64), f"cannot write {out}")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    assert not list(out.iterdir())


def test_missing_config_fails(tmp_path):
    path = tmp_path / "config.json"
    assert_one_line_failure(
        draw("--out", tmp_path / "a.png", "--config", path), f"cannot read {path}: No such file"
    )


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{", "must be valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"reach": 5}', "unknown fields of MoSARConfig: ['reach']"),
        ('{"barrier": 0}', "barrier must be a finite number > 0, got 0"),
    ],
)
def test_bad_config_fails_with_the_rule(tmp_path, text, rule):
    path = tmp_path / "config.json"
    path.write_text(text)
    result = draw("--out", tmp_path / "a.png", "--config", path)
    assert_one_line_failure(result, path, rule)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_missing_matplotlib_names_the_extra(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("matplotlib", "mosar.report"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = draw("--out", tmp_path / "a.png")
    assert_one_line_failure(result, 'pip install "mosar[report]"')
