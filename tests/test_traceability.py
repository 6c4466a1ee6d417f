"""docs/traceability.md and docs/architecture.md tell the truth: what they name exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "traceability.md").read_text(encoding="utf-8")
MATRIX_COLUMNS = 5
NUM_MATRIX_OBJECTS, NUM_STATEMENTS = 17, 18


def table(heading):
    """The rows of the table below a heading, as lists of cells, without its two head lines."""
    section = re.split(rf"^## {heading}$", PAGE, flags=re.M)[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


MATRIX, CHECKLIST = table("The matrix"), table("The checklist")


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


def definitions(path):
    """Names a Python file defines: functions, classes, "Class.method", assigned names."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{item.name}"
                for item in node.body
                if isinstance(item, ast.FunctionDef)
            }
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def missing_tests(cell):
    """What is wrong with a cell of tests, each written as `file::name`."""
    problems = [] if quoted(cell) else [f"no test named in {cell!r}"]
    for test in quoted(cell):
        file, _, name = test.partition("::")
        if not (ROOT / file).is_file():
            problems.append(f"no file {file}")
        elif name not in definitions(ROOT / file):
            problems.append(f"no test {test}")
    return problems


def wrong_with(row):
    """What is wrong with a row of the matrix."""
    if len(row) != MATRIX_COLUMNS:
        return [f"{len(row)} cells in {row}"]
    _, file_cell, symbol_cell, test_cell, _ = row
    (file,) = quoted(file_cell)
    if not (ROOT / file).is_file():
        return [f"no file {file}"]
    symbols = quoted(symbol_cell)
    problems = [] if symbols else [f"no symbol named for {file}"]
    problems += [f"no {name} in {file}" for name in symbols if name not in definitions(ROOT / file)]
    return problems + missing_tests(test_cell)


@pytest.mark.parametrize("row", MATRIX, ids=[row[0] for row in MATRIX])
def test_row_of_the_matrix_is_true(row):
    assert not wrong_with(row)


def test_the_matrix_has_every_object_of_the_paper():
    objects = {row[0].split(" (")[0] for row in MATRIX}
    assert len(objects) == NUM_MATRIX_OBJECTS


@pytest.mark.parametrize("row", CHECKLIST, ids=[f"statement {row[0]}" for row in CHECKLIST])
def test_statement_has_its_test(row):
    _, statement, test_cell = row
    assert statement
    assert not missing_tests(test_cell)


def test_every_statement_has_a_test_of_its_own():
    assert [row[0] for row in CHECKLIST] == [str(i + 1) for i in range(NUM_STATEMENTS)]
    named = [quoted(row[2])[0] for row in CHECKLIST]
    assert len(set(named)) == NUM_STATEMENTS
    file = "tests/core/test_checklist.py"
    written = {f"{file}::{name}" for name in definitions(ROOT / file) if name.startswith("test_")}
    assert written <= {test for row in CHECKLIST for test in quoted(row[2])}


def walks():
    """The rows of the tables in docs/architecture.md: a file under src/mosar, and names in it."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("|")]
    return [(quoted(row[1]), quoted(row[2])) for row in rows if quoted(row[1])]


@pytest.mark.parametrize(("files", "names"), walks(), ids=[files[0] for files, _ in walks()])
def test_step_of_a_walk_is_there(files, names):
    (path,) = (ROOT / "src" / "mosar" / file for file in files)
    assert path.is_file()
    assert not set(names) - (definitions(path) if names else set())


def test_the_walks_lead_through_every_part():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    parts = {path.parent.name for path in (ROOT / "src" / "mosar").glob("*/__init__.py")}
    assert not [part for part in parts - {"bench", "cli"} if part not in page]


def test_the_workflow_runs_what_ci_runs():
    """On the oldest supported Python and on 3.13, and nothing else."""
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    assert re.findall(r"- run: (.*)", text) == ["bash .ci/run"]
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None and f'python: ["{oldest[1]}", "3.13"]' in text
