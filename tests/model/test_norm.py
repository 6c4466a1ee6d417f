"""RMSNorm against its formula: values, gradients, precision."""

import pytest
import torch

from mosar.model.norm import RMSNorm


def normalize(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * (1 + weight)


def a_norm(size, dtype, eps=1e-6):
    norm = RMSNorm(size, eps).to(dtype)
    torch.nn.init.normal_(norm.weight)
    return norm


@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 16)])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_values_and_gradients(shape, eps):
    norm = a_norm(shape[-1], torch.float64, eps)
    x, gradient = torch.randn(2, *shape, dtype=torch.float64)
    x.requires_grad_()
    weight = norm.weight
    expected = normalize(x, weight, eps)
    torch.testing.assert_close(norm(x), expected)
    torch.testing.assert_close(
        torch.autograd.grad(norm(x), (x, weight), gradient),
        torch.autograd.grad(expected, (x, weight), gradient),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(monkeypatch, dtype):
    """To the bit, by the same formula: native passes, which serve float32 alone, sum in another
    order."""
    monkeypatch.setattr("mosar.kernels.elementwise._serves", lambda *tensors: False)
    norm = a_norm(64, dtype)
    x, gradient = (3 * torch.randn(2, 5, 64)).to(dtype)
    x.requires_grad_()
    out = norm(x)
    wide = RMSNorm(64, 1e-6)
    wide.weight.data = norm.weight.data.float()
    x_wide = x.detach().float().requires_grad_()
    exact = wide(x_wide)
    assert out.dtype == dtype
    assert torch.equal(out, exact.to(dtype))
    out.backward(gradient)
    exact.backward(gradient.float())
    assert torch.equal(x.grad, x_wide.grad.to(dtype))
    assert torch.equal(norm.weight.grad, wide.weight.grad.to(dtype))


def test_backward_under_autocast_stays_in_float32():
    norm = a_norm(64, torch.float32)
    x, gradient = torch.randn(2, 5, 64)
    x.requires_grad_()
    plain = torch.autograd.grad(norm(x), (x, norm.weight), gradient)
    with torch.autocast("cpu", torch.bfloat16):
        cast = torch.autograd.grad(norm(x), (x, norm.weight), gradient)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_second_derivatives_are_refused():
    norm = RMSNorm(4, 1e-6)
    x = torch.randn(2, 4, requires_grad=True)
    (first,) = torch.autograd.grad(norm(x).pow(4).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_zeros_stay_zeros():
    x = torch.zeros(2, 4, requires_grad=True)
    out = RMSNorm(4, 1e-6)(x)
    out.sum().backward()
    assert out.eq(0).all() and x.grad.isfinite().all()
