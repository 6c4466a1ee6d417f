"""The public operators: defaults, empty rows, padding, precision, gradients, refusals."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck

from cases import DISTANCE_BIASES, ROUTINGS, SMALL, Case, assert_close, cases
from mosar import (
    MoSARConfig,
    distance_attention,
    mosar_attention,
    top1_routing,
)

LOW_PRECISION = (torch.bfloat16, torch.float16)


def reference(case, **changes):
    options = {"routing": case.routing, "return_lse": True, "impl": "reference", **case.options}
    return mosar_attention(*case.inputs, case.config, **(options | changes))


def distance_reference(case, kind, **changes):
    options = {"return_lse": True, "impl": "reference", **case.distance_bias(kind), **case.options}
    return distance_attention(case.q, case.k, case.v, **(options | changes))


def differentiable(*tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


def test_soft_is_the_default_and_lse_comes_on_request():
    case = Case()
    output = mosar_attention(*case.inputs, SMALL)
    assert isinstance(output, torch.Tensor)
    assert_close(output, reference(case)[0], 1e-12)
    assert isinstance(distance_attention(case.q, case.k, case.v), torch.Tensor)


@pytest.mark.parametrize("impl", ["reference", "native", "tiled"])
@pytest.mark.parametrize("routing", ["top1", "sparse"])
def test_hard_routing_reads_labels_alone(routing, impl):
    case = Case(num_queries=20, num_keys=20, dtype=torch.float32)
    mixed = mosar_attention(*case.inputs, case.config, routing=routing, impl=impl)
    one_hot = (top1_routing(case.pi_q), top1_routing(case.pi_k))
    labels = mosar_attention(*case.inputs[:3], *one_hot, case.config, routing=routing, impl=impl)
    assert torch.equal(mixed, labels)


def test_without_a_bias_distance_attention_is_sdpa():
    case = Case(batch=2, kv_heads=2, heads_per_kv=3, num_queries=50, num_keys=50)
    plain = F.scaled_dot_product_attention(case.q, case.k, case.v, is_causal=True, enable_gqa=True)
    assert_close(distance_attention(case.q, case.k, case.v, impl="reference"), plain, 1e-13)


@pytest.mark.parametrize("groups", [1, 2])
def test_soft_gradients(groups):
    config = MoSARConfig(regimes=SMALL.regimes, routing_groups=groups, num_sinks=1)
    case = Case(
        config=config,
        batch=2,
        kv_heads=2,
        heads_per_kv=2,
        num_queries=3,
        num_keys=4,
        head_dim=2,
        softcap=2.0,
        padding="holes",
    )

    def attend(q, k, v, pi_q, pi_k):
        # Gradcheck steps off the simplex by more than the operator would take: renormalise.
        pi_q, pi_k = (pi / pi.sum(dim=-1, keepdim=True) for pi in (pi_q, pi_k))
        return mosar_attention(
            q, k, v, pi_q, pi_k, config, impl="reference", softcap=2.0, key_valid=case.key_valid
        )

    assert gradcheck(attend, differentiable(*case.inputs))


@pytest.mark.parametrize("routing", ["top1", "sparse"])
def test_hard_routing_gives_probabilities_no_gradient(routing):
    case = Case(kv_heads=2, heads_per_kv=2, num_queries=3, num_keys=4, head_dim=2, routing=routing)
    q, k, v, pi_q, pi_k = differentiable(*case.inputs)

    def attend(q, k, v):
        return mosar_attention(q, k, v, pi_q, pi_k, SMALL, routing=routing, impl="reference")

    output = attend(q, k, v)
    gradients = torch.autograd.grad(
        output.square().sum(), (pi_q, pi_k), allow_unused=True, retain_graph=True
    )
    assert all(gradient is None or not gradient.any() for gradient in gradients)
    assert gradcheck(attend, (q, k, v))


def test_distance_gradients():
    case = Case(kv_heads=1, heads_per_kv=2, num_queries=3, num_keys=4, head_dim=2)
    bias = case.distance_bias("both")
    outside = torch.arange(bias["log_gate"].shape[1]) == 1

    def attend(q, k, v, log_gate, slopes, key_bias):
        log_gate = log_gate.masked_fill(outside, -math.inf)
        return distance_attention(
            q,
            k,
            v,
            log_gate=log_gate,
            slopes=slopes,
            key_bias=key_bias,
            softcap=2.0,
            window=2,
            return_lse=True,
            impl="reference",
        )

    finite = bias["log_gate"].nan_to_num(neginf=0.5)
    key_bias = torch.linspace(-1, 2, 2 * case.batch * 4).double().reshape(case.batch, 2, 4)
    leaves = differentiable(case.q, case.k, case.v, finite, bias["slopes"], key_bias)
    assert gradcheck(attend, leaves)


def plain_attention(q, k, v, bias):
    """softmax(q k^T / sqrt(D) + bias) v as plain torch computes it in the inputs' dtype."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 + bias, dim=-1) @ v


@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_low_precision_is_rounded_only_once(routing, dtype):
    """With accumulation in float32 the only visible error is that of the output's own dtype."""
    case = Case(dtype=dtype, routing=routing, num_queries=64, num_keys=64, head_dim=32)
    output, lse = reference(case)
    exact, exact_lse = mosar_attention(
        *(tensor.double() for tensor in case.inputs),
        SMALL,
        routing=routing,
        return_lse=True,
        impl="reference",
    )
    assert output.dtype == dtype
    assert lse.dtype == torch.float32
    error = (output.double() - exact).abs()
    assert (error <= torch.finfo(dtype).eps / 2 * exact.abs() + 2e-6).all()
    assert_close(lse, exact_lse, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *LOW_PRECISION])
@pytest.mark.parametrize("kind", DISTANCE_BIASES)
def test_distance_attention_keeps_the_dtype(kind, dtype):
    case = Case(dtype=dtype, batch=2, kv_heads=2, num_queries=20, num_keys=20, seed=5)
    output, lse = distance_reference(case, kind)
    exact, exact_lse = distance_attention(
        *(x.double() for x in (case.q, case.k, case.v)),
        return_lse=True,
        impl="reference",
        **case.distance_bias(kind),
    )
    assert output.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    error = (output.double() - exact).abs()
    assert (error <= torch.finfo(dtype).eps / 2 * exact.abs() + 2e-6).all()
    assert_close(lse, exact_lse, 1e-5)


@given(cases())
def test_inputs_are_left_as_they_were(case):
    given_ = [
        tensor
        for tensor in (*case.inputs, *case.placement.values())
        if isinstance(tensor, torch.Tensor)
    ]
    copies = [tensor.clone() for tensor in given_]
    reference(case)
    assert all(torch.equal(a, b) for a, b in zip(given_, copies, strict=True))


GOOD = Case(batch=2, kv_heads=2, heads_per_kv=2, num_queries=5, num_keys=5, dtype=torch.float32)


def zeros(*shape, dtype=torch.float32, device=None):
    return torch.zeros(shape, dtype=dtype, device=device)


def uniform(*shape, dtype=torch.float32):
    return torch.full((*shape, 3), 1 / 3, dtype=dtype)


WRONG_FOR_BOTH = [
    ({"q": [[1.0]]}, "q must be a tensor, got list"),
    ({"k": None}, "k must be a tensor, got NoneType"),
    ({"q": zeros(4, 5, 4)}, r"q must be .*\[4, 5, 4\]"),
    ({"v": zeros(2, 2, 0, 4)}, r"v must be .*\[2, 2, 0, 4\]"),
    ({"q": zeros(2, 4, 5, 4, dtype=torch.int64)}, "q must be one of .*int64"),
    ({"k": zeros(2, 2, 5, 4, dtype=torch.bfloat16)}, "q, k and v must have one dtype"),
    ({"v": zeros(2, 2, 5, 4, dtype=torch.float64)}, "q, k and v must have one dtype"),
    ({"k": zeros(2, 2, 5, 4, device="meta")}, "q, k and v must be on one device"),
    ({"v": zeros(2, 2, 6, 4)}, r"k and v must have one shape"),
    ({"q": zeros(1, 4, 5, 4)}, "q and k must agree in batch"),
    ({"q": zeros(2, 4, 5, 8)}, "q and k must agree in .*head_dim"),
    ({"q": zeros(2, 3, 5, 4)}, "3 heads of q .*2 heads of k"),
    ({"q": zeros(2, 4, 6, 4)}, "T=6 > S=5; give query_positions"),
    ({"scale": math.nan}, "scale .*nan"),
    ({"scale": "1"}, "scale .*'1'"),
    ({"scale": True}, "scale .*True"),
    ({"softcap": 0.0}, r"softcap .*0\.0"),
    ({"softcap": -1}, "softcap .*-1"),
    ({"softcap": math.inf}, "softcap .*inf"),
    ({"window": True}, "window .*True"),
    ({"query_positions": torch.full((2, 5), -2)}, "query_positions .*-2"),
    ({"key_positions": torch.arange(4, -1, -1).expand(2, 5)}, "key_positions .*4 before 3"),
    ({"key_valid": zeros(2, 5)}, "key_valid .*float32"),
    ({"segment_ids": zeros(2, 5)}, "segment_ids .*float32"),
    ({"impl": "fastest"}, "impl .*'fastest'"),
    ({"impl": None}, "impl .*None"),
    ({"dropout": 0.1}, r"dropout=0\.1"),
]
WRONG_ROUTED = [
    ({"config": None}, "config must be a MoSARConfig, got NoneType"),
    ({"config": SMALL.to_dict()}, "config must be a MoSARConfig, got dict"),
    ({"routing": "hard"}, "routing .*'hard'"),
    ({"routing": None}, "routing .*None"),
    ({"learn_routing": True}, "learn_routing=True needs .*'soft'; soft routing learns without it"),
    ({"learn_routing": True, "routing": "top1"}, "learn_routing=True needs .*'top1'$"),
    ({"pi_q": [[1.0]]}, "pi_q must be a tensor, got list"),
    ({"pi_q": uniform(2, 4)}, r"pi_q must be .*\[2, 4, 3\]"),
    ({"pi_k": uniform(1, 5)}, r"pi_k must be .*\[1, 5, 3\]"),
    ({"pi_k": torch.full((2, 5, 2), 0.5)}, r"pi_k must be .*\[2, 5, 2\]"),
    ({"pi_q": torch.full((3,), 1 / 3)}, "pi_q must be"),
    ({"pi_q": uniform(2, 3, 5), "pi_k": uniform(2, 3, 5)}, "pi_q has 3 routing groups"),
    ({"pi_q": uniform(2, 4, 5), "pi_k": uniform(2, 4, 5)}, "pi_q has 4 routing groups"),
    ({"pi_q": uniform(2, 2, 5)}, "pi_q and pi_k must have the same routing groups"),
    ({"pi_q": uniform(2, 5, dtype=torch.bfloat16)}, "pi_q must be float32 .*bfloat16"),
    ({"pi_k": uniform(2, 5, dtype=torch.float16)}, "pi_k must be float32 .*float16"),
    ({"pi_k": uniform(2, 5).to("meta")}, "pi_k must be on the device of q"),
    ({"pi_q": 2 * uniform(2, 5)}, "pi_q must hold probabilities"),
    ({"pi_k": torch.tensor([1.5, -0.5, 0.0]).expand(2, 5, 3)}, "pi_k must hold probabilities"),
    ({"pi_k": math.nan * uniform(2, 5)}, "pi_k must hold probabilities"),
]
WRONG_DISTANCE = [
    ({"slopes": [0.5] * 4}, "slopes must be a tensor, got list"),
    ({"slopes": zeros(3)}, r"slopes .*\[4\], got \[3\]"),
    ({"slopes": zeros(4, dtype=torch.int64)}, "slopes .*int64"),
    ({"slopes": zeros(4, device="meta")}, "slopes .*device"),
    ({"log_gate": [[0.0] * 5]}, "log_gate must be a tensor, got list"),
    ({"log_gate": zeros(5)}, r"log_gate .*\[5\]"),
    ({"log_gate": zeros(2, 5)}, r"log_gate .*\[2, 5\]"),
    ({"log_gate": zeros(1, 0)}, "log_gate"),
    ({"log_gate": zeros(1, 5, dtype=torch.int64)}, "log_gate .*int64"),
    ({"log_gate": zeros(1, 5, device="meta")}, "log_gate .*device"),
    ({"log_gate": zeros(1, 4)}, "log_gate .*up to 3, .*distance 4"),
    ({"log_gate": zeros(1, 2), "window": 2}, "log_gate .*up to 1, .*distance 2"),
]


@pytest.mark.parametrize(("changes", "match"), WRONG_FOR_BOTH + WRONG_ROUTED)
def test_wrong_input_of_mosar_attention_is_named(changes, match):
    names = ("q", "k", "v", "pi_q", "pi_k")
    good = dict(zip(names, GOOD.inputs, strict=True)) | {"config": SMALL}
    mosar_attention(**good)
    with pytest.raises(ValueError, match=match):
        mosar_attention(**(good | changes))


@pytest.mark.parametrize(("changes", "match"), WRONG_FOR_BOTH + WRONG_DISTANCE)
def test_wrong_input_of_distance_attention_is_named(changes, match):
    good = {"q": GOOD.q, "k": GOOD.k, "v": GOOD.v}
    distance_attention(**good)
    with pytest.raises(ValueError, match=match):
        distance_attention(**(good | changes))


@pytest.mark.parametrize("window", [2, 2.7])
def test_a_window_bounds_the_gate_table(window):
    output = distance_attention(
        GOOD.q, GOOD.k, GOOD.v, log_gate=zeros(1, 3), window=window, impl="reference"
    )
    plain = distance_attention(GOOD.q, GOOD.k, GOOD.v, window=2, impl="reference")
    assert torch.equal(output, plain)


def test_a_gate_table_need_not_cover_pairs_that_do_not_exist():
    placement = {
        "query_positions": torch.tensor([[50, 51, 52, 53, 54]] * 2),
        "key_positions": torch.tensor([[0, 1, 2, 53, 54]] * 2),
        "window": 20,
    }
    output, lse = distance_attention(
        GOOD.q,
        GOOD.k,
        GOOD.v,
        log_gate=zeros(1, 2),
        return_lse=True,
        impl="reference",
        **placement,
    )
    assert output.isfinite().all()
    assert (lse[:, :, :3] == -math.inf).all()


def test_a_gate_table_may_extend():
    gates = torch.tensor([[0.0, -1.0, -2.0]], dtype=torch.float64)
    long = torch.cat([gates, gates[:, -1:].expand(1, 9)], dim=1)
    inputs = GOOD.q, GOOD.k, GOOD.v
    with pytest.raises(ValueError, match="log_gate_extends"):
        distance_attention(*inputs, log_gate=gates)
    for impl in ("reference", "tiled"):
        extended = distance_attention(*inputs, log_gate=gates, log_gate_extends=True, impl=impl)
        assert torch.equal(extended, distance_attention(*inputs, log_gate=long, impl=impl))


PLACED = Case(positions="gaps", padding="left", segments="packed", dtype=torch.float32)


@pytest.mark.parametrize("case", [Case(dtype=torch.float32), PLACED], ids=["plain", "placed"])
def test_the_meta_device_gives_shapes(case):
    inputs = [x.to("meta") for x in case.inputs]
    options = {name: x.to("meta") if torch.is_tensor(x) else x for name, x in case.options.items()}
    for routing in ROUTINGS:
        output, lse = mosar_attention(
            *inputs, case.config, routing=routing, return_lse=True, **options
        )
        assert output.is_meta and output.shape == case.q.shape
        assert lse.is_meta and lse.shape == case.q.shape[:-1]
    slopes = torch.ones(case.num_heads, device="meta")
    assert distance_attention(*inputs[:3], slopes=slopes, **options).is_meta
    for impl in ("native", "tiled"):
        with pytest.raises(ValueError, match=f"impl='{impl}' cannot serve: .* on meta"):
            mosar_attention(*inputs, case.config, impl=impl, **options)


def test_fake_tensors_give_shapes_and_leave_nothing_behind():
    # A length and a geometry that nothing else asks for: nothing of them is kept already.
    config = MoSARConfig(num_sinks=2, barrier=5.25)
    case = Case(dtype=torch.float32, num_queries=19, num_keys=19, config=config)
    real = case.inputs
    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(x) for x in real]
        for routing in ROUTINGS:
            output = mosar_attention(*inputs, config, routing=routing)
            assert output.shape == case.q.shape
        distance_attention(*inputs[:3])
    for routing in ROUTINGS:
        assert mosar_attention(*real, config, routing=routing).isfinite().all()
    assert distance_attention(*real[:3]).isfinite().all()
