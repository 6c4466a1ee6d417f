"""The decoder with a cache: the logits of a text do not depend on the portions it comes in."""

from copy import deepcopy

import pytest
import torch

from mosar.geometries import AttentionConfig
from mosar.model.cache import DenseCache, DenseLayerCache, RegimeCache

from .models import small_decoder
from .test_decoder import logits_of, make_lively, some_tokens

# The other variants are in tests/geometries/test_every_variant.py.
RUNS = [
    *(("mosar", "soft"), ("mosar", "top1"), ("mosar", "sparse")),
    *(("rope", "soft"), ("fixed-m", "sparse")),
]
EPS = torch.finfo(torch.float32).eps
LENGTH = 90
PORTIONS = [(LENGTH,), (60, *(1,) * 30), (7, 1, 40, 2, 1, 1, 30, 8), (1,) * LENGTH]
# Left padding; the second row starts in the third portion.
PADDING = torch.arange(LENGTH) >= torch.tensor([0, 11])[:, None]


def portioned(decoder, tokens, cache, sizes, routing, valid=None):
    masks = [None] * len(sizes) if valid is None else valid.split(sizes, 1)
    parts = [
        logits_of(decoder, part, valid=mask, routing=routing, cache=cache)
        for part, mask in zip(tokens.split(sizes, 1), masks, strict=True)
    ]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("valid", [None, PADDING], ids=["full", "padded"])
@pytest.mark.parametrize(("name", "routing"), RUNS)
@torch.no_grad()
def test_full_is_prefill_and_decode_is_chunks(name, routing, valid):
    """Within the error budget: as near to float64 as the whole text at once is."""
    decoder = make_lively(small_decoder(name, init_std=0.2))
    tokens = some_tokens(length=LENGTH)
    chosen = torch.ones_like(PADDING) if valid is None else valid
    plain = logits_of(decoder, tokens, valid=valid, routing=routing)[chosen]
    exact = logits_of(deepcopy(decoder).double(), tokens, valid=valid, routing=routing)[chosen]
    budget = 2 * (plain - exact).abs().max() + 4 * EPS * exact.abs().max()
    keeping = [{}, {"evict": False}] if (routing, name) == ("sparse", "mosar") else [{}]
    for options in keeping:
        for sizes in PORTIONS:
            cache = decoder.new_cache(routing=routing, **options)
            found = portioned(decoder, tokens, cache, sizes, routing, valid)[chosen]
            assert (found - exact).abs().max() <= budget, (options, sizes)
            assert cache.slots == LENGTH
            assert torch.equal(cache.lengths, chosen.sum(dim=1))
            if (routing, name) == ("sparse", "mosar"):
                share = cache.used_bytes / (2 * int(chosen.sum()) * token_bytes(decoder))
                assert share < 0.9 if not options else share == 1


@pytest.mark.parametrize(("name", "routing"), RUNS)
@torch.no_grad()
def test_padding_changes_nothing(name, routing):
    """A padded row is the row alone: also where rows go on without `valid`, or pause."""
    decoder = make_lively(small_decoder(name, init_std=0.2)).double()
    tokens = some_tokens(length=LENGTH)
    row = tokens[1:, 11:]
    alone = logits_of(decoder, row, routing=routing)
    padded = logits_of(decoder, tokens, valid=PADDING, routing=routing)
    assert (padded[1:, 11:] - alone).abs().max() <= 1e-12
    cache = decoder.new_cache(routing=routing)
    portioned(decoder, tokens[:, :60], cache, (40, 20), routing, PADDING[:, :60])
    # While one row writes two tokens the other waits.
    pause = torch.tensor([[True, True], [False, False]])
    portioned(decoder, tokens[:, 60:62], cache, (2,), routing, pause)
    rest = row[:, 49:].expand(2, -1)
    found = portioned(decoder, rest, cache, (1, 1, rest.shape[1] - 2), routing)
    assert (found[1:] - alone[:, 49:]).abs().max() <= 1e-12


@torch.no_grad()
def test_without_softcap():
    """One query a row is then left to torch where there is no bias."""
    decoder = make_lively(small_decoder("rope", init_std=0.2, attn_softcap=None)).double()
    tokens = some_tokens(length=LENGTH)
    for valid in (None, PADDING):
        whole = logits_of(decoder, tokens, valid=valid)
        found = portioned(decoder, tokens, decoder.new_cache(), PORTIONS[1], "soft", valid)
        rows = PADDING if valid is not None else torch.ones_like(PADDING)
        assert (found - whole)[rows].abs().max() <= 1e-12


def token_bytes(decoder):
    """One token in one of the two layers: key, value, and what the cache notes of it."""
    model = decoder.model_config
    return 2 * model.num_kv_heads * model.head_dim * 4 + 8


@torch.no_grad()
def test_groups_sinks_and_bfloat16():
    attention = AttentionConfig(geometry="mosar", routing_groups=2, num_sinks=3)
    decoder = make_lively(small_decoder(attention, init_std=0.2))
    tokens = some_tokens(length=LENGTH)
    whole = logits_of(decoder, tokens, routing="sparse")
    cache = decoder.new_cache()
    found = portioned(decoder, tokens, cache, PORTIONS[2], "sparse")
    assert (found - whole).abs().max() <= 2e-5
    assert all(layer.regime_counts["sinks"].eq(3).all() for layer in cache)
    narrow = decoder.new_cache(dtype=torch.bfloat16)
    found = portioned(decoder, tokens, narrow, PORTIONS[2], "sparse")
    assert 1e-4 < (found - whole).abs().max() <= 0.1
    assert narrow.used_bytes < 0.7 * cache.used_bytes


@pytest.mark.parametrize("name", ["rope", "mosar"])
@torch.no_grad()
def test_rows_move_and_tokens_go(name):
    decoder = make_lively(small_decoder(name, init_std=0.2))
    tokens = some_tokens(batch=3, length=LENGTH)
    options = {"crop_margin": 8} if name == "mosar" else {}
    cache = decoder.new_cache(**options)
    whole = logits_of(decoder, tokens, routing="sparse")
    portioned(decoder, tokens[:, :60], cache, (60,), "sparse")
    cache.crop(-5)
    cache.reorder(torch.tensor([2, 2, 0]))
    cache.batch_repeat(2)
    cache.batch_select(torch.tensor([5, 0]))
    rows = torch.tensor([0, 2])
    found = portioned(decoder, tokens[rows, 55:], cache, (1, 1, LENGTH - 57), "sparse")
    assert (found - whole[rows, 55:]).abs().max() <= 2e-5
    assert cache.batch_size == 2 and 0 < cache.used_bytes <= cache.allocated_bytes
    cache.reset()
    assert cache.slots == cache.batch_size == cache.allocated_bytes == 0
    found = portioned(decoder, tokens, cache, (LENGTH,), "sparse")
    assert (found - whole).abs().max() <= 2e-5


@torch.no_grad()
def test_wrong_caches():
    mosar, rope = small_decoder("mosar"), small_decoder("rope")
    tokens = some_tokens()
    assert isinstance(mosar.new_cache(), RegimeCache) and isinstance(rope.new_cache(), DenseCache)
    with pytest.raises(ValueError, match="cache must be a RegimeCache of 2 layers"):
        mosar(tokens, routing="sparse", cache=rope.new_cache())
    with pytest.raises(ValueError, match=r"a DenseCache of 2 layers.*got RegimeCache"):
        rope(tokens, cache=mosar.new_cache())
    with pytest.raises(ValueError, match="got DenseCache of 3"):
        rope(tokens, cache=DenseCache(3))
    with pytest.raises(ValueError, match="got list"):
        rope(tokens, cache=[])
    with pytest.raises(ValueError, match="the cache is for sparse routing, got routing='soft'"):
        mosar(tokens, cache=mosar.new_cache())
    segments, valid = torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool)
    with pytest.raises(ValueError, match="segment_ids cannot be given with a cache"):
        rope(tokens, segment_ids=segments, cache=rope.new_cache())
    with pytest.raises(ValueError, match="segment_ids cannot be given with valid"):
        rope(tokens, segment_ids=segments, valid=valid)
    for wrong in (valid[:, 1:], valid.int()):
        with pytest.raises(ValueError, match=r"valid must be bool \[2, 45\] like tokens, got"):
            rope(tokens, valid=wrong)
    with pytest.raises(ValueError, match=r"no options, got \['crop_margin'\]"):
        rope.new_cache(crop_margin=3)
    cache = rope.new_cache()
    rope(tokens, cache=cache)
    with pytest.raises(ValueError, match=r"k must be \[2, 2, length, 8\]"):
        rope(tokens[:1], cache=cache)
    cache[1].crop(3)
    with pytest.raises(ValueError, match="given different tokens"):
        rope(tokens, cache=cache)


@pytest.mark.parametrize("routing", ["soft", "top1", "sparse"])
@pytest.mark.parametrize("name", ["rope", "mosar"])
def test_gradients_pass_through_the_first_tokens(name, routing):
    """The cache takes them up without; what comes later would miss theirs, and is refused."""
    decoder, tokens = make_lively(small_decoder(name)).double(), some_tokens()
    gradients = []
    for cache in (None, decoder.new_cache(routing)):
        decoder.zero_grad()
        hidden = decoder(tokens[:, :40], routing=routing, cache=cache).hidden
        hidden.square().sum().backward()
        found = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
        gradients.append(found)
    assert gradients[0].keys() == gradients[1].keys()
    for key, plain in gradients[0].items():
        assert (gradients[1][key] - plain).abs().max() <= 1e-12 * plain.abs().max(), key
    with pytest.raises(ValueError, match=r"call the model under torch.no_grad\(\)"):
        decoder(tokens[:, 40:], routing=routing, cache=cache)
    with torch.no_grad():
        later = decoder(tokens[:, 40:], routing=routing, cache=cache).hidden
        whole = decoder(tokens, routing=routing).hidden
    assert (later - whole[:, 40:]).abs().max() < 1e-11


def test_dense_layer_cache():
    cache = DenseLayerCache()
    k = torch.randn(2, 3, 200, 4)
    for begin in range(0, 200, 40):
        keys = cache.update(k[:, :, begin : begin + 40], -k[:, :, begin : begin + 40])
    assert torch.equal(keys.k, k) and torch.equal(keys.v, -k)
    assert keys.positions is None and keys.valid is None
    # A position and a flag for every token.
    assert cache.used_bytes == 2 * k.nbytes + 2 * 200 * 9
