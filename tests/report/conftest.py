"""One large experiment and its page, made once for the tests that read them."""

from pathlib import Path

import pytest

from mosar.report.comparison import Comparison
from mosar.report.experiment import load_experiment
from mosar.report.page import render_page
from mosar.report.sections import make_sections
from report.synthetic import write_experiment


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """All variants, three seeds, a grid, retrieval, benchmarks and a failed cell."""
    return write_experiment(
        tmp_path_factory.mktemp("full") / "small",
        grid={"attention.barrier": [4.0, 8.0, 10.0]},
        failures=["alibi-seed7"],
    )


@pytest.fixture(scope="session")
def comparison(folder) -> Comparison:
    return Comparison(load_experiment(folder))


@pytest.fixture(scope="session")
def page(comparison) -> str:
    return render_page(comparison, make_sections(comparison), [])
