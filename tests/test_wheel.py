"""The wheel works where nothing but it and its hard dependencies is installed."""

import email
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# From text to text, with a model that learns next to nothing; the page of look needs no extra.
FIRST_STEPS = """
prepare text --out data
train --variant mosar --preset smoke --data data --out run --set train.steps=2
evaluate run --lengths 64
generate run --prompt hello --max-new-tokens 3
look run --text text/0.txt --out look.html
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """What `make dist` builds from the sources as they are."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    tree = tmp_path_factory.mktemp("clone")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "Makefile"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(
        ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    # -o: the environment of this test serves, none is set up.
    subprocess.run(
        ["make", "-o", "setup", "dist", f"PY={sys.executable}"],
        cwd=tree,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    assert len(list((tree / "dist").glob("*.tar.gz"))) == 1
    (path,) = (tree / "dist").glob("*.whl")
    return path


def test_the_wheel_holds_every_file_of_the_package(wheel):
    sources = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "mosar").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("mosar/")}
    assert packed == sources


def test_the_wheel_says_what_pyproject_says(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        said = email.message_from_bytes(archive.read(name))
    assert set(said.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert said["Requires-Python"] == PROJECT["requires-python"]
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited is not None and said["Version"] == cited[1]
    assert f"## {said['Version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_first_steps_need_no_extra(wheel, tmp_path):
    """The hard dependencies are this environment's own, and nothing else of it can be seen."""
    python = make_environment(tmp_path / "env")
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    for name in hard_dependencies():
        link_distribution(metadata.distribution(name), site)
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    subprocess.run(
        [*pip, "install", "-q", "--no-deps", "--no-index", "--no-compile", str(wheel)],
        check=True,
        env=clean_environment(),
    )
    take_first_steps(python, tmp_path)
    # What an extra brings is asked for by a line that names its packages.
    figure = ["figure", "decay-kernels", "--out", "kernels.png"]
    refused = run([python.with_name("mosar"), *figure], tmp_path)
    assert refused.returncode == 1
    assert "matplotlib, which is not installed: pip install" in refused.stderr


@pytest.mark.slow
def test_first_steps_after_a_real_installation(wheel, tmp_path):
    python = make_environment(tmp_path / "env", with_pip=True)
    torch = re.search(r"^TORCH := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert torch is not None
    subprocess.run(
        [python, "-m", "pip", "install", "-q", torch[1], str(wheel)],
        check=True,
        env=clean_environment(),
    )
    take_first_steps(python, tmp_path)


def test_every_extra_that_is_named_exists():
    named = set()
    for folder, pattern in (("src", "*.py"), ("docs", "*.md"), (".", "*.md"), ("tests", "*.py")):
        for path in (ROOT / folder).glob(f"**/{pattern}" if folder != "." else pattern):
            text = path.read_text(encoding="utf-8")
            for listed in re.findall(r"(?:mosar|\.|\.whl)\[([a-z,]+)\]", text):
                named |= set(listed.split(","))
            named |= set(re.findall(r"install_line\(['\"]([a-z]+)['\"]\)", text))
    assert {"hf", "data", "report"} <= named
    assert not named - set(PROJECT["optional-dependencies"])


def take_first_steps(python, folder):
    (folder / "text").mkdir()
    for number in range(40):
        (folder / "text" / f"{number}.txt").write_text(f"hello {number}, " * 60, encoding="utf-8")
    script = run([python.with_name("mosar"), "--version"], folder)
    assert script.stdout.startswith("mosar "), script.stderr
    # One process for all commands: each of its own would import torch again.
    done = run([python, "-c", "import sys\nfrom mosar.cli import app\n" + EACH_LINE], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "look.html").exists()


EACH_LINE = (
    f"for line in {FIRST_STEPS.strip().splitlines()}: app(line.split(), standalone_mode=False)"
)


def run(command, folder):
    return subprocess.run(
        command, cwd=folder, env=clean_environment(), capture_output=True, text=True
    )


def clean_environment():
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def make_environment(folder, **options):
    venv.create(folder, symlinks=True, **options)
    return folder / "bin" / "python"


def hard_dependencies():
    """The names of all distributions that an installation without extras brings."""
    found, waiting = set(), list(PROJECT["dependencies"])
    while waiting:
        requirement = Requirement(waiting.pop())
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and name not in found:
            found.add(name)
            waiting += metadata.requires(name) or []
    return found


def link_distribution(distribution, site):
    """Shows an installed distribution, its modules and its metadata, to another environment."""
    for top in {file.parts[0] for file in distribution.files or () if ".." not in file.parts}:
        source = Path(str(distribution.locate_file(top)))
        if top != "__pycache__" and source.exists() and not (site / top).exists():
            (site / top).symlink_to(source)
