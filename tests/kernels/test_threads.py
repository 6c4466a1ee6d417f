"""Threads change the speed; a fixed number of them always gives the same bits."""

import pytest
import torch

from cases import Case
from kernels.budget import NAMES, PATHS, compare, run, run_exact, run_plain

REPEATS = 4
# With one key head several threads must share the gradients of the same keys.
SHAPES = {
    "one key head": {"batch": 1, "kv_heads": 1, "heads_per_kv": 3},
    "three key heads": {"batch": 1, "kv_heads": 3, "heads_per_kv": 1},
    "batch": {"batch": 3, "kv_heads": 2, "heads_per_kv": 2, "padding": "holes"},
}


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("impl", "kind"),
    [path for path in PATHS if path[0] != "tiled" and path[1] in ("soft", "sparse", "both")],
)
def test_threads(set_threads, shape, impl, kind):
    case = Case(dtype=torch.float32, num_queries=333, num_keys=333, head_dim=24, **SHAPES[shape])
    plain, true = run_plain(case, kind), run_exact(case, kind)
    for threads in (1, 2, 3):
        set_threads(threads)
        first, *others = (run(case, kind, impl=impl) for _ in range(REPEATS))
        for other in others:
            assert all(torch.equal(first[name], other[name]) for name in NAMES)
        compare(first, plain, true, torch.finfo(torch.float32).eps)
