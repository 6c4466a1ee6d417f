"""ModelConfig checks itself, by name."""

import dataclasses

import numpy as np
import pytest

from .models import small_model


@pytest.mark.parametrize(
    "field, value",
    [
        ("vocab_size", 0),
        ("hidden_size", 2.5),
        ("num_layers", True),
        ("num_heads", "4"),
        ("num_kv_heads", 3),
        ("head_dim", -1),
        ("ffn_size", None),
        ("max_length", 0),
        ("query_pre_attn_scalar", 0),
        ("query_pre_attn_scalar", None),
        ("attn_softcap", 0.0),
        ("final_softcap", float("nan")),
        ("norm_eps", -1e-6),
        ("init_std", float("inf")),
    ],
)
def test_wrong_values_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        small_model(**{field: value})


def test_frozen_and_plain():
    config = small_model(num_layers=np.int64(3), norm_eps=np.float32(0.5), attn_softcap=None)
    assert type(config.num_layers) is int and type(config.norm_eps) is float
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_layers = 2  # pyright: ignore[reportAttributeAccessIssue]
