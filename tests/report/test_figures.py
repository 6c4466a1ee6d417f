"""Figures show what the core computes and what records hold, and nothing else."""

import itertools

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmark_records import make_benchmark, make_wrong_benchmark
from mosar import MoSARConfig, Regime, RegimeKernel
from mosar.records import Measurement
from mosar.report.charts import Chart, Point, Series
from mosar.report.curves import break_even
from mosar.report.drawing import (
    FORMATS,
    draw_charts,
    enough_ticks,
    render_figure,
    tick_levels,
    y_domain,
)
from mosar.report.figures import draw_decay_kernels, draw_speedup
from mosar.report.palette import NEUTRAL, VARIANTS, pair_looks
from mosar.report.routing_charts import regime_pairs

CONFIGS = {
    "default": MoSARConfig(),
    "scaled": MoSARConfig.scaled(100, composition="min", barrier=3.0),
    "two": MoSARConfig(regimes=(Regime("near", 7.5, 0.0), Regime("all", 20, 1.0))),
    "five": MoSARConfig(
        regimes=tuple(Regime(name, 40 * i, i / 5) for i, name in enumerate("abcde", start=1))
    ),
}


def lines_of(figure: Figure):
    """The lines of the only axes, by their ids."""
    (axes,) = figure.axes
    return {line.get_gid(): line for line in axes.lines}


def legend_of(figure: Figure):
    (axes,) = figure.axes
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_one_line_per_distinct_pair_with_the_kernels_values(config):
    lines = lines_of(draw_decay_kernels(config, max_distance=96))
    pairs = regime_pairs(config)
    assert len(pairs) == config.num_regimes * (config.num_regimes + 1) // 2
    gates = RegimeKernel(config)(torch.arange(97), torch.float64)
    for (m, n), name in pairs.items():
        line = lines[f"gate-{name}"]
        assert line.get_xdata().tolist() == list(range(97))
        assert torch.equal(torch.as_tensor(line.get_ydata()), gates[:, m, n])


def test_kernels_of_the_default_geometry():
    figure = draw_decay_kernels(MoSARConfig())
    assert legend_of(figure) == [
        *("SS 128", "SM 320", "MM 512", "SG 1088", "MG 1280", "GG 2048, no decay")
    ]
    (axes,) = figure.axes
    assert axes.get_xscale() == "linear"
    assert axes.get_xticks().tolist() == [0, 128, 320, 512, 1088, 1280, 2048]
    line = lines_of(figure)["gate-SS"]
    # Where a gate falls it is drawn closely.
    falling = [x for x in line.get_xdata() if 96 <= x <= 128]
    assert len(falling) >= 25 and line.get_xdata()[-1] == 2304


def test_a_pair_keeps_its_colour_whatever_its_reach():
    mean, least = (
        {gid: line.get_color() for gid, line in lines_of(draw_decay_kernels(config)).items()}
        for config in (MoSARConfig(), MoSARConfig(composition="min"))
    )
    assert mean == least
    for count in (1, 3, 6, 10, 21):
        looks = pair_looks(map(str, range(count))).values()
        assert len({look.light for look in looks}) == len({look.dark for look in looks}) == count


@pytest.mark.parametrize("file_format", FORMATS)
def test_rendering_is_reproducible(file_format):
    first, second = (
        render_figure(draw_decay_kernels(CONFIGS["two"]), file_format) for _ in range(2)
    )
    assert first == second


def test_bad_input():
    with pytest.raises(ValueError, match="max_distance must be >= 1, got 0"):
        draw_decay_kernels(MoSARConfig(), max_distance=0)
    with pytest.raises(ValueError, match=r"format must be one of .* got 'gif'"):
        render_figure(draw_decay_kernels(MoSARConfig()), "gif")
    with pytest.raises(ValueError, match="no speed-up to draw"):
        draw_speedup([make_wrong_benchmark()])


def benchmark_of(length, speedup, **changes):
    times = {"sdpa": Measurement(samples_ms=(speedup,)), "ours": Measurement(samples_ms=(1.0,))}
    return make_benchmark(length=length, measurements=times, **changes)


def test_speedup_lines_show_the_records():
    records = [benchmark_of(n, s) for n, s in ((4096, 4.0), (1024, 0.5), (2048, 2.0))]
    records += [benchmark_of(1024, 3.0, heads=4), make_wrong_benchmark(length=512)]
    figure = draw_speedup(records)
    lines = lines_of(figure)
    line = lines["speedup-8x1x256"]
    assert line.get_xdata().tolist() == [1024, 2048, 4096]
    assert line.get_ydata().tolist() == [0.5, 2.0, 4.0]
    assert lines["speedup-4x1x256"].get_xdata().tolist() == [1024]
    assert lines["ideal"].get_ydata() == pytest.approx([10, 10, 10])
    ring = lines["speedup-8x1x256-break-even"]
    assert ring.get_xdata() == pytest.approx([1024 * 2**0.5])
    assert "speedup-4x1x256-break-even" not in lines
    assert legend_of(figure)[:2] == [
        "8x1x256: faster from 1448",
        "4x1x256: faster from 1024 or less",
    ]
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_speedup_has_a_panel_per_mode():
    modes = ("sparse", "sparse-train")
    figure = draw_speedup([benchmark_of(n, 0.5, mode=mode) for mode in modes for n in (64, 128)])
    titles = [axes.get_title(loc="left").split(": ")[1].split(",")[0] for axes in figure.axes]
    assert titles == list(modes) and render_figure(figure, "png")


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [((2, 3, 4), 1), ((0.5, 2, 4), 2**0.5), ((2, 0.5, 2), 2**1.5), ((2, 2, 0.5), None)],
)
def test_break_even_is_where_it_stays_above_one(speedups, expected):
    assert break_even((1, 2, 4), speedups) == (expected and pytest.approx(expected))


def test_names_are_no_formulas():
    """A record may hold any text; half a formula would stop the report."""
    name = "$\\frac{$"
    regimes = (Regime(name, 7.5, 0.0), Regime("all", 20, 1.0))
    assert render_figure(draw_decay_kernels(MoSARConfig(regimes=regimes)), "svg")
    assert render_figure(draw_speedup([benchmark_of(64, 2.0, mode=name, labels=name)]), "svg")


def ticks(low, high, **options):
    return enough_ticks(tick_levels(low, high, **options), low, high)


def test_ticks_are_round_and_inside():
    assert [label for _, label in ticks(0, 1)] == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    assert [label for _, label in ticks(3, 480, log=True)] == ["3", "10", "30", "100", "300"]
    assert [label for _, label in ticks(32.1, 34.2, log=True)] == ["32.5", "33", "33.5", "34"]
    assert [label for _, label in ticks(94, 151, log=True)] == [f"{n}" for n in range(100, 151, 10)]
    assert [label for _, label in ticks(-35, 5, unit=" %")] == [*("−30 %", "−20 %", "−10 %", "0 %")]
    for log, low, high in (
        *((False, 0.013, 0.014), (False, -31.0, 95.0), (False, 1e-6, 3e-6), (False, 5, 5.0001)),
        *((True, 1e-6, 3e-2), (True, 1.0, 1e7), (True, 99.9, 100.3)),
    ):
        found = ticks(low, high, log=log)
        assert 4 <= len(found) <= 10
        assert all(low - 1e-9 <= value <= high + 1e-9 for value, _ in found)
        assert len({label for _, label in found}) == len(found)


def chart_of(*values, **options):
    series = tuple(
        Series(key=str(i), look=VARIANTS["rope"], points=(Point(1, y, ""),))
        for i, y in enumerate(values)
    )
    texts = dict.fromkeys(("name", "title", "caption", "x_label", "y_label"), "a")
    chart = Chart(**texts, series=series, **options)
    return y_domain(chart, chart.series)


def test_domains_hold_what_is_drawn():
    low, high = chart_of(3.0, 5.0)
    assert low < 3 < 5 < high
    assert chart_of(3.0, 5.0, y_zero=True)[0] == 0
    assert chart_of(-3.0, 5.0, y_zero=True)[0] < -3
    assert chart_of(3.0, 5.0, line_at=-4.0)[0] < -4
    low, high = chart_of(4.0, y_log=True)
    assert 0 < low < 4 < high
    assert chart_of(3.0, 4.0, 90.0, cap=5.0)[1] < 5 < 90 < chart_of(90.0, cap=5.0)[1]


def test_names_of_crowded_points_do_not_lie_on_each_other():
    points = tuple(Point(1 + 0.004 * i, 200 + i % 3, f"setting={i}") for i in range(9))
    far = (Point(1.2, 260, "far to the right"), Point(0.8, 199, "far to the left"))
    line = Series(key="a", look=NEUTRAL, points=points + far, dash="none", annotated=True)
    chart = Chart(name="c", title="", caption="", x_label="x", y_label="y", series=(line,))
    figure = draw_charts([chart])
    figure.canvas.draw()
    (axes,) = figure.axes
    # As it is from its point on, without the line that may lead there.
    names = [
        Text.get_window_extent(text).translated(*axes.transData.transform(text.xy))
        for text in axes.texts
    ]
    assert len(names) == 11
    box = axes.get_window_extent().padded(1)
    assert all(box.x0 <= n.x0 and n.x1 <= box.x1 for n in names)
    assert not any(a.overlaps(b) for a, b in itertools.combinations(names, 2))
