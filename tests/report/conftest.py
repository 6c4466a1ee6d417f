"""One large experiment, its page and a browser, made once for the tests that use them."""

import warnings
from pathlib import Path

import pytest

from mosar.microscope.picture import find_browser
from mosar.report.comparison import Comparison
from mosar.report.experiment import load_experiment
from report.browser import Browser
from report.synthetic import render, write_experiment

MISSING = (
    "THE PAGE IS NOT TESTED IN A BROWSER: there is no chromium here; install it with "
    "`apt-get install chromium` to run these tests"
)


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
    return render(comparison)


@pytest.fixture(scope="session")
def browser():
    path = find_browser()
    if path is None:
        warnings.warn(MISSING, stacklevel=1)
        pytest.skip(MISSING)
    browser = Browser(path)
    yield browser
    browser.close()
