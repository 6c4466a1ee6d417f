"""Which implementation serves a call: `auto` chooses, a named one serves or says why not."""

import pytest
import torch

import mosar.attention
from cases import DISTANCE_BIASES, ROUTINGS, Case
from kernels.budget import distance_bias
from mosar import distance_attention, mosar_attention
from mosar.core import reference_attention
from mosar.kernels import native, tiled

CASE = Case(dtype=torch.float32, batch=2, kv_heads=2, heads_per_kv=2)
LARGE = {"num_queries": 600, "num_keys": 600, "batch": 1, "head_dim": 1, "heads_per_kv": 1}


@pytest.fixture
def served(monkeypatch):
    """The implementations that were called, in order."""
    calls = []

    def spy(module, label):
        attend = module.attend
        monkeypatch.setattr(
            module, "attend", lambda *args, **kwargs: calls.append(label) or attend(*args, **kwargs)
        )

    for module in (native, tiled, reference_attention):
        spy(module, module.__name__.rpartition(".")[2].removesuffix("_attention"))
    return calls


def call(case, kind, **options):
    if kind in ROUTINGS:
        return mosar_attention(*case.inputs, case.config, routing=kind, **options)
    bias = distance_bias(case, kind)
    return distance_attention(case.q, case.k, case.v, **(bias | options))


@pytest.mark.parametrize("impl", ["reference", "native", "tiled"])
@pytest.mark.parametrize("kind", [*ROUTINGS, *DISTANCE_BIASES])
def test_a_named_implementation_serves(served, kind, impl):
    call(CASE, kind, impl=impl)
    assert served == [impl]


@pytest.mark.parametrize(
    ("dtype", "size", "chosen"),
    [
        (torch.float32, {}, "native"),
        (torch.float32, LARGE, "native"),
        (torch.bfloat16, {}, "native"),
        (torch.float16, {}, "native"),
        (torch.float64, {}, "reference"),
        (torch.float64, LARGE, "tiled"),
    ],
)
@pytest.mark.parametrize("kind", [*ROUTINGS, "slopes"])
def test_auto(served, kind, dtype, size, chosen):
    call(CASE.with_(dtype=dtype, **size), kind)
    assert served == [chosen]


@pytest.mark.parametrize("name", ["log_gate", "slopes", "key_bias"])
def test_auto_trains_a_bias_natively(served, name):
    heads = CASE.num_heads
    shape = {"log_gate": (1, CASE.num_keys), "slopes": (heads,)}
    learned = torch.zeros(shape.get(name, (CASE.batch, heads, CASE.num_keys)), requires_grad=True)
    distance_attention(CASE.q, CASE.k, CASE.v, **{name: learned}).square().sum().backward()
    assert served == ["native"]
    assert learned.grad is not None
    assert learned.grad.any()


@pytest.mark.parametrize("kind", [*ROUTINGS, "none"])
def test_native_refuses_float64(kind):
    with pytest.raises(ValueError, match=r"impl='native' cannot serve: .*float64"):
        call(CASE.with_(dtype=torch.float64), kind, impl="native")


def test_native_refuses_another_device():
    on_meta = [tensor.to("meta") for tensor in CASE.inputs]
    with pytest.raises(ValueError, match=r"impl='native' cannot serve: .*CPU.*meta"):
        mosar_attention(*on_meta, CASE.config, impl="native")


@pytest.mark.parametrize("kind", [*ROUTINGS, "slopes"])
def test_where_nothing_can_be_built(served, monkeypatch, kind):
    """Without a compiler `auto` takes torch operators, and `native` gives the reason."""
    monkeypatch.setattr(mosar.attention, "_native_obstacle", lambda: "no compiler")
    call(CASE, kind)
    call(CASE.with_(**LARGE), kind)
    assert served == ["reference", "tiled"]
    with pytest.raises(ValueError, match="impl='native' cannot serve: no compiler"):
        call(CASE, kind, impl="native")
