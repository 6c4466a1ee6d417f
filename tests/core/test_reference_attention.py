"""The dense definition against an independent oracle, and what follows from it."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck
from torch.func import functional_call

from cases import (
    DISTANCE_BIASES,
    ROUTINGS,
    SMALL,
    Case,
    assert_agrees_with_outsider,
    assert_close,
    assert_distance_agrees_with_outsider,
    cases,
    enliven,
)
from mosar import (
    MoSARConfig,
    MoSARReferenceAttention,
    build_hard_domain,
    forced_routing,
    mosar_attention,
)
from mosar.core.bias import routed_bias
from mosar.core.layout import resolve_layout
from mosar.core.reference_attention import attend_routed


def everything(case, routing):
    """All that the reference computes for a case."""
    layout = resolve_layout(case.batch, case.num_queries, case.num_keys, **case.placement)
    bias = routed_bias(case.pi_q, case.pi_k, case.config, routing)
    heads = (case.q, case.k, case.v)
    return attend_routed(*heads, layout, bias, scale=case.scale, softcap=case.softcap)


def module_for(case, **options):
    return enliven(
        MoSARReferenceAttention(
            case.config,
            num_heads=case.num_heads,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            **options,
        ).to(case.dtype)
    )


@pytest.mark.parametrize("routing", ROUTINGS)
@given(data=st.data())
def test_routed_attention_is_the_outsiders(routing, data):
    case = data.draw(cases(routings=(routing,)))
    assert_agrees_with_outsider(case, impl="reference", atol=1e-10)


@given(cases(), st.sampled_from(DISTANCE_BIASES))
def test_distance_attention_is_the_outsiders(case, kind):
    assert_distance_agrees_with_outsider(case, kind, impl="reference", atol=1e-10)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("kv_heads", "heads_per_kv"), [(1, 1), (2, 3), (1, 8)])
def test_all_global_is_plain_causal_attention(routing, kv_heads, heads_per_kv):
    case = Case(kv_heads=kv_heads, heads_per_kv=heads_per_kv, batch=2, num_queries=40, num_keys=40)
    pi = forced_routing(case.config, "G", 2, 40, dtype=torch.float64)
    layout = resolve_layout(2, 40, 40)
    bias = routed_bias(pi, pi, case.config, routing)
    result = attend_routed(case.q, case.k, case.v, layout, bias)
    plain = F.scaled_dot_product_attention(case.q, case.k, case.v, is_causal=True, enable_gqa=True)
    assert torch.equal(result.bias, torch.zeros_like(result.bias))
    assert torch.equal(result.worth, torch.ones_like(result.worth))
    assert_close(result.output, plain, 1e-13)


@given(cases())
def test_going_sparse_costs_twice_the_discarded_mass(case):
    """||p - p^Omega||_1 = 2 rho, and rho = 1 - exp(lse_sparse - lse_top1)."""
    dense, sparse = everything(case, "top1"), everything(case, "sparse")
    mask = build_hard_domain(*case.labels, case.config, **case.placement).mask
    mask = mask if mask.dim() == 4 else mask[:, None]
    mask = mask.repeat_interleave(case.num_heads // mask.shape[1], dim=1)
    discarded = dense.attention.masked_fill(mask, 0).sum(dim=-1)
    difference = (dense.attention - sparse.attention).abs().sum(dim=-1)
    supported = mask.any(dim=-1)
    assert_close(difference[supported], 2 * discarded[supported], 1e-12)
    from_lse = 1 - torch.exp(sparse.lse - dense.lse)
    assert_close(from_lse[supported], discarded[supported], 1e-12)
    assert (sparse.attention[~supported] == 0).all()


@given(cases())
def test_attention_is_a_distribution_over_existing_pairs(case):
    result = everything(case, case.routing)
    layout = resolve_layout(case.batch, case.num_queries, case.num_keys, **case.placement)
    exists = layout.exists()[:, None].expand(result.attention.shape)
    assert (result.attention[~exists] == 0).all()
    empty = result.lse == -torch.inf
    total = result.attention.sum(dim=-1)
    assert_close(total, torch.where(empty, 0.0, 1.0).double(), 1e-12)
    if case.routing != "sparse":
        assert torch.equal(empty, ~exists.any(dim=-1))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_module_is_routers_then_operator(routing, groups, softcap):
    config = MoSARConfig(regimes=SMALL.regimes, routing_groups=groups, num_sinks=1)
    case = Case(
        config=config, batch=2, kv_heads=2, heads_per_kv=2, num_queries=5, padding="holes", seed=4
    )
    module = module_for(case, scale=0.4, softcap=softcap)
    result = module(case.q, case.k, case.v, routing=routing, **case.placement)
    pi_q = module.query_router(case.q.transpose(1, 2)).probabilities
    pi_k = module.key_router(case.k.transpose(1, 2)).probabilities
    output, lse = mosar_attention(
        case.q,
        case.k,
        case.v,
        pi_q,
        pi_k,
        config,
        routing=routing,
        scale=0.4,
        softcap=softcap,
        return_lse=True,
        impl="reference",
        **case.placement,
    )
    assert_close(result.output, output, 1e-14)
    assert_close(result.lse, lse, 1e-14)
    assert_close(result.query_routing.probabilities, pi_q, 1e-14)
    # A padded slot is routed too, but not by what it holds.
    padded = ~case.key_valid[:, None, :, None] if groups > 1 else ~case.key_valid[:, :, None]
    difference = (result.key_routing.probabilities - pi_k).masked_fill(padded, 0)
    assert_close(difference, torch.zeros_like(pi_k), 1e-14)


def test_the_module_keeps_everything():
    case = Case(batch=2, kv_heads=2, heads_per_kv=2, num_queries=5)
    result = module_for(case)(case.q, case.k, case.v)
    shapes = {
        "output": (2, 4, 5, 4),
        "lse": (2, 4, 5),
        "attention": (2, 4, 5, 6),
        "worth": (2, 1, 5, 6),
        "bias": (2, 1, 5, 6),
    }
    assert {name: tuple(getattr(result, name).shape) for name in shapes} == shapes
    assert result.query_routing.logits.shape == (2, 5, 3)
    assert result.key_routing.logits.shape == (2, 6, 3)


@pytest.mark.parametrize("routing", ["top1", "sparse"])
def test_the_module_takes_labels_from_logits_where_probabilities_tie(routing):
    case = Case(dtype=torch.float32)
    module = module_for(case)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        for router in (module.query_router, module.key_router):
            router.bias2[0] = torch.tensor([0.0, 1e-9, -5.0])
    result = module(case.q, case.k, case.v, routing=routing)
    assert (
        result.query_routing.probabilities[..., 0]
        .eq(result.query_routing.probabilities[..., 1])
        .all()
    )
    pi = forced_routing(case.config, "M", 1, 6)
    expected = mosar_attention(
        case.q, case.k, case.v, pi, pi, case.config, routing=routing, impl="reference"
    )
    assert torch.equal(result.output, expected)


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_through_routers_and_attention(groups):
    config = MoSARConfig(
        regimes=SMALL.regimes, router_hidden=2, routing_groups=groups, temperature=0.8
    )
    case = Case(
        config=config,
        kv_heads=2,
        heads_per_kv=2,
        num_queries=3,
        num_keys=4,
        head_dim=2,
        softcap=3.0,
    )
    module = module_for(case, softcap=case.softcap)
    names, parameters = zip(*module.named_parameters(), strict=True)

    def attend(q, k, v, *parameters):
        result = functional_call(module, dict(zip(names, parameters, strict=True)), (q, k, v))
        return result.output, result.lse

    tensors = [tensor.clone().requires_grad_() for tensor in (case.q, case.k, case.v)]
    assert gradcheck(attend, (*tensors, *parameters))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_module_ignores_what_padded_slots_hold(routing, poison):
    case = Case(batch=2, kv_heads=2, heads_per_kv=2, padding="holes", seed=6)
    padded = ~case.key_valid[:, None, :, None]
    assert padded.any()

    def run(fill):
        module = module_for(case)
        q = case.q.clone().requires_grad_()
        k, v = (x.masked_fill(padded, fill).requires_grad_() for x in (case.k, case.v))
        result = module(q, k, v, routing=routing, key_valid=case.key_valid)
        result.output.square().sum().backward()
        gradients = [tensor.grad for tensor in (q, k, v, *module.parameters())]
        return [result.output, result.lse, *(g for g in gradients if g is not None)]

    clean, poisoned = run(0.0), run(poison)
    assert len(clean) == len(poisoned)
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


def test_autocast_leaves_routing_and_worth_in_float32():
    case = Case(dtype=torch.bfloat16, batch=2, kv_heads=2)
    module = module_for(case.with_(dtype=torch.float32))
    expected = module(case.q, case.k, case.v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = module(case.q, case.k, case.v)
    for tensor in (result.query_routing.logits, result.worth, result.bias, result.attention):
        assert tensor.dtype == torch.float32
    assert torch.equal(result.worth, expected.worth)
    assert torch.equal(result.output, expected.output)
    assert result.output.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("heads", "match"),
    [
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads .*num_kv_heads=2, got 3"),
        ({"num_heads": 4, "num_kv_heads": 0}, "num_kv_heads .*0"),
        ({"num_heads": 0, "num_kv_heads": 2}, "num_heads .*0"),
        ({"num_heads": 4, "num_kv_heads": 1}, "routing_groups .*num_kv_heads=1, got 2"),
        ({"num_heads": 4, "num_kv_heads": 2, "head_dim": 0}, "head_dim .*0"),
    ],
)
def test_wrong_head_counts_are_named(heads, match):
    config = MoSARConfig(routing_groups=2)
    with pytest.raises(ValueError, match=match):
        MoSARReferenceAttention(config, **({"head_dim": 4} | heads))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"routing": "hard"}, "routing .*'hard'"),
        ({"key_valid": torch.ones(1, 5).bool()}, "key_valid"),
        ({"query_positions": torch.zeros(1, 5).long()}, "query_positions"),
        ({"key_positions": torch.zeros(1, 5).long()}, "key_positions"),
        ({"segment_ids": torch.zeros(1, 5).long()}, "segment_ids"),
    ],
)
def test_wrong_input_of_the_module_is_named(changes, match):
    case = Case(kv_heads=2, dtype=torch.float32)
    inputs = {"q": case.q, "k": case.k, "v": case.v}
    with pytest.raises(ValueError, match=match):
        module_for(case)(**(inputs | changes))
