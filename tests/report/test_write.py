"""What `mosar report` writes: complete, the same again, and nothing that is not its own."""

import os
import re
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from mosar.cli import app
from mosar.data.prepare import prepare
from mosar.evaluation.evaluate import evaluate
from mosar.records import Cell, append_record
from mosar.report.charts import Named
from mosar.report.comparison import Comparison
from mosar.report.experiment import ReportError, load_experiment
from mosar.report.formats import slug
from mosar.report.sections import all_items, make_sections
from mosar.report.write import write_report
from mosar.training.config import resolve_config
from mosar.training.loop import train
from report.synthetic import make_evaluation, make_retrieval, write_experiment


def small(folder, **changes):
    changes = {"seeds": (0,), "retrieval": False, "benchmarks": False} | changes
    return write_experiment(folder, **{"variants": ("rope", "alibi"), "factors": (1,)} | changes)


def files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def run(*arguments, width=120):
    return CliRunner().invoke(
        app, [str(argument) for argument in arguments], env={"COLUMNS": str(width)}
    )


@pytest.fixture(scope="module")
def written(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "report"
    assert write_report(folder, out) == out / "index.html"
    return out


def test_everything_is_written(written):
    made = files(written)
    assert {"index.html", "tables.md", "tables.tex"} <= set(made)
    names = {name.split("/")[1] for name in made if name.startswith("figures/")}
    stems = {name.rpartition(".")[0] for name in names}
    assert names == {f"{stem}.{suffix}" for stem in stems for suffix in ("png", "svg")}
    assert stems >= {
        *("architecture", "decay_kernels", "geometry_grids", "validation_curves"),
        *("perplexity_by_length", "delta_by_length", "gap_by_length", "validation_delta"),
        *("density_by_length", "reach_by_length", "discarded_mass_mosar", "speedup"),
        *("regime_shares_mosar_1x", "perplexity_by_position_4x", "retrieval_passkey_2048"),
        *("grid_attention.barrier_perplexity", "grid_attention.barrier_discarded_mass"),
    }
    for name, data in made.items():
        if name.endswith(".png"):
            assert data.startswith(b"\x89PNG") and len(data) > 5000, name
        elif name.endswith(".svg"):
            assert data.startswith(b"<?xml"), name


def test_figures_show_what_the_page_shows(written):
    """Every chart of the page is a file, and its lines are in it by name."""
    page = (written / "index.html").read_text()
    charts = set(re.findall(r'<figure class="card \w+" id="fig-([\w.-]+)"', page))
    stems = {path.stem for path in (written / "figures").iterdir()}
    assert charts <= stems
    svg = (written / "figures" / "perplexity_by_length.svg").read_text()
    assert all(f'id="{name}"' in svg for name in ("mosar", "rope", "fixed-m"))


def test_a_former_report_is_replaced_and_nothing_else(tmp_path):
    folder = small(tmp_path / "run", factors=(1, 2))
    out = tmp_path / "out"
    write_report(folder, out)
    assert (out / "figures" / "delta_by_length.svg").exists()
    (out / "figures" / "mine.png").write_bytes(b"mine")
    (out / "notes.txt").write_text("mine")
    for path in (folder / "records").glob("rope*"):
        path.unlink()
    write_report(folder, out)
    assert not (out / "figures" / "delta_by_length.svg").exists()
    assert not (out / "figures" / "delta_by_length.png").exists()
    assert (out / "figures" / "perplexity_by_length.svg").exists()
    assert (out / "figures" / "mine.png").read_bytes() == b"mine"
    assert (out / "notes.txt").read_text() == "mine"
    assert not list(out.rglob(".*"))


def named(folder, variant, task, grid):
    """Two cells of a grid under any names."""
    for value in (0, 1):
        made = Cell(variant="mosar", preset="small", seed=0)
        records = [make_evaluation(made, 1, "soft"), make_retrieval(made, task, "soft")]
        cell = replace(made, variant=variant, grid={grid: value})
        for record in records:
            path = folder / "records" / f"{slug(variant)}-{value}.jsonl"
            append_record(path, replace(record, cell=cell))


def test_names_in_records_cannot_lead_out_of_the_folder(tmp_path):
    folder = small(tmp_path / "a" / "b" / "run", variants=())
    named(folder, "x/../../../out", str(tmp_path / "out"), "..\\out$\\frac{$")
    before = set(tmp_path.rglob("*"))
    write_report(folder)
    made = set(tmp_path.rglob("*")) - before
    report = folder / "report"
    assert all(path == report or report in path.parents for path in made)
    names = [path.name for path in (report / "figures").iterdir()]
    assert all(re.fullmatch(r"[a-z0-9._-]{1,80}", name) for name in names)
    for start in ("regime_shares_x-out_1x-", "retrieval_", "grid_"):
        assert any(name.startswith(start) for name in names)
    for path in report.rglob("*.svg"):
        ElementTree.parse(path)


def test_names_that_look_alike_stay_apart(tmp_path):
    folder = small(tmp_path / "run", variants=())
    names = ["a/b", "a b", "A/B", "a?b", "..", "~", "模型", "x" * 300, "x" * 301]
    for name in names:
        named(folder, name, name, "key")
    c = Comparison(load_experiment(folder))
    named_items = [item for item in all_items(make_sections(c)) if isinstance(item, Named)]
    found = Counter(item.name for item in named_items)
    assert max(found.values()) == 1
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", name) for name in found)
    for start in ("regime_shares_", "retrieval_"):
        assert sum(name.startswith(start) for name in found) == len(names)


def test_a_name_or_link_that_leads_elsewhere_is_refused(tmp_path, monkeypatch):
    folder = small(tmp_path / "run", variants=("rope",))
    (tmp_path / "elsewhere").mkdir()
    (folder / "report").mkdir()
    (folder / "report" / "figures").symlink_to(tmp_path / "elsewhere")
    failing(run("report", folder), "figures leads out of the report's folder")
    (folder / "report" / "figures").unlink()
    # Were a figure's name ever no slug.
    monkeypatch.setattr("mosar.report.charts.slug", lambda name: f"../../{name}")
    failing(run("report", folder), "does not write outside of its folder: '../../")
    assert not list((tmp_path / "elsewhere").iterdir())
    assert not list(tmp_path.glob("*.png")) and not list(folder.glob("*.png"))


def test_command_shows_the_main_table_and_the_path(tmp_path):
    folder, elsewhere = small(tmp_path / "run"), tmp_path / "a" / "b"
    result = run("report", folder, "--out", elsewhere)
    assert result.exit_code == 0 and (elsewhere / "index.html").exists()
    assert not (folder / "report").exists()
    result = run("report", folder)
    assert result.exit_code == 0, result.output
    assert f"The report: {folder / 'report' / 'index.html'}" in result.stdout
    assert "ALiBi" in result.stdout and "vs RoPE" in result.stdout
    # What comes next; with three seeds there is nothing to add.
    assert "browser" in result.stdout and "--seeds 3" in result.stdout
    assert "--seeds" not in run("report", small(tmp_path / "three", seeds=(0, 1, 2))).stdout
    # Equal records give equal files.
    assert files(folder / "report") == files(elsewhere)


def test_a_run_folder_has_a_report_once_it_is_evaluated(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"Attention that learns, {name}. " * 200)
    data, folder = tmp_path / "data", tmp_path / "run"
    prepare([str(tmp_path / "a.txt")], data, valid=[str(tmp_path / "b.txt")], progress=False)
    changes = ["train.steps=2", "train.warmup_steps=1"]
    config = resolve_config(variant="mosar", preset="smoke", data=data, changes=changes)
    train(config, folder, progress=False)
    failing(run("report", folder), "a run that was not evaluated", f"mosar evaluate {folder}")
    records = evaluate(folder, lengths=("1x", "2x"), tokens=256, progress=False)
    result = run("report", folder)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith(f"mosar: writing the report of {folder}: 6 records of 1 cell\n")
    page = (folder / "report" / "index.html").read_text()
    assert f"{records[0].perplexity:.2f}" in page and "No training record" in page
    # The microscope's page was made from the checkpoint, and is kept.
    kept = folder / "looks" / "mosar-seed0.html"
    assert 'content="mosar look"' in kept.read_text()
    assert (folder / "report" / "looks" / kept.name).read_bytes() == kept.read_bytes()
    kept.write_text("kept")
    assert run("report", folder).exit_code == 0
    assert (folder / "report" / "looks" / kept.name).read_text() == "kept"
    os.utime(kept, (1, 1))
    (data / "tokenizer.json").unlink(missing_ok=True)
    (data / "manifest.json").unlink()
    result = run("report", folder)
    assert result.exit_code == 0
    assert "no page of the microscope for mosar-seed0: " in result.stderr


def test_pages_of_the_microscope_come_with_the_report(tmp_path):
    folder = small(
        tmp_path / "run",
        variants=("rope", "mosar"),
        seeds=(0, 1),
        grid={"attention.barrier": [4.0, 6.0]},
    )
    out = tmp_path / "out"
    page = write_report(folder, out)
    assert "looks/" not in page.read_text() and not (out / "looks").exists()
    looks = folder / "looks"
    looks.mkdir()
    names = ("mosar-seed0", "mosar-seed1", "rope-seed0", "mosar-seed0-attention.barrier=4.0")
    for name in names:
        (looks / f"{name}.html").write_text(name)
    # One for a variant with routers: of its first seed, at the compared point.
    write_report(folder, out)
    assert re.findall(r'href="(looks/[^"]*)">([^<]*)<', page.read_text()) == [
        ("looks/mosar-seed0.html", "MoSAR, seed 0")
    ]
    assert files(out / "looks") == {"mosar-seed0.html": b"mosar-seed0"}
    (looks / "mosar-seed0.html").unlink()
    (out / "looks" / "mine.html").write_text("mine")
    write_report(folder, out)
    assert set(files(out / "looks")) == {"mosar-seed1.html", "mine.html"}


def failing(result, *parts):
    assert result.exit_code == 1
    *before, line = result.stderr.splitlines()
    assert all(earlier.startswith("mosar: writing the report of ") for earlier in before)
    assert line.startswith("mosar: error: ")
    for part in parts:
        assert str(part) in line


def test_failures_are_one_line(tmp_path):
    failing(run("report", tmp_path / "nothing"), "there is no folder")
    failing(run("report", tmp_path), "no records in")
    folder = small(tmp_path / "run", variants=("rope",))
    path = folder / "records" / "rope-seed0.jsonl"
    path.write_text(path.read_text().replace('"loss": ', '"loss": "x', 1))
    failing(run("report", folder), path, "line 2: ")
    assert not (folder / "report").exists()
    assert run("report").exit_code == 2


def test_a_folder_that_cannot_be_written(tmp_path):
    folder = small(tmp_path / "run", variants=("rope",))
    (tmp_path / "taken").write_text("")
    failing(run("report", folder, "--out", tmp_path / "taken"), "cannot write")
    with pytest.raises(ReportError, match="cannot write"):
        write_report(folder, tmp_path / "taken")
