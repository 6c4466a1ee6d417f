"""The paper's compatibility checklist, one test per statement, in its order.

A revision is mathematically compatible with the paper only if all of these hold.
"""

import dataclasses
import inspect
import math
import sys

import pytest
import torch
from torch import nn

from cases import SMALL, Case, assert_close, enliven, geometry
from core import outsider
from mosar import (
    MoSARConfig,
    MoSARReferenceAttention,
    PostPositionRouter,
    RegimeKernel,
    WorthField,
    build_hard_domain,
    forced_routing,
    mosar_attention,
    normalized_reach_cost,
)
from source_imports import imports_of

HEADS, KV_HEADS, HEAD_DIM, LENGTH = 4, 2, 4, 12


@pytest.fixture
def case():
    return Case(
        batch=2,
        kv_heads=KV_HEADS,
        heads_per_kv=HEADS // KV_HEADS,
        head_dim=HEAD_DIM,
        num_queries=LENGTH,
        num_keys=LENGTH,
    )


@pytest.fixture
def attention():
    module = MoSARReferenceAttention(
        SMALL, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM
    )
    return enliven(module.double())


class GateOf(nn.Module):
    """A stand-in for the regime kernel with the same gate matrix at every distance."""

    def __init__(self, gate_RR):
        super().__init__()
        self.gate_RR = torch.as_tensor(gate_RR)

    def forward(self, distances, dtype=None):
        return self.gate_RR.to(dtype).expand(*distances.shape, *self.gate_RR.shape)


def rotate(x_BHTD):
    """RoPE at positions 0..T-1."""
    half = x_BHTD.shape[-1] // 2
    frequency = 0.5 ** torch.arange(half, dtype=torch.float64)
    angle_TD = torch.arange(x_BHTD.shape[2], dtype=torch.float64)[:, None] * frequency
    first, second = x_BHTD[..., :half], x_BHTD[..., half:]
    cos, sin = angle_TD.cos(), angle_TD.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def same_content_everywhere(x_BHTD):
    """The first token's content at every position."""
    return x_BHTD[:, :, :1].expand_as(x_BHTD).contiguous()


def distances(length=LENGTH):
    positions = torch.arange(length)
    return positions[:, None] - positions[None, :]


def test_query_routing_is_post_positional(attention, case):
    """Query routing is computed from post-positional query representations."""
    content = same_content_everywhere(case.q)
    plain = attention(content, case.k, case.v).query_routing.probabilities
    assert_close(plain, plain[:, :1].expand_as(plain), 1e-14)
    turned = attention(rotate(content), case.k, case.v).query_routing.probabilities
    assert float((turned - turned[:, :1]).detach().abs().amax(dim=(0, 2))[1:].min()) > 1e-3
    router_input = rotate(content).transpose(1, 2).flatten(2)
    assert torch.equal(turned, attention.query_router(router_input).probabilities)


def test_key_routing_is_post_positional_and_unexpanded(attention, case):
    """Key routing is computed from post-positional, unexpanded key representations."""
    content = same_content_everywhere(case.k)
    plain = attention(case.q, content, case.v).key_routing.probabilities
    assert_close(plain, plain[:, :1].expand_as(plain), 1e-14)
    turned = attention(case.q, rotate(content), case.v).key_routing.probabilities
    assert float((turned - turned[:, :1]).detach().abs().amax(dim=(0, 2))[1:].min()) > 1e-3
    router_input = rotate(content).transpose(1, 2).flatten(2)
    assert router_input.shape[-1] == attention.key_router.input_dim == KV_HEADS * HEAD_DIM
    assert torch.equal(turned, attention.key_router(router_input).probabilities)
    expanded = case.k.repeat_interleave(HEADS // KV_HEADS, dim=1)
    with pytest.raises(ValueError, match="heads"):
        attention(case.q, expanded, expanded)


def test_query_and_key_routers_are_separate(case):
    """Query and key routers are separately parameterized."""
    module = MoSARReferenceAttention(SMALL, num_heads=2, num_kv_heads=2, head_dim=HEAD_DIM)
    enliven(module.double())
    query_parameters = {parameter.data_ptr() for parameter in module.query_router.parameters()}
    key_parameters = {parameter.data_ptr() for parameter in module.key_router.parameters()}
    assert len(query_parameters) == len(key_parameters) == 4
    assert query_parameters.isdisjoint(key_parameters)
    same = case.k
    before = module(same, same, case.v)
    assert not torch.allclose(before.query_routing.logits, before.key_routing.logits)
    enliven(module.key_router, seed=1)
    after = module(same, same, case.v)
    assert torch.equal(before.query_routing.logits, after.query_routing.logits)
    assert not torch.allclose(before.key_routing.logits, after.key_routing.logits)


def test_routers_end_in_a_temperature_scaled_softmax(case):
    """Each router ends in a temperature-scaled softmax over regimes."""
    for temperature in (0.1, 1.0, 10.0):
        config = dataclasses.replace(SMALL, temperature=temperature)
        module = MoSARReferenceAttention(
            config, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM
        )
        result = enliven(module.double())(case.q, case.k, case.v)
        for routing in (result.query_routing, result.key_routing):
            exponentials = torch.exp(routing.logits / temperature)
            expected = exponentials / exponentials.sum(dim=-1, keepdim=True)
            assert routing.probabilities.shape[-1] == config.num_regimes
            assert_close(routing.probabilities, expected, 1e-12)


def test_router_biases_do_not_bypass_the_softmax():
    """Router MLP biases do not bypass the final softmax."""
    router = enliven(PostPositionRouter(8, SMALL).double())
    x = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        router.bias1.fill_(50.0)
        router.bias2.copy_(torch.tensor([[30.0, -20.0, 25.0]]))
        pi = router(x).probabilities
        assert pi.min() >= 0
        assert_close(pi.sum(dim=-1), torch.ones(2, 5, dtype=torch.float64), 1e-12)
        # Without the second layer's weights only its bias is left, and it is inside the softmax.
        router.weight2.zero_()
        expected = torch.softmax(router.bias2[0], dim=-1).expand(2, 5, 3)
        assert_close(router(x).probabilities, expected, 1e-14)


def test_pair_weights_are_factorized(case):
    """The factorized pair weights are pi_Q(m) pi_K(n)."""
    field = WorthField(SMALL)
    for m in range(3):
        for n in range(3):
            indicator = torch.zeros(3, 3)
            indicator[m, n] = 1
            field.kernel = GateOf(indicator)
            weight = field(case.pi_q, case.pi_k, distances()).worth
            expected = case.pi_q[:, :, None, m] * case.pi_k[:, None, :, n]
            assert_close(weight, expected, 1e-15)


def test_regime_matrix_depends_only_on_distance_and_geometry(case):
    """The regime matrix depends only on relative distance and frozen regime geometry."""
    kernel = RegimeKernel(SMALL)
    assert not list(kernel.parameters())
    assert list(inspect.signature(kernel.forward).parameters) == ["distances", "dtype"]
    before = kernel(distances())
    kernel.to(torch.bfloat16).train()
    assert torch.equal(kernel(distances()), before)
    with pytest.raises(dataclasses.FrozenInstanceError):
        kernel.config.barrier = 1.0
    # Moving queries and keys together changes nothing.
    here, there = (
        torch.arange(LENGTH).expand(2, LENGTH),
        torch.arange(LENGTH).expand(2, LENGTH) + 77,
    )
    outputs = [
        mosar_attention(*case.inputs, SMALL, query_positions=at, key_positions=at, impl="reference")
        for at in (here, there)
    ]
    assert torch.equal(*outputs)
    assert not torch.equal(before[5, 0], before[5, 4])


def test_worth_is_the_bilinear_form(case):
    """The positive worth gate is W = pi_Q^T G(d) pi_K."""
    law = {key: geometry(SMALL)[key] for key in ("regimes", "composition")}
    worth = WorthField(SMALL)(case.pi_q, case.pi_k, distances()).worth
    for i in range(LENGTH):
        for j in range(i + 1):
            gates = torch.tensor(
                [[outsider.gate(i - j, m, n, **law) for n in range(3)] for m in range(3)],
                dtype=torch.float64,
            )
            assert_close(worth[0, i, j], case.pi_q[0, i] @ gates @ case.pi_k[0, j], 1e-14)
    assert worth.min() > 0


def test_bias_is_the_clamped_logarithm(case):
    """The additive attention bias is log(max{W, epsilon})."""
    field = WorthField(SMALL)
    result = field(case.pi_q, case.pi_k, distances())
    assert torch.equal(result.bias, torch.log(result.worth))
    for worth in (0.0, SMALL.epsilon / 2, 2 * SMALL.epsilon):
        field.kernel = GateOf(torch.full((3, 3), worth, dtype=torch.float64))
        bias = field(case.pi_q, case.pi_k, distances()).bias
        expected = torch.full_like(bias, math.log(max(worth, SMALL.epsilon)))
        assert_close(bias, expected, 1e-12)


def test_mixture_is_of_gates_not_of_biases(case):
    """The implementation is a mixture of gates, not a direct mixture of additive biases."""
    pi = torch.full_like(case.pi_q, 1 / 3)
    gate = RegimeKernel(SMALL)(distances(), torch.float64)
    result = WorthField(SMALL)(pi, pi, distances())
    of_gates = gate.mean(dim=(-2, -1)).log()
    of_biases = gate.log().mean(dim=(-2, -1))
    assert_close(result.bias, of_gates.expand_as(result.bias), 1e-14)
    far = distances() > 4
    assert (result.bias[0][far] > of_biases[far] + 0.5).all()


def test_worth_is_not_normalized_over_keys(case):
    """The worth field is not incorrectly normalized over key positions."""
    field = WorthField(SMALL)
    whole = field(case.pi_q, case.pi_k, distances()).worth
    some = field(case.pi_q, case.pi_k[:, :5], distances()[:, :5]).worth
    assert_close(whole[..., :5], some, 1e-15)
    pi = forced_routing(SMALL, "G", 2, LENGTH, dtype=torch.float64)
    total = field(pi, pi, distances()).worth.sum(dim=-1)
    assert torch.equal(total, torch.full_like(total, LENGTH))


def test_attention_softmax_normalizes_over_valid_keys(attention, case):
    """The final attention softmax normalizes over valid key positions."""
    valid = torch.ones(2, LENGTH, dtype=torch.bool)
    valid[0, :3] = valid[1, 5:7] = False
    result = attention(case.q, case.k, case.v, key_valid=valid)
    k = case.k.repeat_interleave(HEADS // KV_HEADS, dim=1)
    logits = case.q @ k.mT / math.sqrt(HEAD_DIM) + result.bias
    allowed = (valid[:, None, None, :] & (distances() >= 0)).expand_as(logits)
    weights = torch.exp(logits).masked_fill(~allowed, 0)
    total = weights.sum(dim=-1, keepdim=True)
    assert_close(result.attention, torch.where(total > 0, weights / total, 0), 1e-13)
    assert (result.attention[~allowed] == 0).all()


def test_bias_is_shared_across_heads_and_similarity_is_not(attention, case):
    """The worth bias is shared across heads; QK similarities remain head-specific."""
    result = attention(case.q, case.k, case.v)
    assert result.bias.shape == (2, 1, LENGTH, LENGTH)
    k = case.k.repeat_interleave(HEADS // KV_HEADS, dim=1)
    similarity = case.q @ k.mT / math.sqrt(HEAD_DIM)
    causal = (distances() >= 0).expand_as(similarity)
    # What each head adds to its own similarities is one and the same field.
    added = result.attention.log() + result.lse[..., None] - similarity
    assert_close(added[causal], result.bias.expand_as(added)[causal], 1e-12)
    apart = (similarity[:, 0] - similarity[:, 1]).abs()
    assert float(apart.max()) > 0.1


def test_pure_global_routing_adds_exactly_zero(case):
    """Pure GG routing yields exactly zero additional bias."""
    for config in (SMALL, MoSARConfig(), MoSARConfig(composition="min", barrier=2.0)):
        for dtype in (torch.float32, torch.float64):
            pi = forced_routing(config, "G", 1, 3, dtype=dtype)
            far = torch.tensor([[0, 1, 10**7]] * 3)
            result = WorthField(config)(pi, pi, far)
            assert torch.equal(result.bias, torch.zeros(1, 3, 3, dtype=dtype))


def test_causal_mask_is_authoritative(attention, case):
    """The causal mask remains authoritative."""
    # The kernel alone would let the future in: its gate there is 1.
    assert torch.equal(RegimeKernel(SMALL)(torch.tensor([-3])), torch.ones(1, 3, 3))
    changed_k, changed_v = case.k.clone(), case.v.clone()
    changed_k[:, :, 7:] += 10
    changed_v[:, :, 7:] -= 10
    for routing in ("soft", "top1", "sparse"):
        before = attention(case.q, case.k, case.v, routing=routing)
        assert (before.attention.triu(1) == 0).all()
        after = attention(case.q, changed_k, changed_v, routing=routing)
        assert torch.equal(before.output[:, :, :7], after.output[:, :, :7])
        assert not torch.allclose(before.output[:, :, 7:], after.output[:, :, 7:])


def test_cost_is_the_role_averaged_expected_normalized_reach(case):
    """The cost is the role-averaged expected normalized reach."""
    config = SMALL
    price = [regime.reach / config.max_length for regime in config.regimes]
    assert price == [1.5 / 8, 0.5, 1.0]

    def expected_reach(pi):
        rows = pi.flatten(0, -2).tolist()
        return sum(p * c for row in rows for p, c in zip(row, price, strict=True)) / len(rows)

    cost = normalized_reach_cost(case.pi_q, case.pi_k, config)
    role_average = (expected_reach(case.pi_q) + expected_reach(case.pi_k)) / 2
    assert float(cost) == pytest.approx(role_average, rel=1e-12)


def test_hard_domain_is_constructible_before_any_similarity(case):
    """The hard domain is constructible before pairwise QK computation."""
    inputs = set(inspect.signature(build_hard_domain).parameters)
    assert inputs.isdisjoint({"q", "k", "v", "query", "key", "scores"})
    labels_q, labels_k = case.labels
    domain = build_hard_domain(labels_q, labels_k, SMALL)
    pi_q, pi_k = (nn.functional.one_hot(label, 3).double() for label in (labels_q, labels_k))
    # Whatever q and k turn out to be: a value reaches a query iff the pair is in the domain.
    eye = torch.eye(LENGTH, dtype=torch.float64).expand(2, 1, LENGTH, LENGTH)
    for seed in range(3):
        other = Case(batch=2, num_queries=LENGTH, num_keys=LENGTH, head_dim=LENGTH, seed=seed)
        attention = mosar_attention(
            other.q, other.k, eye, pi_q, pi_k, SMALL, routing="sparse", impl="reference"
        )
        assert torch.equal(attention[:, 0] > 0, domain.mask)


def test_core_is_free_of_backbones_and_distribution():
    """Backbone-specific and distributed changes are isolated from the mathematical core."""
    files = imports_of("core")
    assert len(files) >= 9
    allowed = sys.stdlib_module_names | {"torch"}
    for file, names in files.items():
        for name in names:
            assert name.startswith("mosar.core.") or name.split(".")[0] in allowed, (file, name)
            assert not name.startswith("torch.distributed"), (file, name)
