"""The worth field: bounds, groups, precision, gradients."""

import math

import pytest
import torch
from hypothesis import given

from cases import SMALL, Case, cases
from mosar import WorthField
from mosar.core.layout import resolve_layout


def causal_distances(num_queries, num_keys):
    positions = torch.arange(num_keys)
    return positions[num_keys - num_queries :, None] - positions[None, :]


@given(cases())
def test_worth_lies_between_the_floor_and_one(case):
    layout = resolve_layout(case.batch, case.num_queries, case.num_keys, **case.placement)
    distances = layout.distances() if case.pi_q.dim() == 3 else layout.distances()[:, None]
    field = WorthField(case.config)(case.pi_q, case.pi_k, distances)
    config = case.config
    assert field.worth.min() >= config.floor * math.exp(-config.barrier) * (1 - 1e-12)
    assert field.worth.max() <= 1 + 1e-12
    assert torch.equal(field.bias, field.worth.clamp_min(config.epsilon).log())
    if config.floor == 1:
        assert torch.equal(field.bias, field.worth.log())


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
