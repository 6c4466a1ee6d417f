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
TRAITS = {
    "sparse": {"softcap": 50.0, "num_sinks": 4},
    "soft": {"num_regimes": 2},
    "distance": {},
    "decode": {},
    "plan": {},
}
OTHERS = [
    *(Wanted("sparse", kernel, "sm80", "float32", tf32=True) for kernel in KERNELS["sparse"]),
    Wanted("sparse", "forward", "sm90", "bfloat16", head_dim=256),
    Wanted("sparse", "key", "gfx942", "bfloat16", head_dim=256),
    Wanted("soft", "forward", "sm80", "bfloat16", softcap=50.0, num_sinks=4),
    Wanted("soft", "key", "sm90", "float16", softcap=50.0),
    *(
        Wanted("soft", kernel, "sm80", "bfloat16", num_regimes=2, far=True)
        for kernel in KERNELS["soft"]
    ),
    Wanted("decode", "decode", "gfx942", "float32", head_dim=256, share=64, softcap=50.0),
    Wanted("decode", "decode", "sm80", "bfloat16", head_dim=256, share=64),
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


# Those that compile quickly share a process.
TOGETHER = [
    (call, (kernel,)) for call in ("sparse", "soft", "distance") for kernel in KERNELS[call]
]
TOGETHER += [(call, KERNELS[call]) for call in ("decode", "plan")]


def dtypes_of(call, target):
    """A plan is made of whole numbers; float16 takes the code of bfloat16, so one target does."""
    if call == "plan":
        return DTYPES[:1]
    return [dtype for dtype in DTYPES if dtype != "float16" or target == "sm90"]


@pytest.mark.parametrize(("call", "kernels"), TOGETHER)
def test_every_dtype_and_target(tmp_path, call, kernels):
    wanted = [
        Wanted(call, kernel, target, dtype, **TRAITS[call])
        for kernel, target in itertools.product(kernels, TARGETS)
        for dtype in dtypes_of(call, target)
    ]
    results = compile_elsewhere(wanted, tmp_path)
    assert len(results) == len(wanted)
    assert_fits(results)


def test_other_traits(tmp_path):
    results = compile_elsewhere(OTHERS, tmp_path)
    assert len(results) == len(OTHERS)
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
