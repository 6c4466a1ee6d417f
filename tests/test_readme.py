"""The documents keep their word: code runs, commands exist, links lead somewhere."""

import asyncio
import contextlib
import inspect
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from typer.testing import CliRunner

import mosar
from bench.conftest import quick_benchmarks  # noqa: F401
from mosar import attention, geometries
from mosar.cli import app, report
from mosar.data import corpora
from torchrun_commands import check_torchrun

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


def blocks(language, documents=DOCUMENTS):
    """Each fenced block of a language as a parameter: its text, named by file and line."""
    for document in documents:
        text = document.read_text(encoding="utf-8")
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S):
            line = text.count("\n", 0, match.start()) + 1
            yield pytest.param(match[1], id=f"{document.name}:{line}")


def commands():
    """Each line of the bash blocks as a parameter."""
    for block in blocks("bash"):
        for command in block.values[0].splitlines():
            yield pytest.param(shlex.split(command), id=f"{block.id} {command}")


@pytest.mark.usefixtures("own_registries")
@pytest.mark.parametrize(
    "code", list(blocks("python", [page for page in DOCUMENTS if page not in TUTORIALS]))
)
def test_python_block_runs(code):
    run_block(code, {"__name__": "__document__"})


def run_block(code, names):
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, "<document>", "exec"), names)


@pytest.fixture
def own_registries():
    """What a document registers is forgotten after it."""
    registries = (geometries.GEOMETRIES, geometries.VARIANTS)
    before = [dict(registry) for registry in registries]
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.mark.usefixtures("own_registries")
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.name)
def test_the_blocks_of_a_tutorial_build_on_each_other(tutorial, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__document__"}
    for block in blocks("python", [tutorial]):
        run_block(block.values[0], names)
    if tutorial.name == "operator.md":
        # What the page says that the model learnt.
        assert names["right"] > 0.9 and names["density"] < 0.4
        assert names["cache"].regime_counts["S"] < 100


@pytest.mark.parametrize("command", list(commands()))
def test_command_works(command, tmp_path, monkeypatch):
    program, *arguments = command
    if program == "make":
        if shutil.which("make") is None:
            pytest.skip("make is not installed")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        subprocess.run(
            ["make", "-n", *arguments], cwd=ROOT, env=environment, check=True, capture_output=True
        )
        return
    if program == "torchrun":
        check_torchrun(arguments)
        return
    if program == "python":
        assert arguments.pop(0) == "my_variant.py"  # the program mosar with one variant more
        program = "mosar"
    if program == "pip":
        check_pip_install(*arguments)
        return
    assert program == "mosar", f"no check for the command {shlex.join(command)}"
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "figure":
        out = Path(arguments[arguments.index("--out") + 1])
        out.parent.mkdir(parents=True, exist_ok=True)
        result = CliRunner().invoke(app, arguments)
        assert out.stat().st_size > 0
    elif arguments[0] == "bench":
        result = CliRunner().invoke(app, make_tiny(arguments))
        missing = "there is no run folder" if "--run" in arguments else None
        if "cuda" in arguments and not torch.cuda.is_available():
            missing = "--device cuda needs a GPU"
        if missing is not None:
            # All of it is understood, and the one thing that is missing is named.
            assert result.exit_code == 1, result.output
            assert result.stderr.startswith(f"mosar: error: {missing}"), result.output
            return
    else:
        result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0, result.output


def test_the_first_steps_lead_from_text_to_a_model_in_transformers(tmp_path, monkeypatch):
    """The commands of the README that build on each other, as they stand there, in their order."""
    monkeypatch.chdir(tmp_path)
    # Of the standard library a part.
    part = tuple(sorted(Path(asyncio.__file__).parent.glob("*.py")))
    monkeypatch.setattr(corpora, "_stdlib_files", lambda: part)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first = next(b.values[0] for b in blocks("bash") if "mosar prepare" in b.values[0])
    then = next(b.values[0] for b in blocks("bash") if "mosar export" in b.values[0])
    assert first in text and then in text
    for command in (first + then).splitlines():
        result = CliRunner().invoke(app, shlex.split(command)[1:])
        assert result.exit_code == 0, result.output + result.stderr
    assert (tmp_path / "runs" / "mosar" / "report" / "index.html").exists()


@pytest.mark.usefixtures("own_registries")
def test_the_commands_of_the_reproduction_work_in_their_order(tmp_path, monkeypatch):
    """As they stand there, with two steps of training; `small` and `make` take too long."""
    monkeypatch.chdir(tmp_path)
    part = tuple(sorted(Path(asyncio.__file__).parent.glob("*.py")))
    monkeypatch.setattr(corpora, "_stdlib_files", lambda: part)
    tutorial = ROOT / "docs" / "tutorials" / "reproduce.md"
    (script,) = (block.values[0] for block in blocks("python", [tutorial]))
    (tmp_path / "my_variant.py").write_text(script, encoding="utf-8")
    run_block(script, {"__name__": "__document__"})
    quick = "--jobs 1 --eval-tokens 256 --set train.steps=2 --set train.warmup_steps=1"
    # Other tests draw reports.
    monkeypatch.setattr(report, "report_experiment", lambda out: None)
    ran = set()
    for block in blocks("bash", [tutorial]):
        program, *arguments = shlex.split(block.values[0].strip())
        if program == "make" or "small" in arguments:
            continue
        if program == "python":
            assert arguments.pop(0) == "my_variant.py"
        if arguments[0] == "reproduce":
            arguments += quick.split()
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output + result.stderr
        ran.add(arguments[0])
    assert ran == {"reproduce", "evaluate", "look"}
    cells = {path.stem for path in (tmp_path / "runs" / "smoke" / "records").iterdir()}
    assert cells == {"rope-seed0", "rope-seed1", "mosar-seed0", "mosar-seed1", "log-decay-seed0"}


def check_pip_install(install, *arguments):
    """That a line installs a clone or the wheel of this version, with extras that exist."""
    assert install == "install"
    if arguments[0] == "torch":
        return
    target, _, listed = arguments[-1].partition("[")
    wheel = f"dist/mosar-{mosar.__version__}-py3-none-any.whl"
    assert target == ("." if arguments[0] == "-e" else wheel)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(filter(None, listed.rstrip("]").split(","))) <= set(project["optional-dependencies"])


def test_every_extra_is_explained():
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    explained = re.findall(r"^\| `([a-z]+)` \|", page, re.M)
    assert explained == list(dict.fromkeys(explained))
    assert set(explained) == set(project["optional-dependencies"])


def test_the_lock_satisfies_what_the_project_asks_for():
    """Every requirement of `make setup` is pinned, at a version that it allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lock = (ROOT / "requirements" / "lock.txt").read_text(encoding="utf-8")
    pinned = {
        canonical(name): version for name, version in re.findall(r"^(\S+)==(\S+)$", lock, re.M)
    }
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    pinned["torch"] = re.search(r"^TORCH := torch==(.*)$", makefile, re.M)[1]
    extras = {
        name for names in re.findall(r"-e '\.\[([a-z,]+)\]'", makefile) for name in names.split(",")
    }
    assert {"dev", "docs", "megatron"} <= extras
    lists = [project["dependencies"], *(project["optional-dependencies"][name] for name in extras)]
    for requirement in map(Requirement, chain.from_iterable(lists)):
        version = pinned.get(canonical(requirement.name))
        assert version is not None, f"{requirement.name} is not in requirements/lock.txt"
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}"


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def make_tiny(arguments):
    """A benchmark's arguments with a problem so small that it runs at once; files beside it."""
    for option, path in zip(arguments, map(Path, arguments[1:]), strict=False):
        if option in ("--json", "--plot"):
            path.parent.mkdir(parents=True, exist_ok=True)
        elif option == "--labels" and path.suffix == ".npz":
            np.savez(path, labels_q=np.zeros(40, dtype=int), labels_k=np.zeros(40, dtype=int))
    # What is said last counts.
    tiny = "--lengths 40 --seconds 0.001 " + TINY_BENCHMARKS[arguments[1]]
    if "--variants" in arguments:
        # Their memory is not measured; every variant has a test of its own.
        tiny = tiny.replace("--memory none", "--variants rope,mosar")
    if "--run" in arguments:
        # The run has the size of its model.
        tiny = tiny.replace("--preset smoke", "")
    if arguments[1] == "decode" and "--model" in arguments:
        tiny += " --model tiny"
    return [*arguments, *tiny.split()]


TINY_BENCHMARKS = {
    "attention": "--shapes 2x1x8 --competitors sdpa,ours --memory none",
    "decode": "--shapes 2x1x8",
    "train": "--preset smoke --memory none",
}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document):
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_readme_names_everything_public():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [name for name in mosar.__all__ if name != "__version__" and f"`{name}`" not in text]
    assert not missing


@pytest.mark.parametrize("operator", [mosar.mosar_attention, mosar.distance_attention])
def test_operators_page_names_every_argument(operator):
    text = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
    missing = [name for name in inspect.signature(operator).parameters if f"`{name}`" not in text]
    assert not missing


def test_operators_page_names_every_implementation():
    text = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
    assert not [name for name in attention.IMPLEMENTATIONS if f'| `"{name}"` |' not in text]


NOTEBOOK = ROOT / "docs" / "tutorials" / "geometry.ipynb"


@pytest.mark.parametrize("steps", [2, pytest.param(300, marks=pytest.mark.slow)])
def test_the_notebook_runs(steps, monkeypatch):
    """Its code cells in their order; with all of its steps, what it says is learnt is learnt."""
    pytest.importorskip("matplotlib").use("Agg")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names = {"__name__": "__document__"}
    for source in sources:
        run_block(source.replace("STEPS = 128, 300", f"STEPS = 128, {steps}"), names)
    assert names["step"] == steps
    assert "names and question marks" in names["seen"].to_html()
    if steps > 2:
        assert names["right"] > 0.9
        assert seen_as_key(names["seen"], 0) == "G"


def seen_as_key(seen, token):
    return seen.config.regimes[int(seen.labels[0, 1, 0, token])].name


def test_the_notebook_holds_no_outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs")]
