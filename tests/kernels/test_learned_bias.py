"""A bias by distance and by key that learns: every path within the budget of its gradients."""

from dataclasses import replace

import pytest
import torch

from cases import Case
from kernels.budget import errors, upstream
from kernels.test_operators import Recorder, copied
from mosar import distance_attention
from mosar.attention import attend
from mosar.core.bias import routed_bias

BASE = Case(num_queries=150, num_keys=150, kv_heads=2, heads_per_kv=2, head_dim=16, batch=2)
RESULTS = ("output", "lse", "dq", "dk", "dv", "dkey_bias")
NAMES = (*RESULTS, "dlog_gate", "dslopes")
TRAITS = {
    "plain": {},
    "one table": {},
    "soft-cap, window": {"softcap": 2.0, "window": 20, "scale": 1.0},
    "packed": {"segments": "packed", "positions": "counted"},
    "gaps": {"positions": "gaps", "num_queries": 90},
    "padded": {"padding": "holes", "positions": "counted"},
    "last queries": {"num_queries": 33, "num_keys": 165, "kv_heads": 1, "heads_per_kv": 3},
}


def biases(case, *, one_table=False):
    """log_gate with some pairs missing, slopes, and biases of keys that grow along the text."""
    bias = case.distance_bias("both" if one_table else "log_gate_per_head")
    log_gate = bias["log_gate"][:, :120] + 0.0
    slopes = 0.02 * case.distance_bias("slopes")["slopes"]
    steps = torch.randn(case.batch, case.num_heads, case.num_keys, generator=generator())
    return [log_gate.float(), slopes.float(), (steps + 1).cumsum(dim=-1)]


def generator():
    return torch.Generator().manual_seed(3)


def run(case, bias, *, impl, dtype=torch.float32, names=NAMES):
    """Output, log-sum-exp and the gradients of these names."""
    log_gate, slopes, key_bias = (x.detach().to(dtype) for x in bias)
    leaves = [x.to(dtype) for x in (case.q, case.k, case.v)] + [key_bias, log_gate, slopes]
    leaves = [x.requires_grad_() for x in leaves[: len(names) - 2]]
    out, lse = distance_attention(
        *leaves[:3],
        log_gate=log_gate,
        log_gate_extends=True,
        slopes=slopes,
        key_bias=key_bias,
        return_lse=True,
        impl=impl,
        **case.options,
    )
    return results(case, out, lse, leaves, names)


def results(case, out, lse, leaves, names):
    gradients = torch.autograd.grad((out, lse), leaves, upstream(case, out, lse))
    return dict(zip(names, (out.detach(), lse.detach(), *gradients), strict=True))


def assert_within_budget(found, plain, exact):
    """found: results by implementation."""
    for impl, mine in found.items():
        for name, value in mine.items():
            error, allowed, largest = errors(value, plain[name], exact[name])
            assert error <= 2 * allowed + 4 * 2**-23 * largest, (impl, name, error, allowed)


@pytest.mark.parametrize("trait", TRAITS)
def test_gradients_of_the_bias(trait):
    case = BASE.with_(dtype=torch.float32, **TRAITS[trait])
    bias = biases(case, one_table=trait == "one table")
    plain = run(case, bias, impl="reference")
    exact = run(case, bias, impl="reference", dtype=torch.float64)
    assert_within_budget(
        {impl: run(case, bias, impl=impl) for impl in ("native", "tiled")}, plain, exact
    )


def run_labels(case, of_key, *, impl, dtype=torch.float32):
    leaves = [x.to(dtype).requires_grad_() for x in (case.q, case.k, case.v)]
    leaves.append(of_key.detach().clone().requires_grad_())
    bias = routed_bias(case.pi_q, case.pi_k, case.config, "sparse")
    bias = replace(bias, of_key=leaves[3])
    out, lse = attend(*leaves[:3], bias, return_lse=True, impl=impl, **case.options)
    return results(case, out, lse, leaves, RESULTS)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("trait", TRAITS)
def test_hard_regimes_with_a_bias_of_keys(trait, groups):
    traits = {**TRAITS[trait], "kv_heads": 2}
    case = BASE.with_(dtype=torch.float32, **traits)
    case = case.with_(config=replace(case.config, routing_groups=groups, num_sinks=groups - 1))
    of_key = biases(case)[2].double()
    plain = run_labels(case, of_key, impl="reference")
    exact = run_labels(case, of_key, impl="reference", dtype=torch.float64)
    found = {impl: run_labels(case, of_key, impl=impl) for impl in ("native", "tiled")}
    assert_within_budget(found, plain, exact)


def test_far_along_a_text_hard_regimes_keep_the_differences():
    case = BASE.with_(dtype=torch.float32)
    near = biases(case)[2].double()
    expected, found = (run_labels(case, near + shift, impl="native") for shift in (0, 1e7))
    for name in ("output", "dq", "dk", "dv", "dkey_bias"):
        torch.testing.assert_close(found[name], expected[name], atol=2e-6, rtol=0)


def test_what_padded_slots_hold_does_not_matter():
    case = BASE.with_(dtype=torch.float32, **TRAITS["padded"])
    log_gate, slopes, key_bias = biases(case)
    padded = ~case.key_valid[:, None].expand_as(key_bias)
    for impl in ("native", "tiled", "reference"):
        clean = run(case, [log_gate, slopes, key_bias.masked_fill(padded, 0.0)], impl=impl)
        poisoned = run(case, [log_gate, slopes, key_bias.masked_fill(padded, torch.nan)], impl=impl)
        assert all(torch.equal(clean[name], poisoned[name]) for name in NAMES)
        assert not poisoned["dkey_bias"][padded].any()


def test_a_bias_that_grows_far_keeps_its_differences():
    """In float64 to the native kernels: at 10^7 a float32 has no fraction of it."""
    case = BASE.with_(dtype=torch.float32, batch=1, kv_heads=1)
    near = torch.randn(1, 2, 150, generator=generator()).double().cumsum(dim=-1)
    q, k, v = case.q, case.k, case.v
    expected, lse = distance_attention(q, k, v, key_bias=near, return_lse=True, impl="native")
    found, far = distance_attention(q, k, v, key_bias=near + 1e7, return_lse=True, impl="native")
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(far - 1e7, lse, atol=1.0, rtol=0)


def test_only_what_learns_has_a_gradient():
    case = BASE.with_(dtype=torch.float32)
    _, slopes, key_bias = biases(case)
    key_bias.requires_grad_()
    out = distance_attention(
        case.q, case.k, case.v, slopes=slopes, key_bias=key_bias, impl="native"
    )
    out.square().sum().backward()
    assert slopes.grad is None and key_bias.grad.count_nonzero()


@pytest.mark.parametrize(
    ("key_bias", "said"),
    [
        ([0.0], "key_bias must be a tensor, got list"),
        (torch.zeros(2, 4, 149), r"key_bias must have shape \[2, 4, 150\], got \[2, 4, 149\]"),
        (torch.zeros(2, 4, 150, dtype=torch.int64), "key_bias must be one of .* got torch.int64"),
        (torch.zeros(2, 4, 150, device="meta"), "key_bias must be on the device of q"),
        (torch.full((2, 4, 150), -torch.inf), "key_bias must be smaller than 1e.20 .* got -inf"),
    ],
)
def test_wrong_biases_are_refused(key_bias, said):
    with pytest.raises(ValueError, match=said):
        distance_attention(BASE.q, BASE.k, BASE.v, key_bias=key_bias)


def test_opcheck():
    case = BASE.with_(dtype=torch.float32, num_queries=20, num_keys=20)
    with Recorder() as recorder:
        run(case, biases(case), impl="native")
    operators = torch.ops.mosar.attend.default, torch.ops.mosar.attend_backward.default
    forward, backward = (copied(recorder.calls[operator]) for operator in operators)
    torch.library.opcheck(operators[1], backward)
    for place in (0, 1, 2, 14, 15, 16):
        forward[place].requires_grad_()
    torch.library.opcheck(operators[0], forward)
