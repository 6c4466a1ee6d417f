"""Figures show what the core computes and what records hold, and nothing else."""

import pytest
import torch
from matplotlib.figure import Figure

from benchmark_records import make_benchmark, make_wrong_benchmark
from mosar import MoSARConfig, Regime, RegimeKernel
from mosar.records import Measurement
from mosar.report.figures import (
    FORMATS,
    break_even,
    draw_decay_kernels,
    draw_speedup,
    pair_colours,
    pair_name,
    regime_pairs,
    render_figure,
)

CONFIGS = {
    "default": MoSARConfig(),
    "scaled": MoSARConfig.scaled(100, composition="min", barrier=3.0),
    "two": MoSARConfig(regimes=(Regime("near", 7.5, 0.0), Regime("all", 20, 1.0))),
    "five": MoSARConfig(
        regimes=tuple(Regime(name, 40 * i, i / 5) for i, name in enumerate("abcde", start=1))
    ),
}


def gate_lines(figure: Figure):
    """The lines of the gates by their id, e.g. "gate-SM"."""
    (axes,) = figure.axes
    lines = {line.get_gid(): line for line in axes.lines}
    return {gid: line for gid, line in lines.items() if gid and gid.startswith("gate-")}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_one_line_per_distinct_pair_with_the_kernels_values(config):
    lines = gate_lines(draw_decay_kernels(config, max_distance=120))
    num_regimes = config.num_regimes
    assert len(lines) == num_regimes * (num_regimes + 1) // 2
    gates = RegimeKernel(config)(torch.arange(121), torch.float64)
    for m in range(num_regimes):
        for n in range(m, num_regimes):
            line = lines[f"gate-{pair_name(config, m, n)}"]
            assert line.get_xdata().tolist() == list(range(121))
            assert torch.equal(torch.as_tensor(line.get_ydata()), gates[:, m, n])


def test_default_legend_names_pairs_and_reaches():
    (axes,) = draw_decay_kernels(MoSARConfig()).axes
    labels = [" ".join(text.get_text().split()) for text in axes.get_legend().get_texts()]
    assert labels == ["SS 128", "SM 320", "MM 512", "SG 1088", "MG 1280", "GG 2048, no decay"]


def test_axis_is_linear_with_ticks_at_the_reaches():
    (axes,) = draw_decay_kernels(MoSARConfig()).axes
    assert axes.get_xscale() == "linear"
    assert axes.get_xticks().tolist() == [0, 128, 320, 512, 1088, 1280, 2048]
    assert axes.get_xlim() == (0, 2304)


def test_a_pair_keeps_its_colour_whatever_its_reach():
    mean, least = MoSARConfig(), MoSARConfig(composition="min")
    colours = [
        {gid: line.get_color() for gid, line in gate_lines(draw_decay_kernels(config)).items()}
        for config in (mean, least)
    ]
    assert colours[0] == colours[1]
    for count in (1, 3, 6, 10, 21):
        assert len(set(pair_colours(count))) == count


def test_pairs_and_names():
    assert [pair_name(MoSARConfig(), m, n) for m, n in regime_pairs(MoSARConfig())] == [
        *("SS", "SM", "MM", "SG", "MG", "GG")
    ]
    assert pair_name(CONFIGS["two"], 0, 1) == "near–all"


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


def benchmark_of(length, speedup, **changes):
    measurements = {
        "sdpa": Measurement(samples_ms=(speedup,)),
        "ours": Measurement(samples_ms=(1.0,)),
    }
    return make_benchmark(length=length, measurements=measurements, **changes)


def test_speedup_lines_show_the_records():
    records = [benchmark_of(n, s) for n, s in ((4096, 4.0), (1024, 0.5), (2048, 2.0))]
    records += [benchmark_of(1024, 3.0, heads=4), make_wrong_benchmark(length=512)]
    (axes,) = draw_speedup(records).axes
    lines = {line.get_gid(): line for line in axes.lines}
    line = lines["speedup-8x1x256"]
    assert line.get_xdata().tolist() == [1024, 2048, 4096]
    assert line.get_ydata().tolist() == [0.5, 2.0, 4.0]
    assert lines["speedup-4x1x256"].get_xdata().tolist() == [1024]
    assert lines["ideal"].get_ydata() == pytest.approx([10, 10, 10])
    assert lines["break-even-8x1x256"].get_xdata() == pytest.approx([1024 * 2**0.5])
    assert "break-even-4x1x256" not in lines
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert "8x1x256: faster from 1448" in labels
    assert "4x1x256: faster from 1024 or less" in labels
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_speedup_has_a_panel_a_mode():
    modes = ("sparse", "sparse-train")
    figure = draw_speedup([benchmark_of(n, 0.5, mode=mode) for mode in modes for n in (64, 128)])
    assert [axes.get_title(loc="left").split(",")[0] for axes in figure.axes] == list(modes)
    assert render_figure(figure, "png")


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [((2, 3, 4), 1), ((0.5, 2, 4), 2**0.5), ((2, 0.5, 2), 2**1.5), ((2, 2, 0.5), None)],
)
def test_break_even_is_where_it_stays_above_one(speedups, expected):
    assert break_even((1, 2, 4), speedups) == (expected and pytest.approx(expected))


def test_no_speedup_to_draw():
    with pytest.raises(ValueError, match="no speed-up to draw"):
        draw_speedup([make_wrong_benchmark()])


def test_names_are_no_formulas():
    """A record may hold any text; half a formula would stop the report."""
    name = "$\\frac{$"
    regimes = (Regime(name, 7.5, 0.0), Regime("all", 20, 1.0))
    assert render_figure(draw_decay_kernels(MoSARConfig(regimes=regimes)), "svg")
    assert render_figure(draw_speedup([benchmark_of(64, 2.0, mode=name, labels=name)]), "svg")
