"""The report of retrofitted models: its frontier, and what it takes from a folder."""

import itertools
import json
import re
from dataclasses import replace

import pytest
from matplotlib.text import Text

from mosar.records import Measurement, RetrofitEvaluation, RetrofitSpeed, append_record
from mosar.report.figures import draw_frontier
from mosar.report.retrofit import FrontierPoint, frontier, gap_at, load_run, write_retrofit_report

LENGTH = 1000
DENSE = RetrofitEvaluation(
    base="model",
    adapter="",
    text="t",
    routing="dense",
    length=LENGTH,
    windows=1,
    loss=2.0,
    loss_stderr=0.0,
    window_losses=[2.0],
    layer_density=[],
    layer_lost=[],
    regimes={},
)


def routed(routing, density, loss, **changes):
    values = {"layer_density": [[density]], "layer_lost": [[0.1]], "regimes": {"S": 64.0}}
    return replace(DENSE, routing=routing, loss=loss, **values | changes)


def write_run(folder, adapter, records):
    (folder / "evaluations").mkdir(parents=True)
    description = {
        "base": {"source": "m", "architecture": "A", "parameters": 1, "checksum": "c" * 64},
        "geometry": {"regimes": [], "composition": "min", "routing_groups": 1, "num_sinks": 4},
        "weights_sha256": adapter,
        "notes": {},
    }
    (folder / "adapter.json").write_text(json.dumps(description))
    for record in records:
        append_record(folder / "evaluations/retrofit.jsonl", record)


@pytest.fixture
def runs(tmp_path):
    windows = [
        routed("window", 0.1, 2.10, regimes={"S": 50.0}),
        routed("window", 0.4, 2.01, regimes={"S": 200.0}),
    ]
    sparse = [routed("sparse", d, x, adapter=a) for d, x, a in ((0.1, 2.05, "a"), (0.2, 2.02, "b"))]
    outdated = [routed("sparse", 0.9, 9.0, adapter="z"), routed("sparse", 0.9, 9.0, adapter="a")]
    write_run(tmp_path / "one", "a", [DENSE, *outdated, *windows, sparse[0]])
    write_run(tmp_path / "two", "b", [DENSE, sparse[1]])
    write_run(tmp_path / "other", "c", [replace(DENSE, text="another text")])
    return tmp_path


def test_the_newest_records_of_the_present_routers_count(runs):
    run = load_run(runs / "one")
    assert [(r.routing, r.loss) for r in run.records] == [
        *(("dense", 2.0), ("sparse", 2.05), ("window", 2.10), ("window", 2.01)),
    ]


def test_the_frontier_joins_runs_of_one_text(runs):
    loaded = [load_run(runs / name) for name in ("one", "two", "other")]
    learned, windows = frontier(loaded, LENGTH)
    assert [(p.name, p.density) for p in learned] == [("one", 0.1), ("two", 0.2)]
    assert [p.name for p in windows] == ["window 50", "window 200"]
    assert learned[1].gap == pytest.approx(2.718281828**0.02 - 1)


def test_a_gap_between_two_windows():
    points = [FrontierPoint("", 0.1, 0.08), FrontierPoint("", 0.4, 0.02)]
    assert gap_at(points, 0.2) == pytest.approx(0.04)
    assert gap_at(points, 0.1) == pytest.approx(0.08)
    assert gap_at(points, 0.05) is None and gap_at(points, 0.5) is None


def test_the_report_says_how_much_smaller_the_gap_is(runs):
    (runs / "other" / "adapter.json").unlink()
    report = write_retrofit_report(runs).read_text()
    window = gap_at(frontier([load_run(runs / "one")], LENGTH)[1], 0.2)
    assert f"| 1,000 | two | 0.200 | +2.02 % | {100 * window:+.2f} % |" in report
    assert report.count("| 1,000 | dense |") == 1
    assert (runs / "frontier.png").exists()


def test_the_report_has_the_density_law_of_three_lengths(tmp_path):
    law = {1000: 0.1 + 200 / 1001, 2000: 0.1 + 200 / 2001, 4000: 0.1 + 200 / 4001}
    sparse = [routed("sparse", d, 2.05, adapter="a", length=n) for n, d in law.items()]
    write_run(tmp_path / "one", "a", [DENSE, *sparse])
    report = write_retrofit_report(tmp_path / "one").read_text()
    assert "| one | 1,000 to 4,000 | 100.0 | 0.1000 | 0.0 % | 0.1061 | 0.1015 |" in report
    write_run(tmp_path / "two", "a", [DENSE, *sparse[:2]])
    assert "density law" not in write_retrofit_report(tmp_path / "two").read_text()


def test_the_report_says_from_which_length_routing_pays(tmp_path):
    def timed(length, prefill, decode, **setting):
        times = {
            name: {
                routing: Measurement(samples_ms=(ms,))
                for routing, ms in (("dense", 100.0 * speedup), ("sparse", 100.0))
            }
            for name, speedup in (("prefill", prefill), ("decode", decode))
        }
        held = {"dense": 4 << 20, "sparse": 1 << 20}
        values = {"length": length, "cache_bytes": held, **times, **setting}
        return RetrofitSpeed(base="m", adapter="a", **values)

    one = [timed(1024, 0.5, 0.9), timed(4096, 2.0, 0.95)]
    write_run(tmp_path / "run", "a", [DENSE, *one])
    report = write_retrofit_report(tmp_path / "run").read_text()
    assert "tenth faster: prefill from about 2,300 tokens, decoding at none of these" in report
    assert "| prompts |" not in report
    for record in (timed(length, 1.5, 1.2, batch=4, dtype="bfloat16") for length in (512, 1024)):
        append_record(tmp_path / "run/evaluations/retrofit.jsonl", record)
    report = write_retrofit_report(tmp_path / "run").read_text()
    assert "| 4,096 | 1 | float32 |" in report and "| 512 | 4 | bfloat16 |" in report
    line = "faster (prompts: 4, bfloat16): prefill at all of these lengths, decoding at all"
    assert line in report


def test_layers_without_routers_keep_their_numbers(tmp_path):
    two = {"layer_density": [[0.1], [0.2]], "layer_lost": [[0.1], [0.1]], "adapter": "a"}
    write_run(tmp_path, "a", [DENSE, routed("sparse", 0.1, 2.05, **two)])
    assert "| 0 | 0.100 |" in write_retrofit_report(tmp_path).read_text()
    path = tmp_path / "adapter.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layers": [5, 11]}))
    report = write_retrofit_report(tmp_path).read_text()
    assert "| 5 | 0.100 |" in report and "| 11 | 0.200 |" in report


def test_nothing_evaluated_is_said(tmp_path):
    write_run(tmp_path / "run", "a", [])
    with pytest.raises(ValueError, match="holds no evaluated retrofit"):
        write_retrofit_report(tmp_path / "run")


def test_a_panel_a_length_with_both_lines():
    points = [FrontierPoint("a", 0.1, 0.05), FrontierPoint("b", 0.2, 0.02)]
    figure = draw_frontier({2048: (points, points[:1]), 4096: (points, [])})
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["2,048 tokens", "4,096 tokens"]
    lines = {line.get_gid(): line for line in figure.axes[0].lines}
    assert list(lines["learned routing, sparse"].get_ydata()) == pytest.approx([5, 2])
    with pytest.raises(ValueError, match="no frontier"):
        draw_frontier({2048: ([], [])})


def test_names_of_close_points_hide_nothing():
    """As drawn, no name lies on another name or on a point, and each stands inside its panel."""
    places = (("one", 0.1), ("two", 0.2), ("three", 0.203), ("four", 0.206))
    points = [FrontierPoint(name, x, 0.02) for name, x in places]
    figure = draw_frontier({2048: (points, [])})
    figure.draw_without_rendering()
    axes = figure.axes[0]
    names = [Text.get_window_extent(t) for t in axes.texts if t.get_text() in dict(places)]
    assert len(names) == len(places)
    assert not any(a.overlaps(b) for a, b in itertools.combinations(names, 2))
    drawn = axes.transData.transform([(p.density, 100 * p.gap) for p in points])
    assert not any(box.contains(x, y) for box in names for x, y in drawn)
    panel = axes.get_window_extent()
    assert all(panel.contains(*corner) for box in names for corner in (box.p0, box.p1))


def test_names_are_text(tmp_path):
    """What a description says cannot become markup of the page that shows the report."""
    write_run(tmp_path, "a", [DENSE, routed("sparse", 0.1, 2.05, adapter="a")])
    path = tmp_path / "adapter.json"
    values = json.loads(path.read_text())
    for key in ("source", "architecture", "checksum"):
        values["base"][key] = "<script>alert(1)<!-- [x](y) | z"
    values["geometry"]["regimes"] = [{"name": "<img src=x>", "reach": 4.0}]
    values["geometry"]["composition"] = "a | b\n# c"
    path.write_text(json.dumps(values))
    text = write_retrofit_report(tmp_path).read_text()
    assert "script" in text and "img" in text
    assert not re.search(r"(?<!\\)<|(?<!\\)\[", text) and "\n# c" not in text
