"""Errors must not grow with the number of terms: of keys in a row, of queries on a key."""

import pytest
import torch

from cases import Case
from kernels.budget import PATHS, assert_within_budget
from mosar import MoSARConfig, Regime

CONFIG = MoSARConfig(
    regimes=(Regime("S", 128, 0.75), Regime("M", 512, 0.5), Regime("G", 2048, 1.0))
)
BASE = Case(config=CONFIG, dtype=torch.float32, head_dim=8, heads_per_kv=2)
# "planned" is "native" at these lengths.
paths = pytest.mark.parametrize(
    "kind", [kind for impl, kind in PATHS if impl == "native" and kind != "log_gate_per_head"]
)


@paths
@pytest.mark.parametrize("scale", [None, 0.0])
@pytest.mark.parametrize(
    ("num_queries", "num_keys"),
    [
        (3, 20_000),
        pytest.param(3, 100_000, marks=pytest.mark.slow),
        pytest.param(2, 1_000_000, marks=pytest.mark.slow),
    ],
)
def test_many_keys(kind, num_queries, num_keys, scale):
    case = BASE.with_(num_queries=num_queries, num_keys=num_keys, scale=scale)
    # Slopes make logits of thousands.
    assert_within_budget(case, kind, impl="native", conditioned=kind in ("slopes", "both"))


@paths
@pytest.mark.parametrize("num_queries", [20_000, pytest.param(300_000, marks=pytest.mark.slow)])
def test_many_queries(kind, num_queries):
    """The gradients of a few keys, which all queries read."""
    case = BASE.with_(num_queries=num_queries, num_keys=3, positions="gaps")
    assert_within_budget(case, kind, impl="native")
