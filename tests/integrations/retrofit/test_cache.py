"""The KV cache of a retrofitted model: chunks, tokens, beams and eviction change nothing."""

import pytest
import torch
from transformers.cache_utils import DynamicCache, StaticCache

from integrations.retrofit.models import FAMILIES, routed_model, tokens
from mosar.errors import ModelError
from mosar.integrations.retrofit.cache import RegimeCacheLayer

ROUTINGS = ("soft", "top1", "sparse")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_prefill_in_parts_is_prefill_in_one(family, routing):
    model, _ = routed_model(family, routing)
    ids = tokens(2, 60)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    valid = mask.bool()
    with torch.no_grad():
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
        whole = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits
        cache, parts = DynamicCache(), []
        for start, end in ((0, 23), (23, 55), *((t, t + 1) for t in range(55, 60))):
            out = model(
                input_ids=ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, start:end],
                past_key_values=cache,
                use_cache=True,
            )
            parts.append(out.logits)
            assert out.past_key_values is cache
    torch.testing.assert_close(torch.cat(parts, dim=1)[valid], whole[valid], atol=2e-4, rtol=1e-3)


def test_eviction_frees_memory():
    model, _ = routed_model()
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=tokens(1, 300), past_key_values=cache)
    for layer in cache.layers:
        assert isinstance(layer, RegimeCacheLayer)
        counts = {name: int(value.sum()) for name, value in layer.state.regime_counts.items()}
        # Two groups; S keys live 4 tokens, M keys 12, and the margin of 32 for both.
        assert counts["S"] <= 2 * 37 and counts["M"] <= 2 * 45
        assert counts["sinks"] == 4


def test_beams_go_on_like_greedy_rows():
    model, _ = routed_model()
    ids = tokens(2, 20)
    with torch.no_grad():
        beams, again = (
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=8,
                num_beams=3,
                do_sample=False,
                use_cache=use_cache,
            )
            for use_cache in (True, False)
        )
    assert torch.equal(beams, again)


@pytest.mark.parametrize("rows", [[True, False, True], [2, 0]])
def test_rows_are_selected_by_mask_or_index(rows):
    model, _ = routed_model()
    ids, cache = tokens(3, 40), DynamicCache()
    with torch.no_grad():
        model(input_ids=ids[:, :35], past_key_values=cache)
        cache.batch_select_indices(torch.tensor(rows))
        further = model(input_ids=ids[rows, 35:], past_key_values=cache).logits
        whole = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(further, whole[rows, 35:], atol=1e-4, rtol=1e-3)


def test_crop_goes_back():
    model, _ = routed_model()
    ids = tokens(1, 40)
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        cache.crop(-5)
        assert cache.get_seq_length() == 35
        again = model(input_ids=ids[:, 35:], past_key_values=cache).logits
        whole = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(again, whole[:, 35:], atol=1e-4, rtol=1e-3)


def test_foreign_caches_are_refused():
    model, attached = routed_model()
    attached.set_routing("dense")
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=tokens(1, 10), past_key_values=cache)
        attached.set_routing("sparse")
        with pytest.raises(ModelError, match="10 tokens without regimes"):
            model(input_ids=tokens(1, 1), past_key_values=cache)
        fresh = DynamicCache()
        model(input_ids=tokens(1, 10), past_key_values=fresh)
        attached.set_routing("top1")
        with pytest.raises(ModelError, match="filled under sparse routing, not top1"):
            model(input_ids=tokens(1, 1), past_key_values=fresh)
        attached.set_routing("dense")
        with pytest.raises(ModelError, match="keeps regimes"):
            model(input_ids=tokens(1, 1), past_key_values=fresh)
        attached.set_routing("sparse")
        with pytest.raises(ModelError, match="StaticCache has a fixed size"):
            static = StaticCache(config=model.config, max_cache_len=16)
            model(input_ids=tokens(1, 4), past_key_values=static)
