"""What is computed from records, against sums written out here."""

import math
import re
import statistics
from dataclasses import replace

import pytest

from mosar.records import Cell, append_record
from mosar.report.charts import Chart
from mosar.report.claims import far_accuracy, medium_reach
from mosar.report.comparison import (
    Comparison,
    Estimate,
    Setting,
    geometry_of,
    mean_mass,
    mean_share,
    relative_percent,
)
from mosar.report.curves import (
    axis_charts,
    change_chart,
)
from mosar.report.experiment import load_experiment
from mosar.report.formats import MISSING, setting
from mosar.report.grid_tables import axis_table, change_table
from mosar.report.milestones import (
    found_by_tokens,
    gap_by_tokens,
    mass_by_tokens,
    milestones_table,
)
from mosar.report.sections import all_items, make_sections
from mosar.report.summary import abstract
from mosar.report.tables import retrieval_table
from report.synthetic import (
    ALL,
    compare,
    make_config,
    make_evaluation,
    make_retrieval,
    make_training,
    perplexity,
    render,
    write_cell,
    write_experiment,
)


def test_estimates_are_means_over_seeds(comparison):
    values = [perplexity(Cell(variant="rope", preset="small", seed=s), 4) for s in range(3)]
    found = comparison.estimate(Setting("rope", 4.0))
    assert found is not None and found.n == 3
    assert found.mean == pytest.approx(sum(values) / 3)
    assert found.sd == pytest.approx(statistics.stdev(values))
    assert found.stderr == pytest.approx(statistics.stdev(values) / math.sqrt(3))
    assert list(found.values) == [0, 1, 2]


def test_differences_are_taken_within_a_seed(comparison):
    cells = [
        (
            Cell(variant="mosar", preset="small", seed=s),
            Cell(variant="rope", preset="small", seed=s),
        )
        for s in range(3)
    ]
    values = [(perplexity(a, 2) / perplexity(b, 2) - 1) * 100 for a, b in cells]
    found = comparison.delta("mosar", 2.0)
    assert found.mean == pytest.approx(statistics.fmean(values))
    assert found.sd == pytest.approx(statistics.stdev(values))


def test_seeds_that_only_one_side_has_do_not_count():
    found = relative_percent(Estimate({0: 2.0, 1: 3.0}), Estimate({1: 2.0, 2: 9.0}))
    assert found is not None and found.values == {1: pytest.approx(50.0)}
    assert relative_percent(Estimate({0: 2.0}), Estimate({1: 2.0})) is None
    assert relative_percent(None, Estimate({1: 2.0})) is None
    assert Estimate({0: 2.0}).sd is None and Estimate({0: 2.0}).stderr is None


def test_own_routing_and_what_was_evaluated(comparison):
    assert comparison.variants == comparison.evaluated
    assert sorted(comparison.evaluated) == sorted(ALL)
    assert comparison.routed == ["mosar", "mosar-cost"]
    assert comparison.own_routing("mosar") == "soft"
    assert comparison.own_routing("rope") == "native"
    assert comparison.routings("mosar") == ["soft", "top1", "sparse"]
    assert comparison.factors == [1.0, 2.0, 4.0] and comparison.longest == 4.0
    assert comparison.train_length == 512
    assert comparison.estimate(Setting("nope", 1.0)) is None
    assert comparison.estimate(Setting("rope", 3.0)) is None


def test_shares_and_mass_are_means_over_layers():
    record = make_evaluation(Cell(variant="mosar", preset="small", seed=1), 2, "top1")
    layers = record.shares_soft["key"]
    assert mean_share("key", -1)(record) == pytest.approx(sum(x[-1] for x in layers) / len(layers))
    hard = record.shares_top1["query"]
    assert mean_share("query", 0, top1=True)(record) == pytest.approx(
        sum(x[0] for x in hard) / len(hard)
    )
    masses = [layer["mean"] for layer in record.discarded_mass]
    assert mean_mass(record) == pytest.approx(sum(masses) / len(masses))
    plain = make_evaluation(Cell(variant="rope", preset="small", seed=1), 2)
    assert mean_mass(plain) is None and mean_share("key", 0)(plain) is None


@pytest.mark.parametrize(
    ("variant", "reach"),
    [("rope", 1), ("alibi", 1), ("p-rope", 1), ("fixed-s", 1 / 16), ("fixed-m", 1 / 4),
     ("rope-m-mask", 1 / 4)],
)  # fmt: skip
def test_reach_without_routers_is_nominal(comparison, variant, reach):
    assert comparison.reach(variant, 1.0).mean == pytest.approx(reach)
    assert comparison.reach(variant, 4.0).mean == pytest.approx(reach if reach == 1 else reach / 4)


def test_geometry_of_a_configuration():
    config = make_config(Cell(variant="mosar", preset="small", seed=0))
    assert [regime.reach for regime in geometry_of(config).regimes] == [32, 128, 512]
    config["attention"]["regimes"] = [
        {"name": "near", "reach": 10, "plateau": 0.5},
        {"name": "all", "reach": 512, "plateau": 1.0},
    ]
    assert [regime.name for regime in geometry_of(config).regimes] == ["near", "all"]
    for broken in ({}, {"attention": {}}, config | {"model": {}}, config | {"attention": []}):
        assert geometry_of(broken) is None


def test_grid_cells_are_an_axis_and_stay_out_of_the_comparison(comparison):
    assert comparison.point == {}
    assert not any(cell.grid for cell in comparison.cells.values())
    (key,) = comparison.axes
    points = comparison.axes[key]
    # The cells outside of the grid lie on it, where their configuration says.
    assert [point.value for point in points] == [4.0, 6.0, 8.0, 10.0]
    assert [len(point.cells["mosar"]) for point in points] == [1, 3, 1, 1]
    found = comparison.along_axis(points[0].cells["mosar"], 4.0, None, lambda r: r.perplexity)
    cell = Cell(variant="mosar", preset="small", seed=0, grid={key: "4.0"})
    assert found.values == {0: pytest.approx(perplexity(cell, 4))}


def test_figures_along_an_axis(tmp_path):
    key = "attention.barrier"
    write_experiment(tmp_path, variants=(), benchmarks=False)
    for value in ("4.0", "6.0"):
        for seed in (0, 1):
            cell = Cell(variant="mosar", preset="small", seed=seed, grid={key: value})
            write_cell(tmp_path, cell, retrieval=True)
    c = Comparison(load_experiment(tmp_path))
    charts = {chart.name.removeprefix(f"grid_{key}_"): chart for chart in axis_charts(c, key)}
    assert list(charts) == [
        *("perplexity", "gap", "discarded_mass", "density", "far_passkey", "far_recall")
    ]
    solid, dashed = charts["gap"].series
    assert (solid.note, dashed.note) == ("1×", "4×")
    for place, point in zip(("4.0", "6.0"), dashed.points, strict=True):
        losses = {
            (record.routing, record.cell.seed): record.loss
            for record in c.experiment.evaluations
            if record.length == 4 * record.train_length and record.cell.grid == {key: place}
        }
        gaps = [
            (math.exp(losses["sparse", seed] - losses["soft", seed]) - 1) * 100 for seed in (0, 1)
        ]
        assert point.x == float(place) and point.y == pytest.approx(statistics.fmean(gaps))
    # The table has the figures of the charts.
    table = axis_table(c, key)
    assert table in all_items(make_sections(c))
    texts = [tuple(cell.text for cell in row[:2]) for row in table.rows]
    assert texts == [("MoSAR, " + b, n) for b in ("4", "6") for n in ("1×", "4×")]
    for at, chart in ((2, "perplexity"), (5, "gap"), (6, "density"), (7, "discarded_mass")):
        near, far = (series.points for series in charts[chart].series)
        in_order = [near[0], far[0], near[1], far[1]]
        assert [row[at].sort for row in table.rows] == [pytest.approx(p.y) for p in in_order]
    rows = [[cell.text for cell in row] for row in retrieval_table(c, of_grid=True).rows]
    assert [row[:4] for row in rows if row[1:3] == ["sparse", "passkey"]] == [
        ["MoSAR, attention.barrier=4.0", "sparse", "passkey", "4×"],
        ["MoSAR, attention.barrier=6.0", "sparse", "passkey", "4×"],
    ]
    trained, sparse = charts["far_passkey"].series
    assert (trained.note, sparse.note) == ("as trained", "sparse")
    beyond = medium_reach(c)
    found = [
        far_accuracy(record, beyond)
        for record in c.experiment.retrievals
        if (record.task, record.routing, record.cell.grid) == ("passkey", "sparse", {key: "6.0"})
    ]
    assert len(found) == 2 and sparse.points[1].y == pytest.approx(statistics.fmean(found))


def test_changes_are_compared_with_the_same_seed_unchanged(tmp_path):
    write_experiment(tmp_path, variants=(), benchmarks=False)
    grids = ({}, {"attention.barrier": "8.0"}, {"attention.composition": "min"})
    for grid in grids:
        for seed in (0, 1):
            write_cell(tmp_path, Cell(variant="mosar", preset="small", seed=seed, grid=grid))
    both = {"attention.barrier": "8.0", "attention.composition": "min"}
    write_cell(tmp_path, Cell(variant="mosar", preset="small", seed=0, grid=both))
    write_cell(tmp_path, Cell(variant="rope", preset="small", seed=0))
    c = Comparison(load_experiment(tmp_path))
    assert list(c.changes) == ["mosar"]
    assert list(c.changes["mosar"]) == ["", "attention.barrier=8.0", "attention.composition=min"]
    table = change_table(c)
    assert [row[0].text for row in table.rows] == [
        "MoSAR, unchanged",
        "MoSAR, attention.barrier=8.0",
        "MoSAR, attention.composition=min",
    ]
    cells = {
        name: [Cell(variant="mosar", preset="small", seed=seed, grid=grid) for seed in (0, 1)]
        for name, grid in zip(("base", "high"), grids, strict=False)
    }
    gaps = [
        (perplexity(high, 1) / perplexity(base, 1) - 1) * 100
        for base, high in zip(cells["base"], cells["high"], strict=True)
    ]
    assert table.rows[1][2].sort == pytest.approx(statistics.fmean(gaps))
    assert table.rows[0][2].text == "–"
    (line,) = change_chart(c, 1.0).series
    assert [p.text for p in line.points] == ["unchanged", "barrier=8.0", "composition=min"]
    assert [row[-1].text for row in table.rows] == ["2", "2", "2"]
    # A third seed of one change alone is not drawn beside the others.
    more = Cell(variant="mosar", preset="small", seed=2, grid=grids[1])
    write_cell(tmp_path, more)
    c = Comparison(load_experiment(tmp_path))
    assert [row[-1].text for row in change_table(c).rows] == ["2", "3", "2"]
    assert change_chart(c, 1.0).series[0].points == line.points
    # Two values of an axis are rows of that table; they need no chart of their own.
    names = [item.name for item in all_items(make_sections(c)) if isinstance(item, Chart)]
    assert "changes_1x" in names and not any(name.startswith("grid_") for name in names)


def test_milestones_show_the_gap_the_mass_and_what_is_found(tmp_path):
    cell = Cell(variant="mosar", preset="small", seed=0)
    write_experiment(tmp_path, variants=(), benchmarks=False)
    write_cell(tmp_path, cell, retrieval=True)
    path = tmp_path / "records" / f"{cell.name}.jsonl"
    last = make_training(cell)
    for routing, shift in (("soft", 0.0), ("top1", 0.1), ("sparse", 0.2)):
        record = make_evaluation(cell, 1, routing)
        loss = math.log(perplexity(cell, 1)) + 1 + shift
        append_record(path, replace(record, step=last.step // 2, loss=loss))
        found = make_retrieval(cell, "passkey", routing)
        worse = [[a, b, share / 2, n] for a, b, share, n in found.by_distance]
        append_record(path, replace(found, step=last.step // 2, by_distance=worse))
    c = Comparison(load_experiment(tmp_path))
    half, end = last.tokens / 2e6, last.tokens / 1e6
    (gaps,) = gap_by_tokens(c, 1.0).series
    assert [p.x for p in gaps.points] == [half, end]
    assert gaps.points[0].y == pytest.approx((math.exp(0.2) - 1) * 100)
    (masses,) = mass_by_tokens(c, 1.0).series
    assert masses.points[1].y == pytest.approx(mean_mass(make_evaluation(cell, 1, "top1")))
    trained, sparse = found_by_tokens(c, "passkey").series
    assert (trained.note, sparse.note) == ("as trained", "sparse")
    full = far_accuracy(make_retrieval(cell, "passkey", "sparse"), medium_reach(c))
    assert [p.y for p in sparse.points] == [pytest.approx(full / 2), pytest.approx(full)]


def test_milestones_table_ranks_at_each_number_of_tokens(tmp_path):
    write_experiment(tmp_path, variants=("rope", "mosar"), seeds=(0,), benchmarks=False)
    assert milestones_table(Comparison(load_experiment(tmp_path))).empty
    # Half-way rope is behind mosar, by as much as it is ahead of itself at the end.
    for variant, worse in (("rope", 2.0), ("mosar", 1.0)):
        cell = Cell(variant=variant, preset="small", seed=0)
        for factor in (1, 2, 4):
            for routing in ("native",) if variant == "rope" else ("soft", "sparse"):
                record = make_evaluation(cell, factor, routing)
                half = replace(record, step=record.step // 2, loss=record.loss + worse)
                append_record(tmp_path / "records" / f"{cell.name}.jsonl", half)
    c = Comparison(load_experiment(tmp_path))
    table = milestones_table(c)
    assert len(table.rows) == 4 and table.keys[:2] == ("mosar", "rope")
    half, end = dict.fromkeys(table.groups)
    total = c.trainings["rope"][0].tokens / 1e6
    assert (half, end) == (f"{total / 2:.2f} million tokens", f"{total:.2f} million tokens")
    rows = {
        (group, key): row
        for group, key, row in zip(table.groups, table.keys, table.rows, strict=True)
    }
    at_end = [c.estimate(Setting("mosar", factor)).mean for factor in c.factors]
    assert [cell.sort for cell in rows[end, "mosar"][1:4]] == at_end
    half_way = [cell.sort for cell in rows[half, "mosar"][1:4]]
    assert half_way == pytest.approx([math.e * figure for figure in at_end])
    of_rope = c.estimate(Setting("rope", 4.0)).mean
    assert rows[half, "mosar"][5].sort == pytest.approx(
        100 * (at_end[2] * math.e / (of_rope * math.e**2) - 1)
    )
    assert rows[half, "rope"][4].sort == 0 and rows[half, "rope"][6].text == MISSING
    assert (
        rows[end, "mosar"][6].sort
        == c.estimate(Setting("mosar", 1.0, "sparse"), lambda r: r.density).mean
    )


def test_runs_that_were_only_executed_sparsely_have_a_page(tmp_path):
    write_experiment(tmp_path, variants=(), benchmarks=False)
    for variant in ("mosar", "mosar-cost"):
        cell = Cell(variant=variant, preset="small", seed=0)
        path = tmp_path / "records" / f"{cell.name}.jsonl"
        append_record(path, make_training(cell))
        append_record(path, make_evaluation(cell, 4, "sparse"))
    page = render(Comparison(load_experiment(tmp_path)))
    assert "Support density" in page


def test_of_a_grid_without_plain_cells_the_papers_point_is_compared(tmp_path):
    grid = {"attention.barrier": [4.0, 6, 8.0]}
    c = compare(tmp_path, variants=(), grid=grid, grid_variants=("mosar", "rope"))
    assert c.point == {"attention.barrier": "6"}
    assert sorted(c.cells) == ["mosar-seed0-attention.barrier=6", "rope-seed0-attention.barrier=6"]
    assert c.delta("mosar", 1.0) is not None


def test_cells_of_a_task_are_no_seeds_of_the_text(tmp_path):
    folder = write_experiment(
        tmp_path, variants=("rope", "mosar"), seeds=(0,), retrieval=False, benchmarks=False
    )
    (folder / "records" / "retrieval").mkdir()
    tasks = {"rope": (0, 1, 2), "fixed-m": (0,)}
    for variant, seeds in tasks.items():
        for seed in seeds:
            cell = Cell(variant=variant, preset="retrieval", seed=seed)
            path = folder / "records" / "retrieval" / f"{cell.name}.jsonl"
            training = make_training(cell)
            data = training.config["data"] | {"task": "recall"}
            config = training.config | {"data": data}
            append_record(path, replace(training, config=config, valid_curve=[[100, 0.1]]))
            append_record(path, make_retrieval(cell, "recall", "native"))
    c = Comparison(load_experiment(folder))
    assert c.seeds == {"mosar": [0], "rope": [0]} and c.point == {}
    assert {variant: list(runs) for variant, runs in c.trainings.items()} == c.seeds
    assert c.trainings["rope"][0].valid_curve[-1][1] > 1
    asked = {(r.cell.variant, r.cell.seed) for r in c.retrievals}
    assert asked == {(variant, seed) for variant, seeds in tasks.items() for seed in seeds}
    # A variant that only the task has is shown with it.
    assert abstract(c).startswith("2 variants of one decoder")
    assert re.search(r"Right answers .*Fixed-M \d+ %", abstract(c))


def test_in_an_experiment_of_tasks_alone_they_are_the_seeds(tmp_path):
    (tmp_path / "records").mkdir()
    for seed in (0, 1):
        for task in ("passkey", "recall"):
            cell = Cell(variant="rope", preset="retrieval", seed=seed, grid={"data.task": task})
            path = tmp_path / "records" / f"{cell.name}.jsonl"
            append_record(path, make_training(cell))
            append_record(path, make_retrieval(cell, task, "native"))
    c = Comparison(load_experiment(tmp_path))
    assert c.seeds == {"rope": [0, 1]} and list(c.trainings["rope"]) == [0, 1]
    found = sorted((r.task, r.cell.seed) for r in c.retrievals)
    assert found == [(task, seed) for task in ("passkey", "recall") for seed in (0, 1)]
    assert c.axes == {}


def test_values_of_an_axis_may_be_words(tmp_path):
    grid = {"attention.composition": ["min", "max", "mean"]}
    c = compare(tmp_path, variants=(), grid=grid)
    assert c.point == {"attention.composition": "mean"}
    assert [p.value for p in c.axes["attention.composition"]] == ["max", "mean", "min"]


def test_regimes_can_be_an_axis(tmp_path):
    values = [
        f'[{{"name":"S","reach":{reach},"plateau":0.75}},{{"name":"G","reach":512,"plateau":1}}]'
        for reach in (64, 32)
    ]
    c = compare(tmp_path, variants=(), grid={"attention.regimes": values})
    labels = [setting(point.value) for point in c.axes["attention.regimes"]]
    assert labels == ["S 32, G 512", "S 64, G 512"]
    assert [regime.name for regime in c.geometry("mosar").regimes] == ["S", "G"]


def test_the_latest_step_counts(tmp_path):
    folder = write_experiment(
        tmp_path, variants=("rope",), seeds=(0,), factors=(1,), retrieval=False, benchmarks=False
    )
    cell = Cell(variant="rope", preset="small", seed=0)
    for step, loss in ((2000, 1.5), (100, 9.0)):
        record = replace(make_evaluation(cell, 1), step=step, loss=loss)
        append_record(folder / "records" / "later.jsonl", record)
    c = Comparison(load_experiment(folder))
    assert c.estimate(Setting("rope", 1.0)).mean == pytest.approx(math.exp(1.5))
