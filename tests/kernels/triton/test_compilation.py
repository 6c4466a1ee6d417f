"""The kernels compile for GPUs that are not here, and fit into them."""

import itertools

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

# Mixtures of three regimes take three times as long to compile as those of two.
TRAITS = {"sparse": {"softcap": 50.0, "num_sinks": 4}, "soft": {"num_regimes": 2}}
OTHERS = {
    "sparse": [
        Wanted("sparse", "key", "sm80", "float32", tf32=True),
        Wanted("sparse", "forward", "sm90", "bfloat16", head_dim=256),
        Wanted("sparse", "key", "gfx942", "bfloat16", head_dim=256),
        Wanted("sparse", "query", "sm90", "float16"),
    ],
    "soft": [
        Wanted("soft", "forward", "sm80", "float16", softcap=50.0, num_sinks=4, num_regimes=2),
        Wanted("soft", "key", "sm90", "float16", softcap=50.0),
        Wanted("soft", "forward", "sm80", "bfloat16", num_regimes=2, far=True),
        Wanted("soft", "key", "gfx942", "bfloat16", num_regimes=2, far=True),
    ],
    "decode": [
        Wanted("decode", "decode", "gfx942", "float32", head_dim=256, share=64, softcap=50.0),
        Wanted("decode", "decode", "sm80", "float16", head_dim=256, share=64),
    ],
}


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


def wanted_of(call):
    """bfloat16 on every target; float32, which spills most where registers are fewest, on one."""
    # What is special to sm90 is how matrices are multiplied: that is the same for every bias.
    targets = (
        TARGETS if call in ("sparse", "soft", "decode", "keyed sparse") else ("sm80", "gfx942")
    )
    for kernel, target in itertools.product(KERNELS[call], targets):
        # A plan is made of whole numbers, and its kernels know no dtype.
        for dtype in DTYPES[:1] if call == "plan" or target != "sm80" else ("bfloat16", "float32"):
            yield Wanted(call, kernel, target, dtype, **TRAITS.get(call, {}))
    yield from OTHERS.get(call, ())


def check(wanted, folder):
    results = compile_elsewhere(wanted, folder)
    assert len(results) == len(wanted)
    assert_fits(results)


def test_every_kernel(tmp_path):
    """Each on one target: the targets take turns, and `slow` has the rest."""
    check(
        [
            Wanted(call, kernel, TARGETS[i % len(TARGETS)], DTYPES[0], **TRAITS.get(call, {}))
            for call, kernels in KERNELS.items()
            for i, kernel in enumerate(kernels)
        ],
        tmp_path,
    )


@pytest.mark.slow
@pytest.mark.parametrize("call", KERNELS)
def test_every_kernel_and_target(tmp_path, call):
    check(list(wanted_of(call)), tmp_path)


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
