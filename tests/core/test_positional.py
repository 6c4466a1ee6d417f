"""Rotation against complex numbers, ALiBi's slopes against their published values, segments."""

import pytest
import torch

from mosar.core.positional import (
    alibi_slopes,
    positions_in_segments,
    rotate,
    rotation,
)


def rotate_by_definition(x, positions, *, theta=10000.0, rotated=None):
    """x1 + i x2 times e^(i angle), dimension pair by dimension pair, in float64."""
    half = x.shape[-1] // 2
    frequency = theta ** (torch.arange(half).double() * -2 / x.shape[-1])
    frequency[half if rotated is None else rotated :] = 0
    angle = positions[:, :, None, None].double() * frequency
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize("head_dim", [2, 8, 34])
@pytest.mark.parametrize("theta", [10000.0, 37.0])
def test_rotation_is_multiplication_by_a_unit_complex_number(head_dim, theta):
    x = torch.randn(2, 21, 3, head_dim, dtype=torch.float64)
    positions = torch.randint(0, 1000, (2, 21))
    turn = rotation(positions, head_dim, theta=theta, dtype=torch.float64)
    torch.testing.assert_close(rotate(x, *turn), rotate_by_definition(x, positions, theta=theta))


@pytest.mark.parametrize(
    "fraction, head_dim, rotated",
    [(0.75, 8, 3), (0.75, 256, 96), (0.75, 6, 2), (0.58, 100, 29), (0.0, 8, 0), (1.0, 10, 5)],
)
def test_a_fraction_keeps_the_highest_frequencies(fraction, head_dim, rotated):
    x = torch.randn(1, 9, 2, head_dim, dtype=torch.float64)
    positions = torch.arange(9)[None]
    turn = rotation(positions, head_dim, fraction=fraction, dtype=torch.float64)
    out = rotate(x, *turn)
    torch.testing.assert_close(out, rotate_by_definition(x, positions, rotated=rotated))
    half = head_dim // 2
    assert torch.equal(out[..., rotated:half], x[..., rotated:half])
    assert torch.equal(out[..., half + rotated :], x[..., half + rotated :])


def test_the_table_holds_what_is_computed_directly(monkeypatch):
    positions = torch.tensor([[0, 3, 3, 1000, 5]])
    from_table = rotation(positions, 12, fraction=0.5)
    monkeypatch.setattr("mosar.core.positional.can_check_values", lambda tensor: False)
    for a, b in zip(from_table, rotation(positions, 12, fraction=0.5), strict=True):
        assert a.shape == (1, 5, 1, 6)
        assert torch.equal(a, b)


def test_positions_may_lie_between_integers():
    x = torch.randn(1, 9, 2, 8, dtype=torch.float64)
    positions = torch.arange(9).double()[None] / 4
    turn = rotation(positions, 8, dtype=torch.float64)
    torch.testing.assert_close(rotate(x, *turn), rotate_by_definition(x, positions))


def test_the_gradient_is_the_rotation_back():
    x = torch.randn(1, 4, 2, 6, dtype=torch.float64, requires_grad=True)
    turn = rotation(torch.arange(4)[None], 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotate(x, *turn), x)
    assert torch.autograd.gradgradcheck(lambda x: rotate(x, *turn), x)


def test_any_layout_in_a_contiguous_one_out():
    x = torch.randn(2, 3, 5, 8).transpose(1, 2)
    turn = rotation(torch.arange(5)[None], 8)
    out = rotate(x, *turn)
    assert out.is_contiguous()
    assert torch.equal(out, rotate(x.contiguous(), *turn))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rotated_in_float32_and_rounded_once(dtype):
    x = torch.randn(1, 7, 2, 8).to(dtype)
    turn = rotation(torch.arange(7)[None] * 100, 8)
    out = rotate(x, *turn)
    assert out.dtype == dtype
    assert torch.equal(out, rotate(x.float(), *turn).to(dtype))


def test_a_table_made_in_inference_mode_serves_training():
    with torch.inference_mode():
        rotation(torch.arange(3)[None], 22)
    x = torch.randn(1, 3, 1, 22, requires_grad=True)
    rotate(x, *rotation(torch.arange(3)[None], 22)).sum().backward()
    assert x.grad is not None


# As printed by the implementation that accompanies the ALiBi paper.
SLOPES = {
    1: [2**-8],
    2: [2**-4, 2**-8],
    3: [2**-4, 2**-8, 2**-2],
    8: [2**-i for i in range(1, 9)],
    12: [*(2**-i for i in range(1, 9)), *(2**-i for i in (0.5, 1.5, 2.5, 3.5))],
}


@pytest.mark.parametrize("heads", SLOPES)
def test_alibi_slopes(heads):
    assert alibi_slopes(heads) == pytest.approx(SLOPES[heads])


def test_positions_restart_in_each_segment():
    segment_ids = torch.tensor([[7, 7, 7, 2, 2, 9], [1, 1, 1, 1, 1, 1], [1, 2, 3, 4, 4, 4]])
    expected = [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 1, 2]]
    assert positions_in_segments(segment_ids).tolist() == expected
