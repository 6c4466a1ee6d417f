"""Which blocks are timed, and which are taken as they are."""

import pytest
import torch

from mosar.kernels.triton import blocks
from mosar.kernels.triton.blocks import KERNELS, Blocks, candidates, choose, length_class

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GPU = torch.device("cuda", 0)
each_kernel = pytest.mark.parametrize("name", KERNELS)


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(blocks, "is_interpreted", lambda: False)


def numbers(config):
    return Blocks(
        config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"], config.num_warps, config.num_stages
    )


@each_kernel
@pytest.mark.parametrize("hip", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [1, 16, 80, 128, 200, 256])
def test_every_head_dim_has_a_small_set(name, hip, dtype, head_dim):
    found = candidates(name, head_dim, dtype, hip=hip)
    assert 2 <= len(found) <= 3
    assert len(set(found)) == len(found)
    for rows, keys, warps, stages in found:
        # What tl.dot takes, and what launches take.
        assert rows >= 16 and keys >= 16
        assert all(number.bit_count() == 1 for number in (rows, keys, warps))
        assert 1 <= stages <= 3


@each_kernel
def test_the_set_is_timed_once_per_kind_of_call(on_a_gpu, name):
    tuner, given = choose(name, 64, torch.bfloat16, GPU)
    assert not given
    assert tuple(map(numbers, tuner.configs)) == candidates(name, 64, torch.bfloat16)
    assert choose(name, 40, torch.float16, GPU)[0] is tuner
    assert choose(name, 256, torch.bfloat16, GPU)[0] is not tuner
    # What is best on one card may not fit into another.
    assert choose(name, 64, torch.bfloat16, torch.device("cuda", 1))[0] is not tuner
    # Triton leaves out, without a word, what is no argument.
    assert set(tuner.keys) <= set(KERNELS[name].arg_names)
    assert {"SHARE", "HEAD_DIM", "BIAS", "PRECISION", "length_class"} <= set(tuner.keys)


@each_kernel
def test_deterministic_algorithms_fix_the_order_of_sums(on_a_gpu, name):
    torch.use_deterministic_algorithms(True)
    try:
        kernel, given = choose(name, 256, torch.float32, GPU)
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernel is KERNELS[name]
    assert Blocks(*given.values()) == candidates(name, 256, torch.float32)[0]


def test_lengths_are_timed_apart():
    classes = [length_class(length) for length in (1, 1024, 1025, 8192, 8193, 10**6)]
    assert classes == [0, 0, 1, 1, 2, 2]


def test_heads_are_divided_until_the_device_is_full(monkeypatch):
    monkeypatch.setattr(blocks, "_num_processors", lambda device: 100)
    device = torch.device("cuda")
    assert blocks.num_splits(200, 8, device) == 1
    assert blocks.num_splits(100, 8, device) == 2
    assert blocks.num_splits(1, 8, device) == 8
    # Parts are equal, so an odd number of heads stays together.
    assert blocks.num_splits(1, 9, device) == 1
    assert blocks.num_splits(1, 6, device) == 2
