"""The law of the density: found again where it holds, never negative, checked where it was cut."""

from dataclasses import replace

import pytest

from mosar.records import Cell, append_record
from mosar.report.comparison import Comparison
from mosar.report.density_law import DensityLaw, fit_density_law, law_table
from mosar.report.experiment import load_experiment
from mosar.report.sections import all_tables, make_sections
from report.synthetic import make_evaluation, make_training

LENGTHS = (256, 1024, 2048, 8192)


@pytest.mark.parametrize(("keys", "constant"), [(40.0, 0.01), (300.0, 0.13), (25.0, 0.0)])
def test_a_law_is_found_again(keys, constant):
    law = DensityLaw(keys, constant)
    found = fit_density_law({length: law.density(length) for length in LENGTHS})
    assert found is not None
    assert (found.keys, found.share) == (pytest.approx(keys), pytest.approx(constant, abs=1e-12))
    assert found.error < 1e-9
    assert found.density(32_768) == pytest.approx(2 * keys / 32_769 + constant)


@pytest.mark.parametrize(
    ("counted", "zero"),
    [
        # It falls faster than 1/n, and it rises.
        ({512: 0.2, 1024: 0.08, 2048: 0.03}, "share"),
        ({512: 0.2, 1024: 0.22, 2048: 0.25}, "keys"),
    ],
)
def test_nothing_negative_is_fitted(counted, zero):
    law = fit_density_law(counted)
    assert law is not None and getattr(law, zero) == 0
    assert law.keys >= 0 and law.share >= 0
    assert law.error == pytest.approx(max(abs(law.density(n) / r - 1) for n, r in counted.items()))
    # No other value of what is left is better.
    other = "keys" if zero == "share" else "share"

    def loss(law):
        return sum((law.density(n) / r - 1) ** 2 for n, r in counted.items())

    for factor in (0.99, 1.01):
        assert loss(law) < loss(replace(law, **{other: getattr(law, other) * factor}))


def test_two_lengths_make_no_law_and_no_density_exceeds_one():
    assert fit_density_law({512: 0.2, 1024: 0.1}) is None
    assert fit_density_law({512: 0.2, 1024: 0.1, 2048: 0.0}) is None
    # Where all pairs are read, nothing is fitted, and the law does not say so.
    law = fit_density_law({64: 1.0, 512: 0.2, 1024: 0.1, 2048: 0.05})
    assert law is not None and law.lengths == (512, 1024, 2048)
    assert DensityLaw(100.0, 0.5).density(16) == 1.0


def test_the_farthest_length_checks_the_law(tmp_path):
    cell = Cell(variant="mosar", preset="small", seed=0)
    law = DensityLaw(20.0, 0.002)
    made = {
        factor: make_evaluation(cell, factor, "sparse") for factor in (1.0, 2.0, 16.0, 32.0, 64.0)
    }
    made = {f: replace(r, density=law.density(r.length)) for f, r in made.items()}
    # Beyond 16×, where nothing is fitted, the routers choose differently.
    made[64.0] = replace(made[64.0], density=0.011)
    (tmp_path / "records").mkdir()
    for record in (make_training(cell), *made.values()):
        append_record(tmp_path / "records/mosar.jsonl", record)
    c = Comparison(load_experiment(tmp_path))
    table = law_table(c)
    assert table.keys == ("mosar",)
    tokens = made[64.0].length
    assert [cell.text for cell in table.rows[0][1:5]] == ["1× to 16×", "20.0", "0.0020", "0.0 %"]
    assert [cell.text for cell in table.rows[0][-3:]] == [
        f"{tokens:,}",
        f"{law.density(tokens):.4f}",
        "0.0110",
    ]
    assert table in all_tables(make_sections(c))
