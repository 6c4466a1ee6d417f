"""The worth field: bounds, groups, precision, gradients."""

import math

import pytest
import torch
from hypothesis import given
from torch.autograd import gradcheck

from cases import SMALL, Case, cases
from mosar import MoSARConfig, WorthField, forced_routing
from mosar.core.layout import resolve_layout


def causal_distances(num_queries, num_keys):
    positions = torch.arange(num_keys)
    return positions[num_keys - num_queries :, None] - positions[None, :]


@given(cases())
def test_worth_lies_between_the_floor_and_one(case):
    layout = resolve_layout(case.batch, case.num_queries, case.num_keys, **case.placement)
    distances = layout.distances() if case.pi_q.dim() == 3 else layout.distances()[:, None]
    field = WorthField(case.config)(case.pi_q, case.pi_k, distances)
    assert field.worth.min() >= math.exp(-case.config.barrier) * (1 - 1e-12)
    assert field.worth.max() <= 1 + 1e-12
    assert torch.equal(field.bias, field.worth.log())


def test_groups_and_distances_broadcast():
    case = Case(config=MoSARConfig.scaled(16, routing_groups=2), batch=2, kv_heads=2)
    field, distances = WorthField(case.config), causal_distances(6, 6)
    whole = field(case.pi_q, case.pi_k, distances).worth
    assert whole.shape == (2, 2, 6, 6)
    assert torch.equal(whole, field(case.pi_q, case.pi_k, distances.expand(2, 1, 6, 6)).worth)
    for group in range(2):
        alone = field(case.pi_q[:, group], case.pi_k[:, group], distances).worth
        torch.testing.assert_close(whole[:, group], alone, atol=1e-14, rtol=0)


def test_distances_may_differ_between_rows():
    case = Case(batch=2)
    field = WorthField(SMALL)
    distances = torch.stack([causal_distances(6, 6), causal_distances(6, 6) + 2])
    whole = field(case.pi_q, case.pi_k, distances).worth
    for row in range(2):
        alone = field(case.pi_q[row], case.pi_k[row], distances[row]).worth
        torch.testing.assert_close(whole[row], alone, atol=1e-14, rtol=0)
    assert not torch.allclose(whole[0], whole[1])


@pytest.mark.parametrize(
    ("query_dtype", "key_dtype", "expected"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16, torch.float32),
    ],
)
def test_dtype_is_at_least_float32(query_dtype, key_dtype, expected):
    case = Case()
    pi_q, pi_k = case.pi_q.to(query_dtype), case.pi_k.to(key_dtype)
    field = WorthField(SMALL)(pi_q, pi_k, causal_distances(6, 6))
    assert field.worth.dtype == field.bias.dtype == expected


def test_autocast_does_not_touch_worth():
    case, field = Case(dtype=torch.float32), WorthField(SMALL)
    expected = field(case.pi_q, case.pi_k, causal_distances(6, 6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = field(case.pi_q, case.pi_k, causal_distances(6, 6))
    assert result.worth.dtype == torch.float32
    assert torch.equal(result.worth, expected.worth)
    assert torch.equal(result.bias, expected.bias)


@pytest.mark.parametrize("regime", ["S", "M"])
def test_one_hot_routing_picks_one_gate(regime):
    field, distances = WorthField(SMALL), causal_distances(6, 6)
    pi = forced_routing(SMALL, regime, 1, 6, dtype=torch.float64)
    index = SMALL.regime_index(regime)
    gate = field.kernel(distances, torch.float64)[..., index, index]
    assert torch.equal(field(pi, pi, distances).worth[0], gate)


@pytest.mark.parametrize("grouped", [False, True])
def test_gradients(grouped):
    config = MoSARConfig.scaled(8, routing_groups=2 if grouped else 1)
    case = Case(config=config, batch=2, kv_heads=2, num_queries=3, num_keys=4)
    field, distances = WorthField(config), causal_distances(3, 4)

    def worth_and_bias(pi_q, pi_k):
        result = field(pi_q, pi_k, distances)
        return result.worth, result.bias

    assert gradcheck(worth_and_bias, (case.pi_q.requires_grad_(), case.pi_k.requires_grad_()))
