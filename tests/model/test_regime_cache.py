"""The regime cache: it gives what attention over all tokens gives, and it forgets exactly."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import Case
from mosar import MoSARConfig, Regime
from mosar.attention import attend
from mosar.bench.labels import make_labels
from mosar.core.bias import routed_bias
from mosar.model.cache import RegimeCache, RegimeLayerCache
from mosar.model.cache.regime_lists import PAGE

from .streams import assert_right, feed, feed_all, new_cache, portions, stream, streams

IMPLEMENTATIONS = ("native", "tiled")
implementations = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
# Short reaches: keys are evicted within a page, and within several.
SHORT = MoSARConfig(
    max_length=40, regimes=(Regime("S", 3, 0.5), Regime("M", 9.5, 0.5), Regime("G", 40, 1.0))
)
SINKS_AND_GROUPS = MoSARConfig(max_length=40, regimes=SHORT.regimes, num_sinks=2, routing_groups=2)
RICH = stream(
    config=SINKS_AND_GROUPS,
    batch=3,
    kv_heads=2,
    heads_per_kv=2,
    num_keys=150,
    head_dim=8,
    padding="left",
    positions="counted",
    softcap=20.0,
)
PLAIN = stream(config=SHORT, num_keys=150)
CHANGES = ("crop", "reorder", "repeat", "select", "mask", "routing", "reset")


def stored_slots(cache: RegimeLayerCache) -> dict[tuple[int, int], set[int]]:
    """(row, group) -> the slots whose keys the lists hold."""
    cache.settle()
    lists = cache._store.lists
    keys = lists.stored_keys()
    slots = keys.slot.tolist()
    held = {(b, g): set() for b in range(lists.rows) for g in range(lists.groups)}
    for index, slot in zip(keys.lists.tolist(), slots, strict=True):
        held[divmod(index // lists.classes, lists.groups)].add(slot)
    assert sum(map(len, held.values())) == len(slots)
    return held


def needed_slots(case: Case, length: int, margin: int) -> dict[tuple[int, int], set[int]]:
    """The same by trying every query that may still come: `margin` before the last, or later."""
    config = case.config
    labels = case.labels[1] if case.labels[1].dim() == 3 else case.labels[1][:, None]
    window = math.inf if case.window is None else case.window
    held = {}
    for b in range(case.batch):
        valid = [s for s in range(length) if case.key_valid is None or bool(case.key_valid[b, s])]
        position = {
            s: s if case.key_positions is None else int(case.key_positions[b, s]) for s in valid
        }
        for g in range(labels.shape[1]):
            held[b, g] = set()
            for rank, s in enumerate(valid):
                farthest = max(
                    reach_of(config, m, int(labels[b, g, s])) for m in range(config.num_regimes)
                )
                first_query = position[valid[-1]] - margin
                reachable = first_query - position[s] <= min(farthest, window)
                if reachable or rank < config.num_sinks:
                    held[b, g].add(s)
    return held


def reach_of(config: MoSARConfig, m: int, n: int) -> float:
    if m == n == config.num_regimes - 1:
        return math.inf
    pair = [config.regimes[i].reach for i in (m, n)]
    return {"mean": sum(pair) / 2, "min": min(pair), "max": max(pair)}[config.composition]


@given(st.data())
def test_any_use(data):
    """Whatever happens to a cache in between, each query gets what the whole text gives it."""
    dtype = data.draw(st.sampled_from((torch.float32, torch.float32, torch.float64)))
    case = data.draw(
        streams(routings=("sparse", "sparse", "top1", "soft"), max_length=70, dtype=dtype)
    )
    impls = IMPLEMENTATIONS if dtype == torch.float32 else ("tiled", "auto")
    evict, margin = data.draw(st.booleans()), data.draw(st.sampled_from((0, 1, 8)))
    impl = data.draw(st.sampled_from(impls))
    cache = new_cache(case, evict=evict, crop_margin=margin, impl=impl)
    rows, at = torch.arange(case.batch), 0
    for size in data.draw(portions(case.num_keys)):
        # A cache filled in inference mode goes on outside of it, and the other way round.
        with torch.inference_mode(data.draw(st.booleans())), torch.no_grad():
            size = min(size, case.num_keys - at)
            output, lse = feed(cache, case, at, at + size, rows=rows)
            assert_right(case, output, lse, start=at, rows=rows)
            at += size
            change = data.draw(st.sampled_from((*CHANGES, *("nothing",) * 6)))
            indices = torch.tensor(
                data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=4))
            )
            if change == "crop":
                back = data.draw(st.integers(0, min(at, margin if evict else at)))
                cache.crop(data.draw(st.sampled_from((-back, at - back))) if back else at)
                at -= back
            elif change == "reorder":
                indices = indices.repeat(len(rows))[: len(rows)]
                cache.reorder(indices)
                rows = rows[indices]
            elif change == "repeat" and len(rows) < 4:
                cache.batch_repeat(2)
                rows = rows.repeat_interleave(2)
            elif change == "select":
                cache.batch_select(indices)
                rows = rows[indices]
            elif change == "mask":
                kept = torch.zeros(len(rows), dtype=torch.bool).index_fill(0, indices, True)
                cache.batch_select(kept)
                rows = rows[kept]
            elif (change == "routing" and case.routing != "sparse") or not evict:
                case = case.with_(routing=data.draw(st.sampled_from(("top1", "sparse"))))
                cache.set_routing(case.routing)
            elif change == "reset":
                cache.reset()
                at, rows = 0, torch.arange(case.batch)
        valid = torch.ones(case.batch, at) if case.key_valid is None else case.key_valid[:, :at]
        expected = valid[rows].sum(dim=1).tolist() if cache.batch_size else []
        assert cache.lengths.tolist() == expected and cache.slots == at
        if cache.batch_size and (not evict or case.routing != "sparse"):
            assert (sum(cache.regime_counts.values()) == cache.lengths[:, None]).all()
            assert 0 <= cache.used_bytes <= cache.allocated_bytes


@given(st.data())
def test_any_use_with_a_bias_of_keys(data):
    """A running sum goes on from `last_of_key`, whatever happened to the cache."""
    impl = data.draw(st.sampled_from(("native", "tiled")))
    dtype = torch.float32 if impl == "native" else torch.float64
    case = data.draw(streams(max_length=70, dtype=dtype))
    steps_BHS = 3 * torch.rand(
        (case.batch, case.num_heads, case.num_keys),
        generator=torch.Generator().manual_seed(case.seed),
        dtype=torch.float64,
    )
    if case.key_valid is not None:
        steps_BHS = steps_BHS.masked_fill(~case.key_valid[:, None], 0)
    bias = routed_bias(case.pi_q.double(), case.pi_k.double(), case.config, "sparse")
    bias = replace(bias, of_key=steps_BHS.cumsum(dim=-1))
    heads, options = (x.double() for x in (case.q, case.k, case.v)), dict(case.options)
    options["query_positions"] = case.key_positions
    whole = attend(*heads, bias, impl="reference", return_lse=True, **options)
    margin = data.draw(st.sampled_from((0, 1, 8)))
    cache = new_cache(case, crop_margin=margin, impl=impl)
    rows, at = torch.arange(case.batch), 0
    for size in data.draw(portions(case.num_keys)):
        size = min(size, case.num_keys - at)
        given = steps_BHS[rows, :, at : at + size].cumsum(dim=-1)
        before = cache.last_of_key
        given = given if before is None else given + before[:, :, None]
        found = feed(cache, case, at, at + size, rows=rows, of_key=given)
        valid = torch.ones(len(rows), 1, size, dtype=torch.bool)
        if case.key_valid is not None:
            valid = case.key_valid[rows, None, at : at + size]
        for ours, exact in zip(found, whole, strict=True):
            exact = exact[rows][:, :, at : at + size]
            seen = valid[..., None].expand_as(exact) if exact.dim() == 4 else valid.expand_as(exact)
            close = {"rtol": 1e-5, "atol": 1e-4} if impl == "native" else {"rtol": 0, "atol": 1e-10}
            torch.testing.assert_close(ours[seen].double(), exact[seen], **close)
        at += size
        change = data.draw(st.sampled_from(("crop", "reorder", "select", *("nothing",) * 4)))
        indices = torch.tensor(data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1)))[:4]
        if change == "crop":
            back = data.draw(st.integers(0, min(at, margin)))
            cache.crop(at - back)
            at -= back
        elif change == "reorder":
            indices = indices.repeat(len(rows))[: len(rows)]
            cache.reorder(indices)
            rows = rows[indices]
        elif change == "select":
            cache.batch_select(indices)
            rows = rows[indices]


@pytest.mark.parametrize(
    ("of_key", "routing", "said"),
    [
        ([1.0], "sparse", "of_key must be a tensor, got list"),
        (
            torch.zeros(1, 3, 2),
            "sparse",
            r"of_key must be \[1, a multiple of 2, 2\] float64 .* got",
        ),
        (torch.zeros(1, 2, 2), "sparse", "got .*float32"),
        (torch.zeros(1, 2, 3).double(), "sparse", r"got \[1, 2, 3\]"),
        (torch.zeros(1, 2, 2).double(), "top1", "of_key is for sparse routing, .* for top1"),
    ],
)
def test_wrong_biases_of_keys(of_key, routing, said):
    case = stream(config=SHORT, kv_heads=2, num_keys=2)
    cache = RegimeLayerCache(SHORT, routing=routing)
    with pytest.raises(ValueError, match=said):
        cache.update(case.k, case.v, case.labels[1], of_key=of_key)
    assert not cache.slots
    if routing == "sparse":
        cache.update(case.k, case.v, case.labels[1])
        with pytest.raises(ValueError, match="of_key must be given always or never"):
            cache.update(case.k, case.v, case.labels[1], of_key=torch.zeros(1, 2, 2).double())


@pytest.mark.parametrize("case", [PLAIN, RICH], ids=["plain", "rich"])
@pytest.mark.parametrize("sizes", [(130, *(1,) * 20), (23,) * 6 + (12,)])
@implementations
def test_full_is_prefill_and_decode_is_chunks(case, sizes, impl):
    assert_right(case, *feed_all(new_cache(case, impl=impl), case, sizes))


def test_memory_at_32k_tokens():
    """Counted in bytes: what is allocated is bounded by the G keys, 1280 tokens, and an eighth."""
    length, config = 32768, MoSARConfig(num_sinks=4)
    _, labels = make_labels("independent", length + 64, 0, config)
    cache, k = RegimeLayerCache(config), torch.zeros(1, 1, length, 64)
    for begin in range(0, length, 8192):
        part = k[:, :, begin : begin + 8192]
        cache.update(part, part, labels[None, begin : begin + 8192])
        cache.settle()
    for step in range(64):
        cache.update(k[:, :, :1], k[:, :, :1], labels[None, length + step : length + step + 1])
    token = 2 * 64 * 4
    global_keys = int((labels == config.global_index).sum())
    counts = {name: count.item() for name, count in cache.regime_counts.items()}
    assert global_keys - 4 <= counts["G"] <= global_keys and counts["sinks"] == 4
    assert counts["S"] + counts["M"] <= 1280
    kept = global_keys + 1280 + 4
    assert cache.used_bytes <= kept * (token + 8)
    pages = kept / PAGE + 2 * 4
    assert cache.allocated_bytes <= 9 / 8 * (pages + 4) * PAGE * (token + 8) + 32 * 1024
    assert cache.allocated_bytes <= 0.35 * length * token


def test_layers_have_settings_of_their_own():
    cache = RegimeCache([SHORT, SINKS_AND_GROUPS], windows=(None, 7), crop_margin=4)
    cases = RICH.with_(config=SHORT), RICH.with_(window=7)
    for layer, case in zip(cache, cases, strict=True):
        assert_right(case, *feed_all(layer, case, (100, 1, 49)))
    assert len(cache) == 2 and list(cache) == cache.layers
    assert cache.slots == 150 and cache.batch_size == 3
    assert cache.used_bytes == sum(layer.used_bytes for layer in cache) <= cache.allocated_bytes
    cache.reset()
    cache.set_routing("top1")
    assert all(layer.routing == "top1" for layer in cache)


def test_a_former_name_of_an_implementation():
    assert RegimeLayerCache(SHORT, impl="torch").impl == "tiled"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@implementations
def test_low_precision(dtype, impl):
    case = RICH.with_(dtype=dtype)
    cache = new_cache(case, impl=impl)
    assert_right(case, *feed_all(cache, case, (90, 20, *(1,) * 40)))


@implementations
def test_storage_may_be_narrower_than_the_model(impl):
    """Whatever the portions, keys are rounded once, when they are stored."""
    cache = new_cache(RICH, dtype=torch.bfloat16, impl=impl)
    output, lse = feed_all(cache, RICH, (70, 30, *(1,) * 50))
    assert output.dtype == torch.float32
    # Another case to the store of expected results.
    rounded = RICH.with_(group_axis=True)
    for name in ("k", "v"):
        rounded.__dict__[name] = getattr(RICH, name).bfloat16().float()
    assert_right(rounded, output, lse)
    assert (output - feed_all(new_cache(RICH), RICH, (150,))[0]).abs().max() > 1e-4


@given(st.data())
def test_eviction_is_exact(data):
    case = data.draw(streams(max_length=70))
    margin = data.draw(st.sampled_from((0, 1, 4)))
    cache = new_cache(case, crop_margin=margin, impl=data.draw(st.sampled_from(IMPLEMENTATIONS)))
    length = 0
    for size in data.draw(portions(case.num_keys)):
        feed(cache, case, length, length + size)
        length += size
    assert stored_slots(cache) == needed_slots(case, length, margin)


@implementations
def test_without_eviction_everything_stays(impl):
    cache = new_cache(RICH, evict=False, impl=impl)
    feed_all(cache, RICH, (100, *(1,) * 50))
    valid = {b: set(RICH.key_valid[b].nonzero()[:, 0].tolist()) for b in range(3)}
    assert all(held == valid[b] for (b, _), held in stored_slots(cache).items())
    keys = cache.ordered()
    assert torch.equal(keys.valid, RICH.key_valid)
    chosen = RICH.key_valid[:, None, :, None].expand_as(keys.k)
    assert torch.equal(keys.k[chosen], RICH.k[chosen])
    assert torch.equal(keys.v[chosen], RICH.v[chosen])
    assert torch.equal(keys.positions[keys.valid], RICH.key_positions[keys.valid])
    beyond_sinks = keys.valid & (keys.valid.cumsum(dim=1) > 2)
    chosen = beyond_sinks[:, None].expand_as(keys.labels)
    assert torch.equal(keys.labels[chosen], RICH.labels[1][chosen])


@implementations
def test_pages_are_used_again(impl):
    """A text of short-sighted tokens needs a few pages however long it gets."""
    case = stream(config=SHORT, probabilities="first", num_keys=400, head_dim=2)
    cache = new_cache(case, impl=impl)
    feed_all(cache, case, (1,) * 100)
    before = cache.allocated_bytes
    for begin in range(100, 400):
        feed(cache, case, begin, begin + 1)
    assert cache.allocated_bytes == before
    assert cache.regime_counts["S"].tolist() == [[22]]


def test_growing_seldom_copies():
    case = stream(config=SHORT, probabilities="last", num_keys=4000, head_dim=2)
    cache = new_cache(case)
    pools = set()
    for begin in range(4000):
        labels = case.labels[1][:, begin : begin + 1]
        k = case.k[:, :, begin : begin + 1]
        cache.update(k, k, labels)
        pools.add(cache._store.lists.k_pool.shape[0])
    assert len(pools) < 30 and max(pools) <= 1.2 * 4000 / PAGE


@pytest.mark.parametrize("case", [PLAIN, RICH], ids=["plain", "rich"])
@implementations
def test_crop_beyond_the_margin_is_refused(case, impl):
    cache = new_cache(case, crop_margin=3, impl=impl)
    feed_all(cache, case, (100, *(1,) * 20))
    before = stored_slots(cache)
    with pytest.raises(ValueError, match=r"cannot crop 120 tokens to 100.*crop_margin or evict"):
        cache.crop(100)
    assert stored_slots(cache) == before and cache.slots == 120
    assert_right(case, *feed_all(cache, case, (30,), start=120), start=120)


def test_moving_rows_copies_only_what_is_doubled():
    cache = new_cache(RICH)
    feed_all(cache, RICH, (150,))
    pool = cache._store.lists.k_pool
    # As bits: spare room holds anything, NaN too.
    before = pool.view(torch.int32).clone()
    cache.reorder(torch.tensor([1, 2, 0]))
    assert cache._store.lists.k_pool is pool and torch.equal(pool.view(torch.int32), before)


@implementations
def test_dropped_rows_free_memory(impl):
    case = stream(config=SHORT, batch=8, num_keys=600, head_dim=16, probabilities="last")
    cache = new_cache(case, impl=impl)
    feed_all(cache, case, (600,))
    before = cache.allocated_bytes
    cache.batch_select(torch.tensor([3]))
    assert cache.allocated_bytes < 0.25 * before
    output, _ = feed(cache, case, 0, 1, rows=torch.tensor([3]))
    assert output.isfinite().all()


def test_routing_that_cannot_change():
    cache = new_cache(PLAIN)
    feed_all(cache, PLAIN, (100,))
    with pytest.raises(ValueError, match="from sparse to top1 routing: keys have been evicted"):
        cache.set_routing("top1")
    with pytest.raises(ValueError, match="soft routing needs probabilities"):
        cache.set_routing("soft")
    with pytest.raises(ValueError, match="routing must be one of"):
        cache.set_routing("hard")
    assert cache.routing == "sparse"
    assert_right(PLAIN, *feed_all(cache, PLAIN, (50,), start=100), start=100)
    cache.reset()
    cache.set_routing("soft")
    soft = PLAIN.with_(routing="soft")
    assert_right(soft, *feed_all(cache, soft, (150,)))


def test_fewer_queries_than_new_tokens():
    """A chunk waits for its queries, and some of them may come first."""
    cache = new_cache(PLAIN)
    feed(cache, PLAIN, 0, 50)
    part = slice(50, 90)
    cache.update(PLAIN.k[:, :, part], PLAIN.v[:, :, part], PLAIN.labels[1][:, part])
    early = torch.arange(50, 60)[None]
    exact, _ = feed_all(new_cache(PLAIN), PLAIN, (150,))
    q, labels = PLAIN.q, PLAIN.labels[0]
    output = cache.attend(q[:, :, 50:60], labels[:, 50:60], early)
    torch.testing.assert_close(output, exact[:, :, 50:60], atol=2e-6, rtol=2e-6)
    output = cache.attend(q[:, :, 88:90], labels[:, 88:90])
    torch.testing.assert_close(output, exact[:, :, 88:90], atol=2e-6, rtol=2e-6)
    cache.settle()
    output = cache.attend(q[:, :, 89:90], labels[:, 89:90])
    torch.testing.assert_close(output, exact[:, :, 89:90], atol=2e-6, rtol=2e-6)
    with pytest.raises(ValueError, match=r"query_positions must be at least .* have been evicted"):
        cache.attend(q[:, :, 50:60], labels[:, 50:60], early)
    with pytest.raises(ValueError, match=r"query_positions must be at least .* have been evicted"):
        cache.attend(q[:, :, 50:51], labels[:, 50:51], early[:, :1])


def test_a_row_of_padding_alone():
    """Until its first token comes a row has nothing, and a query that sees nothing gets zeros."""
    case = PLAIN.with_(batch=2, padding="left")
    valid = torch.ones(2, 150, dtype=torch.bool)
    valid[1, :77] = False
    case.__dict__["key_valid"] = valid
    cache = new_cache(case)
    outputs = feed_all(cache, case, (30, 1, 1, 30, *(1,) * 20))
    assert not outputs[0][1, :, :77].any() and (outputs[1][1, :, :77] == -math.inf).all()
    rest = feed_all(cache, case, (150 - 82,), start=82)
    assert_right(case, *(torch.cat(x, dim=2) for x in zip(outputs, rest, strict=True)))
    assert cache.lengths.tolist() == [150, 73]


def test_the_container_changes_all_layers_or_none():
    """The layer that refuses comes last."""
    far, near = PLAIN.with_(probabilities="last"), PLAIN.with_(probabilities="first")
    cache = RegimeCache(SHORT, 2)
    for layer, case in zip(cache, (far, near), strict=True):
        feed_all(layer, case, (100,))
    with pytest.raises(ValueError, match="cannot crop"):
        cache.crop(50)
    with pytest.raises(ValueError, match="keys have been evicted"):
        cache.set_routing("top1")
    assert [layer.slots for layer in cache] == [100, 100]
    assert [layer.routing for layer in cache] == ["sparse", "sparse"]


def updates(**changes):
    """Arguments of an update of RICH's first tokens, some of them wrong."""
    given = {
        "k": RICH.k[:, :, :5],
        "v": RICH.v[:, :, :5],
        "labels_k": RICH.labels[1][..., :5],
        "key_positions": RICH.key_positions[:, :5],
        "key_valid": RICH.key_valid[:, :5],
    }
    return given | changes


# Of one token or several, and of several alone.
WRONG_TOKENS = [
    ({"k": None}, "k must be a tensor, got NoneType"),
    ({"k": torch.zeros(3, 2, 5)}, r"k must be \[B, heads, length, D\]"),
    ({"k": torch.zeros(3, 2, 5, 8).int()}, "k must be one of"),
    ({"k": torch.zeros(3, 2, 5, 8, requires_grad=True)}, "under torch.no_grad"),
    ({"v": torch.zeros(3, 1, 5, 8)}, r"v must be \[3, 2, length, 8\]"),
    ({"labels_k": None}, "labels_k must be a tensor"),
    ({"labels_k": torch.zeros(3, 3, 5).long()}, "3 routing groups, which must divide the 2"),
    ({"labels_k": torch.zeros(3, 2, 5)}, "labels_k must hold integer regime labels"),
    ({"labels_k": torch.full((3, 2, 5), 3)}, r"labels_k must lie in 0..2, got values 3..3"),
    ({"labels_k": torch.full((3, 2, 5), -1)}, r"labels_k must lie in 0..2"),
    ({"key_positions": torch.zeros(3, 5)}, "key_positions must hold integers"),
    ({"key_positions": torch.full((3, 5), -1)}, "key_positions must be >= 0"),
    ({"key_positions": torch.full((3, 5), 2**31)}, "below 2\\^31 - 1"),
    ({"key_valid": torch.ones(3, 5)}, "key_valid must hold bool"),
]
WRONG_CHUNKS = [
    ({"k": torch.zeros(3, 2, 0, 8)}, "none of them 0"),
    ({"v": torch.zeros(3, 2, 4, 8)}, "v must be as k"),
    ({"v": torch.zeros(3, 2, 5, 8).double()}, "v must be as k"),
    ({"labels_k": torch.zeros(3, 4)}, r"labels_k must be \[3, 5\] or \[3, groups, 5\]"),
    ({"key_positions": torch.zeros(3, 4).long()}, r"key_positions must be \[3, 5\]"),
    ({"key_positions": torch.arange(5, 0, -1).expand(3, 5)}, "must not decrease"),
    ({"key_valid": torch.ones(3, 4) > 0}, r"key_valid must be \[3, 5\]"),
]


@pytest.mark.parametrize("length", [1, 5])
@implementations
def test_wrong_tokens_are_refused_and_change_nothing(length, impl):
    cache = new_cache(RICH, impl=impl)
    for changes, message in WRONG_TOKENS + (WRONG_CHUNKS if length > 1 else []):
        wrong = {
            name: x if x is None else x[..., -length:, :] if name in "kv" else x[..., -length:]
            for name, x in updates(**{"key_valid": None} | changes).items()
        }
        with pytest.raises(ValueError, match=message):
            cache.update(**wrong)
        assert cache.slots == 0 and cache.allocated_bytes == 0
    assert_right(RICH, *feed_all(cache, RICH, (147, 1, 1, 1)))


@implementations
def test_wrong_tokens_later_change_nothing(impl):
    cache = new_cache(RICH, impl=impl)
    feed_all(cache, RICH, (50, 1, 1))
    held = stored_slots(cache)
    for changes, message in (
        ({"k": RICH.k[:1, :, :5]}, r"k must be \[3, 2, length, 8\]"),
        ({"labels_k": RICH.labels[1][:, 0, :5]}, r"labels_k must be \[3, 5\] or \[3, 2, 5\]"),
        ({"key_positions": None}, "key_positions must be given always or never"),
        ({"key_positions": torch.zeros(3, 5).long(), "key_valid": None}, "must not decrease"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.update(**updates(**changes))
    one = {
        name: x[:, :, 60:61]
        for name, x in (("k", RICH.k), ("v", RICH.v), ("labels_k", RICH.labels[1]))
    }
    with pytest.raises(ValueError, match=r"must not decrease .* got 0 after"):
        cache.update(**one, key_positions=torch.zeros(3, 1).long())
    with pytest.raises(ValueError, match="labels_k must lie in"):
        cache.update(
            **one | {"labels_k": one["labels_k"] + 7}, key_positions=RICH.key_positions[:, 60:61]
        )
    assert stored_slots(cache) == held and cache.slots == 52
    assert_right(RICH, *feed_all(cache, RICH, (1, 77, *(1,) * 20), start=52), start=52)


WRONG_QUERIES = [
    ({"q": RICH.q[:, :3]}, "3 heads of q must be a multiple of the 2"),
    ({"q": RICH.q[:1]}, r"q must be \[3, heads, length, 8\]"),
    ({"q": RICH.q.int()}, "q must be one of"),
    ({"labels_q": None}, "labels_q must be a tensor"),
    ({"labels_q": RICH.labels[0] + 3}, "labels_q must lie in 0..2"),
    ({"labels_q": RICH.labels[0][:, 0]}, r"labels_q must be .* or \[3, 2, "),
    ({"query_positions": torch.zeros(3, 150)}, "query_positions must hold integers"),
    ({"query_positions": torch.full((3, 150), -1)}, "query_positions must lie in 0"),
    ({"query_positions": torch.zeros(3, 150).int()}, "query_positions must be at least"),
    ({"scale": "much"}, "scale must be None or a number"),
    ({"softcap": 0.0}, "softcap must be None or a number"),
]


@pytest.mark.parametrize("length", [1, 5])
@implementations
def test_wrong_queries(length, impl):
    cache = new_cache(RICH, impl=impl)
    feed_all(cache, RICH, (148, 1, 1))
    given = {"q": RICH.q, "labels_q": RICH.labels[0], "query_positions": RICH.key_positions}
    for changes, message in WRONG_QUERIES:
        last = {
            name: (x[..., -length:, :] if name == "q" else x[..., -length:])
            if isinstance(x, torch.Tensor)
            else x
            for name, x in (given | {"softcap": 20.0} | changes).items()
        }
        with pytest.raises(ValueError, match=message):
            cache.attend(**last)


def test_wrong_caches():
    for options, message in (
        ({"routing": "hard"}, "routing must be one of"),
        ({"crop_margin": -1}, "crop_margin must be an integer >= 0"),
        ({"crop_margin": 1.5}, "crop_margin must be an integer"),
        ({"window": -1}, "window must be a number >= 0"),
        ({"dtype": torch.int32}, "dtype must be one of"),
        ({"impl": "fast"}, "impl must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            RegimeLayerCache(SHORT, **options)
    with pytest.raises(ValueError, match="config must be a MoSARConfig"):
        RegimeLayerCache({})
    with pytest.raises(ValueError, match="num_layers must be an integer >= 1"):
        RegimeCache(SHORT)
    with pytest.raises(ValueError, match="num_layers is 3, but there are 2 configs"):
        RegimeCache([SHORT, SHORT], 3)
    with pytest.raises(ValueError, match="windows must have one entry per layer"):
        RegimeCache(SHORT, 2, windows=[3])
    with pytest.raises(ValueError, match="float64; use impl='auto'"):
        feed(new_cache(PLAIN, impl="native"), PLAIN.with_(dtype=torch.float64), 0, 3)
    cache = RegimeLayerCache(SHORT)
    with pytest.raises(ValueError, match="the cache is empty"):
        cache.attend(PLAIN.q, PLAIN.labels[0])
    with pytest.raises(ValueError, match="the cache is empty"):
        cache.ordered()


@pytest.mark.parametrize("routing", ["sparse", "soft"])
def test_wrong_moves(routing):
    case = RICH.with_(routing=routing)
    cache = new_cache(case)
    feed_all(cache, case, (50,))
    for indices in ([0, 1], [0, 1, 3], [0, 1, -1], [[0, 1, 2]]):
        with pytest.raises(ValueError, match=r"beam_idx must be|indices must be rows"):
            cache.reorder(torch.tensor(indices))
    with pytest.raises(ValueError, match="repeats must be an integer >= 1"):
        cache.batch_repeat(0)
    with pytest.raises(ValueError, match="length must be an integer"):
        cache.crop(3.0)
    assert_right(case, *feed_all(cache, case, (100,), start=50), start=50)


def test_dense_routing_needs_probabilities():
    cache = RegimeLayerCache(SHORT, routing="soft")
    with pytest.raises(ValueError, match="pi_k must be a tensor"):
        cache.update(PLAIN.k, PLAIN.v, PLAIN.labels[1])
    with pytest.raises(ValueError, match="pi_k must be float32 or float64"):
        cache.update(PLAIN.k, PLAIN.v, pi_k=PLAIN.pi_k.bfloat16())
    cache.update(PLAIN.k, PLAIN.v, pi_k=PLAIN.pi_k)
    with pytest.raises(ValueError, match="pi_q must be a tensor"):
        cache.attend(PLAIN.q, PLAIN.labels[0])


@implementations
def test_crop_to_nothing_starts_anew(impl):
    """What was evicted cannot be missed where no token is left."""
    cache = new_cache(RICH, impl=impl)
    for sizes in ((150,), (100, *(1,) * 50)):
        assert_right(RICH, *feed_all(cache, RICH, sizes))
        assert cache._store.has_evicted
        cache.crop(0)
        assert (cache.slots, cache.used_bytes, cache.lengths.tolist()) == (0, 0, [0, 0, 0])
