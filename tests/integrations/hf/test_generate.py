"""`generate` with the cache gives what it gives without: logits are compared, tokens follow."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.test_decoder import some_tokens
from mosar.geometries import PAPER_VARIANTS, VARIANTS, AttentionConfig
from mosar.integrations.hf import MosarCache
from mosar.model.cache import RegimeCache

from .runs import small_model

CASES = [
    (name, routing)
    for name in (*PAPER_VARIANTS, "dsa", "reformer")
    for attention in (VARIANTS[name],)
    for routing in (("soft", "top1", "sparse") if attention.geometry == "mosar" else ("soft",))
    if name != "mosar-cost"
] + [("fixed-m", "sparse")]
PROMPT = some_tokens(length=20)
MASK = torch.arange(20) >= torch.tensor([0, 7])[:, None]
GROUPED = AttentionConfig(geometry="mosar", routing_groups=2, num_sinks=2)


def written(model, tokens=PROMPT, mask=MASK, *, new=24, **options):
    """What `generate` wrote, with all logits."""
    torch.manual_seed(11)
    # Left to itself a random model repeats its last token, and hardly needs the others.
    options = {"do_sample": False, "pad_token_id": 0, "no_repeat_ngram_size": 2} | options
    return model.generate(
        tokens,
        attention_mask=mask.long(),
        max_new_tokens=new,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


def assert_same_writing(one, other, tolerance=2e-5):
    assert len(one.logits) == len(other.logits)
    difference = torch.stack(one.logits) - torch.stack(other.logits)
    assert difference.abs().max() <= tolerance
    assert torch.equal(one.sequences, other.sequences)


@pytest.mark.parametrize(
    ("variant", "routing"), [("rope", "soft"), ("mosar", "soft"), ("mosar", "sparse")]
)
def test_greedy(variant, routing):
    model = small_model(variant, routing=routing)
    cached = written(model)
    assert isinstance(cached.past_key_values, MosarCache)
    assert_same_writing(cached, written(model, use_cache=False))
    # A row with padding is the row alone.
    alone = written(model, PROMPT[1:, 7:], MASK[1:, 7:])
    rows = torch.stack(cached.logits)[:, 1:]
    assert (rows - torch.stack(alone.logits)).abs().max() <= 2e-5


def test_keys_are_evicted_meanwhile():
    model = small_model(routing="sparse")
    # Embeddings instead of tokens give the same.
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    embeds = model.get_input_embeddings()(PROMPT)
    told = model.generate(inputs_embeds=embeds, attention_mask=MASK.long(), **options)
    assert torch.equal(told, written(model, new=9, no_repeat_ngram_size=0).sequences[:, 20:])
    cache = written(model, new=60).past_key_values
    assert isinstance(cache.states, RegimeCache)
    assert cache.get_seq_length() == 79 and cache.batch_size == 2
    counts = sum(sum(int(c.sum()) for c in layer.regime_counts.values()) for layer in cache.states)
    assert 0 < counts < 2 * (79 + 72) * 0.95
    assert 0 < cache.used_bytes <= cache.allocated_bytes


@pytest.mark.parametrize(("variant", "routing"), [("rope", "soft"), ("mosar", "sparse")])
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2, "do_sample": True, "top_k": 10, "num_return_sequences": 2},
        {"num_beams": 3, "num_return_sequences": 2, "eos_token_id": 5},
    ],
    ids=["sampled beams", "some beams end"],
)
def test_sampling_and_beams(variant, routing, options):
    model = small_model(variant, routing=routing)
    assert_same_writing(written(model, **options), written(model, use_cache=False, **options))


@pytest.mark.parametrize("routing", ["soft", "top1", "sparse"])
def test_beams_with_groups_and_sinks(routing):
    model = small_model(GROUPED, routing=routing)
    assert_same_writing(written(model, num_beams=3), written(model, num_beams=3, use_cache=False))


@pytest.mark.parametrize("routing", ["soft", "sparse"])
def test_prompt_lookup_goes_back(routing, monkeypatch):
    """Candidates that are refused are cropped: a wrong crop may give equal tokens."""
    model, crops = small_model(routing=routing), []
    crop = MosarCache.crop
    monkeypatch.setattr(MosarCache, "crop", lambda self, n: (crops.append(n), crop(self, n)))
    tokens, mask = PROMPT[:1].repeat(1, 4), torch.ones(1, 80, dtype=torch.bool)
    free = {"no_repeat_ngram_size": 0}
    looked = written(model, tokens, mask, prompt_lookup_num_tokens=5, **free)
    assert min(crops) < -2
    assert_same_writing(looked, written(model, tokens, mask, use_cache=False, **free))


@pytest.mark.parametrize("routing", ["soft", "sparse"])
def test_a_cache_goes_on_in_chunks_and_again(routing):
    model = small_model(routing=routing)
    whole = written(model)
    assert_same_writing(written(model, prefill_chunk_size=6), whole)
    # The first ten tokens are read before, and the cache serves twice.
    cache = model.new_cache()
    with torch.no_grad():
        model(PROMPT[:, :10], attention_mask=MASK[:, :10], past_key_values=cache)
    for _ in range(2):
        assert_same_writing(written(model, past_key_values=copy.deepcopy(cache)), whole)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_same_writing(written(model, past_key_values=cache), whole)


@settings(max_examples=15)
@given(st.data())
def test_portions_do_not_matter(data):
    """Any cut of a padded text into calls, with or without position_ids, gives the same logits."""
    variant, routing = data.draw(st.sampled_from([*CASES, ("grouped", "sparse")]))
    attention = GROUPED if variant == "grouped" else variant
    model = small_model(attention, routing=routing).double()
    length = data.draw(st.integers(2, 70))
    tokens = some_tokens(batch=3, length=length, seed=length)
    padding = torch.tensor(data.draw(st.lists(st.integers(0, length - 1), min_size=3, max_size=3)))
    mask = torch.arange(length) >= padding[:, None]
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=5)))
    cache, parts = model.new_cache(), []
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask, use_cache=False).logits
        for begin, end in zip([0, *cuts], [*cuts, length], strict=True):
            told = positions[:, begin:end] if data.draw(st.booleans()) else None
            seen = mask[:, :end] if data.draw(st.booleans()) else mask[:, begin:end]
            part = model(
                tokens[:, begin:end],
                attention_mask=seen,
                position_ids=told,
                past_key_values=cache,
            )
            parts.append(part.logits)
    assert (torch.cat(parts, dim=1) - whole)[mask].abs().max() < 1e-11


def test_rows_move_and_tokens_go():
    for variant in ("rope", "mosar"):
        model = small_model(variant, routing="sparse").double()
        tokens = some_tokens(batch=3, length=60)
        whole = model(tokens, use_cache=False).logits
        cache = model.new_cache(**({"crop_margin": 8} if variant == "mosar" else {}))
        with torch.no_grad():
            model(tokens[:, :50], past_key_values=cache)
            cache.crop(0)
            cache.crop(-5)
            cache.reorder_cache(torch.tensor([2, 2, 0]))
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([5, 0]))
            assert cache.get_seq_length() == 45 and cache.get_mask_sizes(3, 0) == (48, 0)
            rows = torch.tensor([0, 2])
            found = model(tokens[rows, 45:], past_key_values=cache).logits
        assert (found - whole[rows, 45:]).abs().max() < 1e-11


@torch.no_grad()
def test_wrong_use_is_named():
    model, tokens = small_model(routing="sparse"), some_tokens(length=60)
    cache = model(tokens).past_key_values
    with pytest.raises(ValueError, match="tokens_to_remove must be <= 0"):
        cache.crop(3)
    with pytest.raises(ValueError, match="evicted"):
        cache.crop(-40)
    with pytest.raises(ValueError, match="a routed layer stores labels"):
        cache.update(torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8), 0)
    with pytest.raises(ValueError, match=r"attention_mask must be 0 for the padding"):
        model(tokens[:, :1], past_key_values=cache, attention_mask=torch.zeros(2, 61))
    model.set_routing("soft")
    with pytest.raises(ValueError, match="the cache is for sparse routing"):
        model(tokens[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match="cache_implementation must be None"):
        model.generate(tokens, cache_implementation="static", max_new_tokens=2)
    with pytest.raises(ValueError, match="call generate with a batch, padded on the left"):
        model.generate(tokens, cache_implementation="paged", max_new_tokens=2)
    with pytest.raises(ValueError, match="requires a gradient"), torch.enable_grad():
        model(tokens[:, :1], past_key_values=model(tokens).past_key_values)


def test_padding_on_the_right_is_refused():
    model = small_model()
    for mask in (MASK.flip(1), torch.zeros_like(MASK)):
        with pytest.raises(ValueError, match="padding on the left: rows"):
            written(model, mask=mask, new=1)


@torch.no_grad()
def test_a_cache_of_another_routing():
    model = small_model(routing="soft")
    cache = written(model).past_key_values
    model.set_routing("top1")
    with pytest.raises(ValueError, match=r"cache\.set_routing changes it"):
        model(PROMPT[:, :1], past_key_values=cache)
    cache.set_routing("top1")
    assert cache.routing == "top1"
    model(PROMPT[:, :1], past_key_values=cache)
    assert all(layer.is_initialized for layer in cache.layers)
    with pytest.raises(ValueError, match="none to set"):
        small_model("rope").new_cache().set_routing("soft")
