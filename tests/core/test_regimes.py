"""The geometry of regime pairs and their gates."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import configs, geometry
from core import outsider
from mosar import MoSARConfig, Regime, RegimeKernel, pair_geometry

PAPER_PAIRS = [
    ("SS", 128, 96, 32),
    ("SM", 320, 200, 120),
    ("MM", 512, 256, 256),
    ("SG", 1088, 952, 136),
    ("MG", 1280, 960, 320),
    ("GG", 2048, 2048, 0),
]


def distance_grid(config, num=2001):
    """Real distances from 0 to well past every reach, with every T and T + L among them."""
    table = pair_geometry(config)
    ends = torch.cat([table.plateau.flatten(), (table.plateau + table.transition).flatten()])
    grid = torch.linspace(0, 1.5 * float(table.reach.max()), num, dtype=torch.float64)
    return torch.cat([grid, ends]).sort().values


def local_pairs(config):
    """All (m, n) but the global pair."""
    regimes = range(config.num_regimes)
    last = config.global_index
    return [(m, n) for m in regimes for n in regimes if (m, n) != (last, last)]


@pytest.mark.parametrize(("pair", "reach", "plateau", "transition"), PAPER_PAIRS)
def test_pair_table_of_the_paper(pair, reach, plateau, transition):
    config = MoSARConfig()
    m, n = (config.regime_index(name) for name in pair)
    for a, b in ((m, n), (n, m)):
        table = [float(entry[a, b]) for entry in pair_geometry(config)]
        assert table == [reach, plateau, transition]


@given(configs())
def test_pair_table_agrees_with_the_outsider(config):
    support = {key: geometry(config)[key] for key in ("regimes", "composition")}
    table = torch.stack(list(pair_geometry(config)))
    for m in range(config.num_regimes):
        for n in range(config.num_regimes):
            assert table[:, m, n].tolist() == list(outsider.pair_table(m, n, **support))


@given(configs())
def test_gate_agrees_with_the_outsider(config):
    law = {key: geometry(config)[key] for key in ("regimes", "composition")}
    law |= {name: getattr(config, name) for name in ("barrier", "exponent", "floor")}
    distances = distance_grid(config, num=41)
    gate = RegimeKernel(config)(distances)
    regimes = range(config.num_regimes)
    expected = [
        [[outsider.gate(float(d), m, n, **law) for n in regimes] for m in regimes]
        for d in distances
    ]
    np.testing.assert_allclose(gate.numpy(), expected, rtol=1e-12, atol=0)


@given(st.integers(1, 100), st.sampled_from((0.5, 6.0)))
def test_gate_is_a_step_where_there_is_no_transition(reach, barrier):
    regimes = (Regime("S", reach / 3, 1.0), Regime("G", 2 * reach, 1.0))
    config = MoSARConfig(regimes=regimes, barrier=barrier)
    kernel, table = RegimeKernel(config), pair_geometry(config)
    for m, n in local_pairs(config):
        edge = table.reach[m, n]
        after = torch.nextafter(edge, torch.tensor(math.inf, dtype=torch.float64))
        assert table.transition[m, n] == 0
        assert kernel(edge)[m, n] == 1.0
        assert float(kernel(after)[m, n]) == pytest.approx(math.exp(-barrier), rel=1e-12)


def test_the_global_pair_does_not_decay_even_with_a_transition():
    config = MoSARConfig(regimes=(Regime("S", 2, 0.5), Regime("G", 8, 0.25)))
    assert pair_geometry(config).transition[-1, -1] == 6
    assert RegimeKernel(config)(torch.tensor([7, 8, 9, 10**6]))[:, -1, -1].tolist() == [1.0] * 4


@given(configs())
def test_negative_distances_count_as_zero(config):
    kernel = RegimeKernel(config)
    gate = kernel(torch.tensor([-1, -1000, 0]))
    assert torch.equal(gate[0], gate[2])
    assert torch.equal(gate[1], gate[2])
    assert torch.equal(gate[2], torch.ones_like(gate[2]))


def test_gate_is_evaluated_in_float64_and_rounded_once():
    kernel, distances = RegimeKernel(MoSARConfig()), torch.arange(3000)
    exact = kernel(distances, torch.float64)
    assert torch.equal(kernel(distances), exact.float())
    assert torch.equal(kernel.to(torch.bfloat16)(distances, torch.float64), exact)
