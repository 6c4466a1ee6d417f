"""RMSNorm, GeGLU and cross-entropy in one pass against their formulas in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from mosar.kernels import elementwise
from mosar.kernels.elementwise import cross_entropy_, geglu, rms_norm
from mosar.kernels.native import native_obstacle

pytestmark = pytest.mark.skipif(native_obstacle() is not None, reason="no native kernels")


def formula_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * (1 + weight)


def formula_geglu(gate, up):
    return F.gelu(gate, approximate="tanh") * up


def values_and_gradients(function, inputs, gradient):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    return out, *torch.autograd.grad(out, inputs, gradient.to(out.dtype))


def assert_within_budget(ours, formula, inputs, gradient, terms):
    """error(ours) <= 2 error(plain torch) + 4 eps max|term|, for the output and each gradient.

    eps is that of each result's dtype.
    `terms` are bounds of what is added up for each: one column's gradient is a difference of equal
    numbers, and no float32 arithmetic is exact relative to that.
    """
    exact = values_and_gradients(formula, [x.double() for x in inputs], gradient.double())
    plain = values_and_gradients(formula, inputs, gradient)
    found = values_and_gradients(ours, inputs, gradient)
    for one, other, truth, term in zip(found, plain, exact, terms, strict=True):
        assert one.shape == truth.shape and one.dtype == other.dtype
        error, theirs = ((x.double() - truth).abs().max() for x in (one, other))
        assert error <= 2 * theirs + 4 * torch.finfo(one.dtype).eps * term.abs().max()


DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 70))
SCALES = st.sampled_from([1e-6, 1e-3, 1.0, 30.0, 1e4])


@given(
    shape=SHAPES,
    scale=SCALES,
    eps=st.sampled_from([1e-6, 0.1]),
    seed=st.integers(0, 999),
    dtype=DTYPES,
)
def test_rms_norm(shape, scale, eps, seed, dtype):
    torch.manual_seed(seed)
    x, gradient = (scale * torch.randn(shape)).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[1])
    normal = formula_norm(x.float(), torch.zeros(()), eps)
    factor = 1 + weight.abs()
    dx = gradient * factor * (normal / x).abs() * (1 + normal.abs().amax() ** 2)
    dweight = (gradient * normal).abs().sum(dim=0)
    assert_within_budget(
        lambda x, w: rms_norm(x, w, eps),
        lambda x, w: formula_norm(x.to(w.dtype), w, eps).to(x.dtype),
        [x, weight],
        gradient,
        terms=[normal * factor, dx, dweight],
    )


@given(shape=SHAPES, scale=SCALES, seed=st.integers(0, 999), dtype=DTYPES)
def test_geglu(shape, scale, seed, dtype):
    torch.manual_seed(seed)
    gate, up, gradient = (x.to(dtype) for x in torch.randn(3, *shape))
    gate = scale * gate
    terms = [gate * up, gradient * up * (1 + gate.abs()), gradient * gate]
    assert_within_budget(geglu, formula_geglu, [gate, up], gradient, terms)


def formula_cross_entropy(scores, targets, softcap, share):
    logits = scores if softcap is None else softcap * torch.tanh(scores)
    return share * F.cross_entropy(logits, targets, reduction="sum")


@given(
    # Wide enough for several blocks of the longest sums.
    shape=st.tuples(st.integers(1, 20), st.integers(1, 300)),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    softcap=st.sampled_from([None, 3.0, 30.0, 100.0]),
    seed=st.integers(0, 999),
    dtype=DTYPES,
)
def test_cross_entropy(shape, scale, softcap, seed, dtype):
    torch.manual_seed(seed)
    scores = (scale * torch.randn(shape)).to(dtype)
    targets, share = torch.randint(shape[1], shape[:1]), 0.3

    def exact(dtype):
        given = scores.to(dtype).requires_grad_()
        loss = formula_cross_entropy(given, targets, softcap, share)
        (gradient,) = torch.autograd.grad(loss, given)
        # Scores are logits over the cap, and the gradient is that of logits before the cap.
        return loss.detach(), gradient / (softcap or 1.0)

    gradient = scores.clone()
    loss = cross_entropy_(gradient, targets, softcap, share)
    assert loss.dtype == torch.float32 and gradient.dtype == dtype
    (true_loss, truth), (plain_loss, plain) = exact(torch.float64), exact(torch.float32)
    eps, size = torch.finfo(torch.float32).eps, softcap or scores.abs().max()
    allowed = 2 * (plain_loss - true_loss).abs() + 4 * eps * share * shape[0] * (1 + 2 * size)
    assert (loss - true_loss).abs() <= allowed
    # 1 - tanh^2 is a difference of numbers near 1, and exp of a large logit has its error.
    allowed = 2 * (plain - truth).abs().max() + share * (4 + size) * eps
    allowed = allowed + torch.finfo(dtype).eps * truth.abs().max()
    assert (gradient.double() - truth).abs().max() <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_cross_entropy_of_extreme_scores(softcap, dtype):
    scores = torch.tensor([[1e30, -1e30, 0.0], [float("nan"), 0.0, 0.0], [-1e30, -1e30, 0.0]])
    scores, targets = scores.to(dtype), torch.tensor([1, 1, 2])
    for row, finite in enumerate((True, False, True)):
        one = scores[row : row + 1].clone()
        loss = cross_entropy_(one, targets[row : row + 1], softcap, 1.0)
        assert loss.isfinite() == finite and one.isfinite().all() == finite


def test_cross_entropy_refuses_a_target_outside():
    with pytest.raises(ValueError, match="targets must be columns"):
        cross_entropy_(torch.zeros(2, 3), torch.tensor([0, 3]), None, 1.0)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e30, -1e30, -60.0, 60.0, float("nan")])
def test_geglu_of_extreme_gates(value):
    gate, up = torch.full((20,), value), torch.full((20,), 2.0)
    torch.testing.assert_close(geglu(gate, up), formula_geglu(gate, up), equal_nan=True)


def test_strided_inputs_and_higher_ranks():
    torch.manual_seed(0)
    x, gate, up = torch.randn(3, 5, 8, 14).transpose(1, 2)[..., ::2], *torch.randn(2, 7, 4, 6)
    weight = torch.randn(7)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), formula_norm(x, weight, 1e-6))
    gate, up = gate.transpose(0, 1), up.transpose(0, 1)
    torch.testing.assert_close(geglu(gate, up), formula_geglu(gate, up))


def test_the_gradient_of_the_weight_does_not_depend_on_threads():
    torch.manual_seed(0)
    x, weight, gradient = torch.randn(1000, 65), torch.randn(65), torch.randn(1000, 65)
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(
                values_and_gradients(lambda x, w: rms_norm(x, w, 1e-6), [x, weight], gradient)
            )
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def cross_entropy_and_gradient(x):
    gradient = x.clone()
    loss = cross_entropy_(gradient, torch.arange(len(x)), 3.0, 0.5)
    return loss.to(x.dtype) + gradient


@pytest.mark.parametrize(
    "function",
    [lambda x: rms_norm(x, x[0], 1e-6), lambda x: geglu(x, x), cross_entropy_and_gradient],
)
def test_without_native_kernels_torch_serves(function, monkeypatch):
    x = torch.randn(4, 9)
    native = function(x)
    monkeypatch.setattr(elementwise, "native_obstacle", lambda: "no compiler")
    torch.testing.assert_close(function(x), native)
    assert function(x.bfloat16()).dtype == torch.bfloat16
    assert function(x.double()).dtype == torch.float64


def test_under_compile():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x, weight):
        return geglu(rms_norm(x, weight, 1e-6), x)

    x, weight = torch.randn(4, 9, requires_grad=True), torch.randn(9)
    expected = formula_geglu(formula_norm(x, weight, 1e-6), x)
    torch.testing.assert_close(layer(x, weight), expected)
