"""Runs of keys on the kernels: what torch operators compute in float64, and its gradients."""

import pytest
import torch

from geometries.test_every_variant import HIDDEN, SHAPE, enliven
from mosar.geometries import VARIANTS, chunked
from mosar.kernels.native import attend_runs, native_obstacle

pytestmark = pytest.mark.skipif(bool(native_obstacle()), reason="no compiler")
LENGTH = 75


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    sizes = [(count, SHAPE.head_dim) for count in (6, 2, 2)] + [(HIDDEN,)]
    made = [torch.randn(2, LENGTH, *size, generator=generator) for size in sizes]
    return [x.to(dtype).requires_grad_() for x in made]


def results(layer, dtype, **options):
    """The output and its gradients."""
    tensors = inputs(dtype)
    q, k, v, hidden = tensors
    out, _ = layer.to(dtype)(q, k, v, hidden=hidden, scale=0.3, softcap=4.0, **options)
    weights = torch.sin(torch.arange(out.numel())).reshape(out.shape)
    wanted = [*tensors[:3], *layer.parameters()]
    return [out, *torch.autograd.grad((out * weights.to(dtype)).sum(), wanted, allow_unused=True)]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", ["bigbird", "moba", "nsa"])
def test_blocks_on_the_kernels_are_those_of_torch_operators(name, documents, monkeypatch):
    attention = VARIANTS[name]
    layer = enliven(attention.geometry_class(attention, SHAPE), std=0.5)
    options = {}
    if documents:
        sizes = torch.tensor([20, 1, 54])
        options["segment_ids"] = torch.arange(3).repeat_interleave(sizes).expand(2, -1)
    called = []
    monkeypatch.setattr(chunked, "PAIRS", 32 * LENGTH)  # three chunks of queries
    module = __import__(type(layer).__module__, fromlist=["attend_runs"])
    plain = module.attend_runs
    monkeypatch.setattr(module, "attend_runs", lambda *a, **o: called.append(1) or plain(*a, **o))
    found = results(layer, torch.float32, **options)
    assert len(called) == (6 if name == "nsa" else 3)
    exact = results(layer, torch.float64, **options)
    assert len(called) == (6 if name == "nsa" else 3)
    for ours, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("runs", "biased"), [(2, False), (1, True)])
def test_runs_of_each_head(runs, biased):
    """By definition: a mask and a bias; some runs are empty, and a query reads nothing."""
    q, k, v, _ = (x.detach() for x in inputs())
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, 30, (2, 6, LENGTH, runs), generator=generator)
    first += torch.arange(runs) * 40
    end = first + torch.randint(0, 6, first.shape, generator=generator)
    end[:, :, 4] = first[:, :, 4]
    bias = torch.randn(2, 6, LENGTH, generator=generator) if biased else None
    found = attend_runs(q, k, v, first, end, scale=0.3, softcap=None, key_bias=bias)
    at = torch.arange(LENGTH)
    read = ((at >= first[..., None]) & (at < end[..., None])).any(dim=3)
    k, v = (x.double().repeat_interleave(3, dim=1) for x in (k, v))
    scores = 0.3 * q.double() @ k.transpose(2, 3)
    scores = scores if bias is None else scores + bias[:, :, None]
    weights = torch.softmax(scores.masked_fill(~read, -torch.inf), dim=-1).nan_to_num(0)
    torch.testing.assert_close(found.double(), weights @ v, rtol=1e-5, atol=1e-5)
    assert not found[:, :, 4].any()


@torch.no_grad()
def test_pruning_on_the_kernels_is_that_of_torch_operators(monkeypatch):
    layer = enliven(VARIANTS["fox"].geometry_class(VARIANTS["fox"], SHAPE), std=0.5)
    layer.enter_mode("acp", LENGTH)
    found = layer(*inputs()[:3], hidden=inputs()[3], scale=0.1)[0]
    counted = layer.acting.count_pairs((2, LENGTH))
    q, k, v, hidden = inputs(torch.float64)
    exact = layer.double()(q, k, v, hidden=hidden, scale=0.1)[0]
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)
    assert counted == layer.acting.count_pairs((2, LENGTH))
    assert 0.1 < counted[0] / counted[1] < 0.9


def test_buckets_on_the_kernels_are_those_of_torch_operators(monkeypatch):
    layer = VARIANTS["reformer"].geometry_class(VARIANTS["reformer"], SHAPE)
    monkeypatch.setattr(chunked, "PAIRS", 32 * LENGTH)
    found, counts = {}, {}
    for dtype in (torch.float32, torch.float64):
        q, k, v, hidden = inputs(dtype)
        out, _ = layer(q, k, v, hidden=hidden, scale=0.3, softcap=4.0)
        weights = torch.sin(torch.arange(out.numel())).reshape(out.shape).to(dtype)
        found[dtype] = [out, *torch.autograd.grad((out * weights).sum(), (q, v))]
        with torch.no_grad():
            layer(q, k, v, hidden=hidden, scale=0.3, softcap=4.0)
        counts[dtype] = layer.count_pairs((2, LENGTH))
    for ours, expected in zip(*found.values(), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4)
    assert counts[torch.float32] == counts[torch.float64]
