"""A decode step over the regime cache, interpreted, gives what attention over all tokens gives."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.streams import assert_right, feed, feed_all, new_cache, stream, streams
from mosar import MoSARConfig, Regime
from mosar.attention import attend
from mosar.core.bias import routed_bias
from mosar.kernels.triton import decode
from mosar.model.cache import RegimeLayerCache

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")
SHORT = MoSARConfig(
    max_length=40, regimes=(Regime("S", 3, 0.5), Regime("M", 9.5, 0.5), Regime("G", 40, 1.0))
)
# Lists of several pages, each of several parts, some of them out of reach.
LONG = MoSARConfig(
    regimes=(Regime("S", 30, 0.75), Regime("M", 90, 0.5), Regime("G", 300, 1.0)),
    num_sinks=2,
    routing_groups=2,
    exponent=1.5,
)
PLAIN = stream(config=SHORT, num_keys=90, heads_per_kv=3, head_dim=12)
RICH = stream(
    config=LONG,
    batch=2,
    kv_heads=2,
    heads_per_kv=2,
    num_keys=260,
    head_dim=8,
    padding="left",
    positions="counted",
    softcap=20.0,
)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(decode, "_KEYS_PER_PART", 32)


def filled(case, before, *, of_key=None, **options):
    """A cache that has stored the first tokens."""
    cache = new_cache(case, **{"impl": "triton", **options})
    if before:
        labels = case.labels[1][..., :before]
        given = {"key_positions": case.key_positions, "key_valid": case.key_valid}
        given = {name: None if x is None else x[:, :before] for name, x in given.items()}
        given["of_key"] = None if of_key is None else of_key[:, :, :before]
        cache.update(case.k[:, :, :before], case.v[:, :, :before], labels, **given)
        cache.settle()
    return cache


def decoded(case, steps=1, **options):
    """Output and log-sum-exp of the last tokens, each on its own after all before are stored."""
    before = case.num_keys - steps
    return feed_all(filled(case, before, **options), case, [1] * steps, start=before)


@pytest.mark.parametrize("case", [PLAIN, RICH], ids=["plain", "rich"])
@pytest.mark.parametrize("evict", [True, False])
def test_last_tokens(case, evict):
    assert_right(case, *decoded(case, 2, evict=evict), start=case.num_keys - 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float16},
        {"window": 7},
        {"padding": "holes"},
        {"heads_per_kv": 1, "head_dim": 1},
        {"heads_per_kv": 20, "head_dim": 80},
        {"heads_per_kv": 70, "head_dim": 8},
        {"head_dim": 256},
        {"num_keys": 1},
    ],
    ids=str,
)
def test_shapes(changes):
    case = PLAIN.with_(num_keys=50).with_(**changes)
    case = case.with_(num_queries=case.num_keys)
    assert_right(case, *decoded(case), start=case.num_keys - 1)


@pytest.mark.parametrize("case", [PLAIN, RICH], ids=["plain", "rich"])
def test_a_bias_of_keys(case):
    """One that grows along the text, far beyond what float32 has fractions of."""
    shape = (case.batch, case.num_heads, case.num_keys)
    steps = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    of_key = 1e7 + steps.cumsum(dim=-1)
    bias = routed_bias(case.pi_q.double(), case.pi_k.double(), case.config, "sparse")
    heads = (x.double() for x in (case.q, case.k, case.v))
    options = {**case.options, "query_positions": case.key_positions}
    exact = attend(
        *heads, replace(bias, of_key=of_key), impl="reference", return_lse=True, **options
    )
    last = case.num_keys - 1
    cache = filled(case, last, of_key=of_key)
    out, lse = feed(cache, case, last, case.num_keys, of_key=of_key[:, :, last:])
    torch.testing.assert_close(out.double(), exact[0][:, :, last:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact[1][:, :, last:], rtol=0, atol=1.0)


@settings(max_examples=8)
@given(st.data())
def test_any_text(data):
    case = data.draw(streams(max_length=30))
    assert_right(case, *decoded(case), start=case.num_keys - 1)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data())
def test_any_long_text(data):
    case = data.draw(streams(max_length=120))
    steps = data.draw(st.integers(1, 3))
    steps = min(steps, case.num_keys)
    assert_right(case, *decoded(case, steps), start=case.num_keys - steps)


def test_parts_and_pages_are_really_several():
    cache = new_cache(RICH, impl="triton", evict=False)
    cache.update(RICH.k, RICH.v, RICH.labels[1], key_positions=RICH.key_positions,
                 key_valid=RICH.key_valid)  # fmt: skip
    cache.settle()
    table = cache._store.lists.table
    assert table.shape[1] - 2 >= 3
    assert (table[:, 1] > 64).any()


def test_storage_may_be_narrower_than_the_model():
    case = PLAIN.with_(num_keys=40, num_queries=40)
    exact, _ = decoded(case)
    half, _ = decoded(case, dtype=torch.float16)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, exact, atol=5e-3, rtol=5e-3)


def test_a_wider_query_than_the_kernel_computes_in():
    case = PLAIN.with_(num_keys=5, num_queries=5)
    cache = new_cache(case, impl="triton")
    cache.update(case.k, case.v, case.labels[1])
    cache.settle()
    with pytest.raises(ValueError, match=r"impl='triton' cannot serve: .* q is float64"):
        cache.attend(case.q[:, :, :1].double(), case.labels[0][:, :1])


def test_a_query_that_reads_nothing():
    """All tokens are padding: zeros, and no log-sum-exp."""
    case = PLAIN.with_(num_keys=3, num_queries=3)
    cache = RegimeLayerCache(case.config, impl="triton")
    cache.update(case.k, case.v, case.labels[1], key_valid=torch.zeros(1, 3, dtype=torch.bool))
    cache.settle()
    out, lse = cache.attend(case.q[:, :, :1], case.labels[0][:, :1], return_lse=True)
    assert not out.any()
    assert lse.isneginf().all()


def test_a_query_before_the_horizon_is_refused():
    case = PLAIN
    cache = new_cache(case, impl="triton")
    cache.update(case.k, case.v, case.labels[1])
    cache.settle()
    with pytest.raises(ValueError, match="query_positions must be at least"):
        cache.attend(case.q[:, :, :1], case.labels[0][:, :1], torch.zeros(1, 1, dtype=torch.long))


def test_opcheck():
    case = PLAIN.with_(num_keys=20, num_queries=20)
    calls = []
    original = torch.ops.mosar.triton_cache_attend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.ops.mosar,
            "triton_cache_attend",
            lambda *arguments: calls.append(arguments) or original(*arguments),
        )
        decoded(case)
    torch.library.opcheck(original.default, calls[0], test_utils=("test_schema", "test_faketensor"))
