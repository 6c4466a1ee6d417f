"""The reach cost, and the paper's reported reach recomputed from its routing shares."""

import pytest
import torch

from mosar import MoSARConfig, forced_routing, normalized_reach_cost
from mosar.core.losses import normalized_reach


def shares(short, global_):
    """A distribution over S, M, G from the shares a table reports."""
    return torch.tensor([short, 1 - short - global_, global_], dtype=torch.float64)


# length, soft reach as reported, q_S, q_G, k_S, k_G
MOSAR = [
    (2048, 0.2193, 0.741, 0.108, 0.681, 0.166),
    (4096, 0.1878, 0.734, 0.114, 0.666, 0.180),
    (8192, 0.1690, 0.734, 0.115, 0.640, 0.181),
]
MOSAR_COST = [
    (2048, 0.0887, 0.955, 0.010, 0.890, 0.021),
    (4096, 0.0562, 0.934, 0.017, 0.878, 0.020),
    (8192, 0.0858, 0.812, 0.079, 0.794, 0.051),
]


def reach_of(length, q_short, q_global, k_short, k_global):
    pi_q, pi_k = shares(q_short, q_global), shares(k_short, k_global)
    return float(normalized_reach_cost(pi_q, pi_k, MoSARConfig(), length=length))


@pytest.mark.parametrize(
    ("row", "tolerance"),
    [*((row, 3e-4) for row in MOSAR), *((row, 1e-4) for row in MOSAR_COST)],
    ids=lambda value: f"{value[0]}" if isinstance(value, tuple) else "",
)
def test_reported_soft_reach_follows_from_the_routing_shares(row, tolerance):
    length, reported, *routing_shares = row
    assert reach_of(length, *routing_shares) == pytest.approx(reported, abs=tolerance)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (None, [0.0625, 0.25, 1.0]),
        (2048, [0.0625, 0.25, 1.0]),
        (8192, [128 / 8192, 512 / 8192, 1.0]),
        (256, [0.5, 1.0, 1.0]),
    ],
)
def test_normalized_reach(length, expected):
    assert normalized_reach(MoSARConfig(), length).tolist() == expected


@pytest.mark.parametrize(("regime", "cost"), [("S", 0.0625), ("M", 0.25), ("G", 1.0)])
def test_forced_routing_costs_its_reach(regime, cost):
    pi = forced_routing(MoSARConfig(), regime, 2, 7)
    assert float(normalized_reach_cost(pi, pi, MoSARConfig())) == cost


def test_roles_weigh_equally_whatever_their_lengths():
    config = MoSARConfig()
    pi_q = forced_routing(config, "S", 1, 1)
    pi_k = forced_routing(config, "G", 3, 100)
    assert float(normalized_reach_cost(pi_q, pi_k, config)) == pytest.approx((0.0625 + 1) / 2)


def test_groups_are_averaged():
    config = MoSARConfig()
    pi = torch.stack([forced_routing(config, name, 2, 5) for name in ("S", "M")], dim=1)
    assert float(normalized_reach_cost(pi, pi, config)) == pytest.approx((0.0625 + 0.25) / 2)


def test_gradient_is_the_price_of_each_regime():
    config = MoSARConfig()
    pi_q = torch.full((2, 5, 3), 1 / 3, dtype=torch.float64, requires_grad=True)
    pi_k = torch.full((2, 8, 3), 1 / 3, dtype=torch.float64, requires_grad=True)
    normalized_reach_cost(pi_q, pi_k, config).backward()
    for pi in (pi_q, pi_k):
        expected = normalized_reach(config) / (2 * pi.shape[0] * pi.shape[1])
        torch.testing.assert_close(pi.grad, expected.expand(pi.shape))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2],
)
def test_dtype_is_at_least_float32(dtype, expected):
    pi = forced_routing(MoSARConfig(), "S", 1, 4, dtype=dtype)
    cost = normalized_reach_cost(pi, pi, MoSARConfig())
    assert cost.dtype == expected
    assert cost.shape == ()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"pi_q": torch.ones(2, 5, 2)}, "pi_q .*3 regimes"),
        ({"pi_k": torch.ones(2, 5, 4)}, "pi_k .*3 regimes"),
        ({"pi_k": torch.tensor(1.0)}, "pi_k .*3 regimes"),
        ({"length": 0}, "length .*0"),
        ({"length": -3}, "length .*-3"),
    ],
)
def test_wrong_input_is_named(changes, match):
    good = {"pi_q": torch.ones(2, 5, 3) / 3, "pi_k": torch.ones(2, 5, 3) / 3}
    with pytest.raises(ValueError, match=match):
        normalized_reach_cost(config=MoSARConfig(), **(good | changes))
