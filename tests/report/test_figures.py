"""The figure of the decay kernels shows the gates that the core computes, and nothing else."""

import pytest
import torch
from matplotlib.figure import Figure

from mosar import MoSARConfig, Regime, RegimeKernel
from mosar.report.figures import (
    FORMATS,
    draw_decay_kernels,
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
