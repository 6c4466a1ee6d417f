"""The kernels compile for GPUs that are not here, and fit into them."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.triton.compilation import (
    CONSUMER_LIMIT,
    DTYPES,
    KERNELS,
    SHARED_LIMIT,
    TARGETS,
    Wanted,
    compile_elsewhere,
)

PROGRAMS = Path(__file__).parent
# Every kernel with every target and every dtype, and every dtype with every target.
SQUARE = [
    Wanted("sparse", kernel, target, DTYPES[(i + j) % 3])
    for i, kernel in enumerate(KERNELS["sparse"])
    for j, target in enumerate(TARGETS)
]
OTHERS = [
    # Mixtures of three regimes take three times as long to compile.
    Wanted("soft", "forward", "sm90", "bfloat16", num_regimes=2),
    Wanted("soft", "query", "sm80", "float16", num_regimes=2),
    Wanted("soft", "key", "gfx942", "bfloat16", num_regimes=2),
    Wanted("distance", "forward", "sm80", "float16", softcap=50.0),
    *(
        Wanted("decode", kernel, target, dtype)
        for kernel in KERNELS["decode"]
        for target, dtype in zip(TARGETS, DTYPES, strict=True)
    ),
    Wanted("decode", "decode", "gfx942", "float32", head_dim=256),
    *(
        Wanted("plan", kernel, target, "float16")
        for kernel in KERNELS["plan"]
        for target in TARGETS
    ),
]


def assert_fits(results):
    for result in results:
        assert result["shared"] <= SHARED_LIMIT[result["target"]], result
        if result["target"] == "sm80" and result["is_first"]:
            assert result["shared"] <= CONSUMER_LIMIT, result
        # float32 is not what these kernels are fast in; more than 4096 would mean that a tile does
        # not fit into a thread's registers at all.
        limit = 512 if result["dtype"] != "float32" else 2048
        assert result["spilled"] <= (limit if result["is_first"] else 4096), result
        assert 0 < result["registers"] <= 512, result


def test_every_kernel_and_target(tmp_path):
    wanted = SQUARE + OTHERS
    results = compile_elsewhere(wanted, tmp_path)
    assert len(results) == len(wanted)
    assert_fits(results)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("call", KERNELS)
def test_everything_fits(tmp_path, call, target, dtype):
    """Every candidate block of every kernel at every padded head dim."""
    wanted = [
        Wanted(call, kernel, target, dtype, head_dim, 4, 50.0, 4, every_block=True)
        for kernel, head_dim in itertools.product(KERNELS[call], (16, 64, 128, 256))
    ]
    assert_fits(compile_elsewhere(wanted, tmp_path))


def test_compiled_graphs_hold_the_kernels():
    """torch.compile traces through the operators, forward and backward."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "tracing.py")],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    sorting = ["count", "scan", "place"]
    expected = [*sorting, *sorting, "runs", "forward", "query", "readers", "key"]
    assert done.stdout.split() == expected, done.stdout
