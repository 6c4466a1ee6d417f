"""The native decode kernel: one query a row over the regime lists, and one token into them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import FORCED
from kernels.test_operators import Recorder, copied
from kernels.test_paths import GEOMETRIES, SOME_GEOMETRIES, WIDE
from model.streams import assert_right, feed, feed_all, new_cache, portions, stream, streams
from mosar.kernels import decode

# Several pages of every regime, and a prefill that leaves most of it to single steps.
BASE = stream(config=WIDE, batch=2, kv_heads=2, heads_per_kv=2, num_keys=220, head_dim=16)
STEPS = (180, *(1,) * 40)


def decoded(case, sizes=STEPS, **options):
    return feed_all(new_cache(case, impl="native", **options), case, sizes)


@given(st.data())
def test_any_text(data):
    case = data.draw(streams(max_length=90))
    sizes = data.draw(portions(case.num_keys // 3)) if case.num_keys > 2 else []
    assert_right(case, *decoded(case, (*sizes, *(1,) * (case.num_keys - sum(sizes)))))


SHORT = {"num_keys": 120, "num_queries": 120}
TRAITS = {
    **{f"dim {n}": {"head_dim": n, **SHORT} for n in (1, 3, 33, 64, 80, 256)},
    **{
        f"share {n}": {"kv_heads": 1, "heads_per_kv": n, "batch": 1, **SHORT}
        for n in (*range(1, 10), 17)
    },
    "key heads": {"kv_heads": 5},
    **{f"regimes {name}": {"config": GEOMETRIES[name]} for name in SOME_GEOMETRIES},
    **{f"all {labels}": {"probabilities": labels} for labels in FORCED},
    **{
        f"scale {x}": {"scale": x, "softcap": cap}
        for x, cap in ((1e4, None), (1e3, 20.0), (-1e4, 20.0), (1e-4, None), (0.0, None))
    },
    "padded left": {"padding": "left", "positions": "counted"},
    "padded within": {"padding": "holes"},
    "window": {"window": 20},
    "window 0": {"window": 0},
    "soft-cap": {"softcap": 2.0},
    "soft-cap, window": {"softcap": 30.0, "window": 35, "scale": 3.0},
    "bfloat16": {"dtype": torch.bfloat16, "softcap": 30.0},
    "float16": {"dtype": torch.float16, "head_dim": 20, "softcap": 30.0},
}


@pytest.mark.parametrize("trait", TRAITS)
def test_traits(trait):
    case = BASE.with_(**TRAITS[trait])
    assert_right(case, *decoded(case, (90, *(1,) * 30) if case.num_keys == 120 else STEPS))


def test_every_float16_is_widened_exactly():
    """Keys whose one entry runs through all float16 numbers: each score is that entry."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.float16)
    numbers = numbers[numbers.isfinite()]
    # Values tell which number a weight belongs to; with one key a query the weight is 1.
    for part in (numbers[:500], numbers[-500:], numbers[numbers.abs() < 1e-6][:500]):
        case = stream(config=WIDE, num_keys=len(part), head_dim=1, window=0, dtype=torch.float16)
        case.__dict__["v"] = part[None, None, :, None]
        case.__dict__["k"] = torch.zeros_like(case.v)
        output, _ = decoded(case, (1,) * len(part))
        assert torch.equal(output, case.v)


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [{"batch": 1, "kv_heads": 1, "heads_per_kv": 8}, {"batch": 3}])
def test_threads(set_threads, shape):
    """A fixed number of threads always gives the same bits."""
    case = BASE.with_(num_keys=400, num_queries=400, head_dim=64, **shape)
    for threads in (1, 2, 3):
        set_threads(threads)
        first, second = (decoded(case, (380, *(1,) * 20)) for _ in range(2))
        assert all(map(torch.equal, first, second))
        assert_right(case, *first)


def test_unwritten_memory_does_not_matter():
    """Torch's empty tensors full of NaN: what no key was written to is never used."""
    expected = decoded(BASE)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().all()
        found = decoded(BASE)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, expected, found))


def test_a_key_out_of_reach_cannot_spoil_the_result():
    """NaN in a key of a page that is read in part; in reach it does show."""
    case = BASE.with_(probabilities="first", batch=1)
    k = case.k.clone()
    at, reach = 195, 12
    k[:, :, at] = math.nan
    case.__dict__["k"] = k
    output, _ = decoded(case)
    assert output[:, :, at : at + reach + 1].isnan().all()
    assert output[:, :, :at].isfinite().all() and output[:, :, at + reach + 1 :].isfinite().all()


def views(x):
    yield x.transpose(1, 2).contiguous().transpose(1, 2)
    yield torch.stack([x, torch.full_like(x, math.nan)], dim=-1)[..., 0]
    yield torch.nn.functional.pad(x, (3, 0, 0, 0, 1, 2), value=math.nan)[:, 1:-2, :, 3:]


def test_views():
    whole = BASE.with_(batch=2)
    expected = decoded(whole)
    for q, k, v in zip(views(whole.q), views(whole.k), views(whole.v), strict=True):
        viewed = whole.with_()
        viewed.__dict__.update(q=q, k=k, v=v)
        assert all(map(torch.equal, decoded(viewed), expected))


def test_autocast_and_autograd_change_nothing():
    expected = decoded(BASE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = decoded(BASE)
    assert all(map(torch.equal, expected, found))
    with torch.inference_mode():
        found = decoded(BASE)
    assert all(map(torch.equal, expected, found))


def recorded(case):
    """The arguments of the last `cache_append` and `cache_attend`; rich keys have a bias."""
    cache = new_cache(case, impl="native")

    def of_key(length):
        some = torch.ones(case.batch, case.num_heads, length, dtype=torch.float64)
        return some if case is RICH else None

    feed(cache, case, 0, 50, of_key=of_key(50))
    with Recorder() as recorder:
        feed(cache, case, 50, 51, of_key=of_key(1))
    return [
        copied(recorder.calls[operator])
        for operator in (
            torch.ops.mosar.cache_append.default,
            torch.ops.mosar.cache_attend.default,
        )
    ]


RICH = BASE.with_(config=GEOMETRIES["groups and sinks"], padding="left", positions="counted")


@pytest.mark.parametrize("case", [BASE, RICH], ids=["plain", "rich"])
def test_opcheck(case):
    append, attend = recorded(case)
    torch.library.opcheck(torch.ops.mosar.cache_attend.default, attend)
    # What it returns depends on data, which traced graphs do not take as a constant.
    torch.library.opcheck(
        torch.ops.mosar.cache_append.default,
        append,
        test_utils=("test_schema", "test_autograd_registration"),
    )


STATE = ("k_pool", "v_pool", "table", "marks")
APPEND = (
    *("k", "v", "labels", "positions", "valid", *STATE, "free", "progress", "biases", "bias"),
    *("reach", "slot", "sinks", "margin"),
)
ATTEND = (
    *("q", "labels", "positions", *STATE, "progress", "biases", "bias_q", "reach", "geometry"),
    *("position", "scale", "softcap", "barrier", "exponent"),
)


def wrong_dtype(value):
    if not value.is_floating_point():
        return torch.int16
    return torch.float32 if value.dtype == torch.float64 else torch.float64


def wrong_versions(name, value):
    if isinstance(value, torch.Tensor):
        yield value.to(wrong_dtype(value))
        yield value[..., None]
        yield value[0]
        if value.shape[-1] > 1 and name not in ("table", "reach"):
            yield value[..., :-1].contiguous()
        yield torch.cat([value, value])
        if name in (*STATE, "geometry") and value.dim() > 1 and min(value.shape[-2:]) > 1:
            yield value.mT.contiguous().mT
    elif name == "slot":
        yield from (-1, 2**31)


@pytest.mark.parametrize("case", [BASE, RICH], ids=["plain", "rich"])
@pytest.mark.parametrize("which", [0, 1], ids=["append", "attend"])
def test_wrong_arguments(which, case):
    call = (torch.ops.mosar.cache_append, torch.ops.mosar.cache_attend)[which]
    names, given = (APPEND, ATTEND)[which], recorded(case)[which]
    assert len(names) == len(given)
    call(*copied(given))
    for index, name in enumerate(names):
        for wrong in wrong_versions(name, given[index]):
            arguments = copied([*given[:index], wrong, *given[index + 1 :]])
            try:
                call(*arguments)
            except (ValueError, RuntimeError, NotImplementedError):
                continue
            pytest.fail(f"{call} took a wrong {name}: {wrong}")


@pytest.mark.parametrize(
    ("name", "entry", "value"),
    [
        ("table", (0, 0), -1),
        ("table", (0, 1), 10**6),
        ("table", (0, 2), -1),
        ("table", (0, 2), 10**6),
        ("free", (0,), 10**6),
        ("free", (0,), -1),
        ("free", (1,), 10**6),
    ],
)
def test_a_broken_state_is_refused(name, entry, value):
    """Whatever wrote it, the kernels never leave the pools."""
    operators = (torch.ops.mosar.cache_append, torch.ops.mosar.cache_attend)
    for names, call, arguments in zip((APPEND, ATTEND), operators, recorded(BASE), strict=True):
        if name in names:
            arguments[names.index(name)][entry] = value
            with pytest.raises((ValueError, RuntimeError), match=r"leaves the pool|is full"):
                call(*arguments)


def test_choice():
    cpu = torch.device("cpu")
    assert decode.can_serve("native", cpu, torch.bfloat16)
    assert decode.can_serve("auto", cpu, torch.float32)
    assert not decode.can_serve("tiled", cpu, torch.float32)
    assert not decode.can_serve("auto", cpu, torch.float64)
    assert not decode.can_serve("auto", torch.device("cuda"), torch.float32)
    with pytest.raises(ValueError, match="keys are on cuda; use impl='auto'"):
        decode.can_serve("native", torch.device("cuda"), torch.float32)
    with pytest.raises(ValueError, match="impl must be one of"):
        decode.can_serve("fast", cpu, torch.float32)


def test_without_the_library(monkeypatch):
    monkeypatch.setattr(decode.native, "native_obstacle", lambda: "no compiler")
    case = BASE.with_(num_keys=50, num_queries=50)
    assert_right(case, *feed_all(new_cache(case, impl="tiled"), case, (30, *(1,) * 20)))
    assert not decode.can_serve("auto", torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="no compiler; use impl='auto'"):
        decode.can_serve("native", torch.device("cpu"), torch.float32)
