"""torch.export of the decoder: one graph for every length, with a cache and without."""

import io

import pytest
import torch
from torch import nn

from model.models import small_decoder
from mosar.model.decoder import Decoder

LENGTHS = (2, 384, 700)
KINDS = [("mosar", "soft"), ("mosar", "sparse"), ("rope", "soft")]
kinds = pytest.mark.parametrize(("variant", "routing"), KINDS)
# Which dimension of a cache's tensors runs over tokens.
AXES = {"k": 2, "v": 2, "labels": 2, "pi": 2, "positions": 1, "valid": 1}


class Model(nn.Module):
    """Logits, and the cache if there is one."""

    def __init__(self, decoder: Decoder, routing: str, *, cached: bool = False):
        super().__init__()
        self.decoder, self.routing, self.cached = decoder, routing, cached

    def forward(self, tokens, cache=None, valid=None):
        if cache is None and self.cached:
            cache = self.decoder.new_cache(self.routing)
        output = self.decoder(tokens, cache=cache, valid=valid, routing=self.routing)
        logits = self.decoder.logits(output.hidden)
        return logits if cache is None else (logits, cache)


def some_tokens(length):
    return torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(length))


def saved_and_loaded(program):
    # They are pickled along, and torch loads no class of ours from a pickle; a program needs none.
    program._example_inputs = None
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@torch.no_grad()
@pytest.mark.parametrize(("variant", "routing"), [*KINDS[:2], ("fixed-s", "sparse")])
def test_any_length(variant, routing):
    model = Model(small_decoder(variant, num_layers=1), routing)
    length = torch.export.Dim("length", max=100_000)
    shapes = {"tokens": {1: length}, "valid": {1: length}}
    valid = torch.ones(2, 50, dtype=torch.bool)
    given = {"tokens": some_tokens(50), "valid": valid}
    program = torch.export.export(model, (), given, dynamic_shapes=shapes).module()
    for size in LENGTHS:
        valid = torch.ones(2, size, dtype=torch.bool)
        valid[0, : size // 2] = False
        found, expected = (
            run(tokens=some_tokens(size), valid=valid)[valid] for run in (program, model)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@torch.no_grad()
@kinds
def test_a_cache_goes_in_and_comes_out(variant, routing):
    """Prefill and steps, each one graph, give what one pass over all tokens gives."""
    decoder = small_decoder(variant, num_layers=1)
    model = Model(decoder, routing, cached=True)
    length = torch.export.Dim("length", max=100_000)
    shapes = {"tokens": {1: length}}
    prefill = torch.export.export(model, (some_tokens(50),), dynamic_shapes=shapes).module()
    tokens = some_tokens(400)
    expected = Model(decoder, routing)(tokens)

    # Made eagerly: lists of a few tokens, of which none has been evicted.
    _, example = model(tokens[:, :5])
    past = torch.export.Dim("past", max=100_000)
    caches = [{name: {AXES[name]: past} for name in layer.tensors()} for layer in example]
    step = torch.export.export(
        model, (tokens[:, :1], example), dynamic_shapes={"tokens": None, "cache": caches}
    )
    step = saved_and_loaded(step).module()
    logits, cache = prefill(tokens[:, :380])
    found = [logits]
    for at in range(380, 390):
        logits, cache = step(tokens[:, at : at + 1], cache)
        found.append(logits)
    # What came out of a graph serves without one too.
    found.append(model(tokens[:, 390:], cache)[0])
    assert cache.slots == 400
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=0, atol=2e-6)


@torch.no_grad()
def test_a_cache_that_has_evicted_keys_is_refused():
    model = Model(small_decoder("mosar"), "sparse", cached=True)
    _, cache = model(some_tokens(200))
    with pytest.raises(ValueError, match="keys have been evicted"):
        torch.export.export(model, (some_tokens(1), cache))


@torch.no_grad()
def test_tensors_of_a_cache_are_new_only_after_a_change():
    model = Model(small_decoder("mosar"), "sparse", cached=True)
    _, cache = model(some_tokens(8))
    for change in (
        lambda: model(some_tokens(1), cache),
        lambda: cache.crop(-1),
        lambda: cache.reorder(torch.tensor([1, 0])),
    ):
        before = cache[0].tensors()
        assert cache[0].tensors() is before
        change()
        assert cache[0].tensors() is not before


@torch.no_grad()
def test_a_cache_on_the_meta_device_is_refused_by_name():
    decoder = small_decoder("mosar").to("meta")
    tokens = some_tokens(4).to("meta")
    assert decoder(tokens).hidden.is_meta
    with pytest.raises(ValueError, match="k is on the meta device"):
        decoder(tokens, routing="sparse", cache=decoder.new_cache("sparse"))
