"""Every fast path computes what the float64 reference defines, in values and gradients."""

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import (
    DISTANCE_BIASES,
    FORCED,
    Case,
    assert_agrees_with_outsider,
    assert_distance_agrees_with_outsider,
    cases,
    steep_cases,
)
from kernels.budget import (
    NAMES,
    PATHS,
    ROUTINGS,
    assert_every_output_is_written,
    assert_no_second_derivative,
    assert_padding_does_not_matter,
    assert_rows_without_keys_are_zero,
    assert_within_budget,
    attend,
    collect,
    compare,
    differentiable,
    run,
    strided,
    transposed,
    upstream,
    viewed,
)
from mosar import MoSARConfig, Regime
from mosar.kernels import tiled

TESTS = Path(__file__).parent.parent
LOW_PRECISION = (torch.bfloat16, torch.float16)
# Gates that move over hundreds of positions: several tiles and blocks of keys see each of them.
WIDE = MoSARConfig(
    max_length=160,
    regimes=(Regime("S", 12, 0.75), Regime("M", 40.5, 0.5), Regime("G", 160, 1.0)),
)
# Reaches of a real model, with all that a plan can hold.
LONG = MoSARConfig(
    regimes=(Regime("S", 128, 0.75), Regime("M", 512, 0.5), Regime("G", 2048, 1.0)), num_sinks=4
)
BASE = Case(
    config=WIDE,
    dtype=torch.float32,
    batch=2,
    kv_heads=2,
    heads_per_kv=2,
    num_queries=150,
    num_keys=150,
    head_dim=16,
)
# Of the biases by distance, these two reach every line of code.
SOME_PATHS = [path for path in PATHS if path[1] in (*ROUTINGS, "none", "both")]
some_paths = pytest.mark.parametrize(("impl", "kind"), SOME_PATHS)
and_reference = pytest.mark.parametrize(
    ("impl", "kind"), SOME_PATHS + [("reference", kind) for kind in (*ROUTINGS, "both")]
)


@pytest.mark.parametrize(
    ("impl", "kinds"),
    [
        *((impl, (kind,)) for impl, kind in PATHS if kind in ROUTINGS),
        ("native", DISTANCE_BIASES),
        ("tiled", DISTANCE_BIASES),
    ],
)
@given(data=st.data())
def test_any_call(impl, kinds, data):
    case = data.draw(cases(dtype=torch.float32, max_length=40))
    kind = data.draw(st.sampled_from(kinds))
    assert_within_budget(case, kind, impl=impl, conditioned=True)


@pytest.mark.parametrize(("impl", "kind"), [path for path in PATHS if path[1] in ROUTINGS])
@given(case=steep_cases(max_length=40))
def test_any_barrier(impl, kind, case):
    """The largest score may be worth nothing, and one far below it everything."""
    assert_within_budget(case, kind, impl=impl, conditioned=True)


@given(cases(), st.sampled_from((1, 2, 5)))
def test_tiles_in_float64_are_the_outsiders(case, tile):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "_TILE", tile)
        assert_agrees_with_outsider(case, impl="tiled", atol=1e-10)


@given(cases(), st.sampled_from(DISTANCE_BIASES))
def test_distance_tiles_in_float64_are_the_outsiders(case, kind):
    assert_distance_agrees_with_outsider(case, kind, impl="tiled", atol=1e-10)


# The tiles of torch operators are those of `test_traits`, only more of them.
@pytest.mark.parametrize(
    ("impl", "kind"), [path for path in SOME_PATHS if path[0] != "tiled" or path[1] == "sparse"]
)
def test_4097_tokens(impl, kind):
    """Some rows of queries, and all that they send back to keys, values and routings."""
    length, eps = 4097, torch.finfo(torch.float32).eps
    case = BASE.with_(
        batch=1, kv_heads=1, num_queries=length, num_keys=length, head_dim=8, config=LONG
    )
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(length, generator=generator)[:50]
    rows = torch.cat([rows, torch.tensor([0, 63, 64, length - 1])]).unique()
    few = case.with_(num_queries=len(rows))
    dout, dlse = upstream(few, case.q[:, :, rows], case.q[:, :, rows, 0])
    ours = differentiable(*case.inputs)
    output, lse = attend(case, kind, ours, impl=impl)
    arriving = (
        torch.zeros_like(output).index_copy(2, rows, dout),
        torch.zeros_like(lse).index_copy(2, rows, dlse),
    )
    found = torch.autograd.grad((output, lse), ours, arriving, allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for g, x in zip(found, ours, strict=True)]
    found = dict(zip(NAMES, (output.detach(), lse.detach(), *found), strict=True))
    for name in ("dq", "dpi_q"):
        others = torch.ones(length, dtype=torch.bool).index_fill(0, rows, False)
        assert not found[name].transpose(-1, -2)[..., others].any()
    for name, axis in (("output", 2), ("lse", 2), ("dq", 2), ("dpi_q", 1)):
        found[name] = found[name].index_select(axis, rows)

    def by_rows(dtype):
        inputs = (case.q[:, :, rows], case.k, case.v, case.pi_q[:, rows], case.pi_k)
        leaves = differentiable(*(x.to(dtype) for x in inputs))
        return collect(
            few, *attend(case, kind, leaves, impl="reference", query_positions=rows[None]), leaves
        )

    compare(found, by_rows(torch.float32), by_rows(torch.float64), eps)


def variant(*regimes, **changes):
    regimes = regimes or [(regime.reach, regime.plateau) for regime in WIDE.regimes]
    regimes = tuple(Regime(f"R{i}", *regime) for i, regime in enumerate(regimes))
    return MoSARConfig(max_length=160, regimes=regimes, **changes)


GEOMETRIES = {
    "2 regimes": variant((9.5, 0.5), (100, 1.0)),
    "4 regimes": variant((3, 0.75), (20, 0.5), (33.3, 0.25), (120, 1.0)),
    "5 regimes": variant((1, 0.75), (5, 0.5), (20, 0.0), (60, 0.9), (90, 0.5)),
    "steps": variant((7, 1.0), (30.5, 1.0), (90, 1.0)),
    "shorter than one token": variant((0.25, 0.5), (0.5, 1.0), (0.75, 1.0)),
    "far beyond any text": variant((7, 0.5), (1e8, 0.5), (1e9, 1.0)),
    "linear": variant(exponent=1.0),
    "steep": variant(exponent=3.0, barrier=2.0),
    "rooted": variant(exponent=0.5),
    "min": variant(composition="min"),
    "max": variant(composition="max"),
    "sinks": variant(num_sinks=3),
    "groups": variant(routing_groups=2),
    "groups and sinks": variant(routing_groups=2, num_sinks=1, exponent=1.0),
}
# `test_any_call` draws others, of few tokens; test_far.py takes all of them.
SOME_GEOMETRIES = ("5 regimes", "steps", "far beyond any text", "max", "groups and sinks")


TRAITS = {
    "padded left": {"padding": "left"},
    "padded right": {"padding": "right"},
    "padded within": {"padding": "holes", "positions": "counted"},
    "packed": {"segments": "packed", "positions": "counted"},
    "interleaved": {"segments": "interleaved"},
    "packed and padded": {"segments": "packed", "padding": "holes", "config": GEOMETRIES["sinks"]},
    "free positions": {"positions": "gaps", "num_queries": 170},
    "window": {"window": 20},
    "soft-cap": {"softcap": 2.0},
    "soft-cap, window": {"softcap": 30.0, "window": 35, "scale": 3.0},
    **{f"length {n}": {"num_queries": n, "num_keys": n} for n in (1, 63, 64, 65)},
    "length 1000": {"num_queries": 1000, "num_keys": 1000, "batch": 1, "kv_heads": 1},
    **{f"last {n}": {"num_queries": n, "num_keys": m} for n, m in ((1, 200), (33, 65), (130, 257))},
    **{f"dim {n}": {"head_dim": n} for n in (3, 64, 80, 256)},
    **{f"heads {k}x{n}": {"kv_heads": k, "heads_per_kv": n} for k, n in ((3, 1), (1, 8))},
    **{str(dtype): {"dtype": dtype, "softcap": 30.0} for dtype in LOW_PRECISION},
    **{f"scale {scale}": {"scale": scale} for scale in (1e4, -1e4, 1e-4, 1e-30, 0.0)},
    "large, capped": {"scale": 1e4, "softcap": 20.0},
    **{f"regimes {name}": {"config": GEOMETRIES[name]} for name in SOME_GEOMETRIES},
    **{f"all {labels}": {"probabilities": labels} for labels in FORCED},
}
FEW_ENTRIES = ("length 1", "last 1", "scale 10000.0", "scale -10000.0", "large, capped")


def is_far(kind, trait):
    """Whether the budget must be conditioned: few entries, or logits of hundreds."""
    far = kind in ("slopes", "both") and trait in ("padded right", "free positions")
    return far or trait in FEW_ENTRIES


# Top-1 is soft routing of one-hot rows, and no bias one of zeros: `test_any_call` has both.
# A bias by distance knows no regimes.
@pytest.mark.parametrize(
    ("impl", "kind", "trait"),
    [
        (impl, kind, trait)
        for impl, kind in SOME_PATHS
        for trait in TRAITS
        if kind not in ("top1", "none")
        and (kind in ROUTINGS or not trait.startswith(("regimes", "all")))
    ],
)
def test_traits(impl, kind, trait):
    case = BASE.with_(**TRAITS[trait])
    assert_within_budget(case, kind, impl=impl, conditioned=is_far(kind, trait))


@pytest.mark.parametrize("impl", ["native", "planned", "tiled"])
def test_a_pair_outside_the_support_cannot_drown_the_others(impl):
    """The first key scores 1000 more than the others, and to most queries it does not exist."""
    case = BASE.with_(probabilities="first", batch=1, kv_heads=1, heads_per_kv=1, scale=1.0)
    q, k, v, pi_q, pi_k = (tensor.clone() for tensor in case.inputs)
    q[..., 0], k[..., 0], k[:, :, 0, 0] = 1.0, 0.0, 1000.0
    inputs = (q, k, v, pi_q, pi_k)
    ours = run(case, "sparse", impl=impl, inputs=inputs)
    true = run(case, "sparse", impl="reference", inputs=tuple(x.double() for x in inputs))
    for name in NAMES:
        torch.testing.assert_close(ours[name].double(), true[name], atol=1e-3, rtol=1e-3)


def sliced(x):
    """A part of a larger tensor in every dimension but the last."""
    padded = torch.nn.functional.pad(x, (0, 5, 2, 3, 1, 1, 1, 0), value=math.nan)
    return padded[1:, 1:-1, 2:-3, :-5]


def last_first(x):
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def expanded(x):
    """One token for all of them."""
    return x[:, :, :1].expand_as(x)


@some_paths
@pytest.mark.parametrize("view", [transposed, sliced, strided, last_first, expanded])
def test_views(impl, kind, view):
    case = BASE.with_(num_queries=40, num_keys=70)
    ours, expected = (run(case, kind, impl=impl, inputs=x) for x in viewed(case, view))
    for name in NAMES:
        # Torch may sum in another order where strides differ; the native kernels do not.
        if impl == "tiled":
            torch.testing.assert_close(ours[name], expected[name], atol=2e-5, rtol=2e-5)
        else:
            assert torch.equal(ours[name], expected[name]), name


@and_reference
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(("padding", "head_dim"), [("left", 16), ("right", 20), ("holes", 16)])
def test_what_padded_slots_hold_does_not_matter(impl, kind, padding, head_dim, poison):
    case = BASE.with_(padding=padding, head_dim=head_dim, num_queries=40, num_keys=70)
    assert_padding_does_not_matter(case, kind, impl=impl, poison=poison)


@and_reference
def test_a_row_without_keys_is_zero_and_has_no_gradient(impl, kind):
    case = BASE.with_(num_queries=40, num_keys=70)
    assert_rows_without_keys_are_zero(case, "none" if kind == "both" else kind, impl=impl)


@and_reference
def test_autocast_changes_nothing(impl, kind):
    case = BASE.with_(num_queries=20, num_keys=20)
    leaves = differentiable(*case.inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, lse = attend(case, kind, leaves, impl=impl)
    found, expected = collect(case, output, lse, leaves), run(case, kind, impl=impl)
    assert all(torch.equal(expected[name], found[name]) for name in NAMES)


@some_paths
def test_every_output_is_written(impl, kind):
    case = BASE.with_(num_queries=40, num_keys=70, padding="holes")
    assert_every_output_is_written(case, kind, impl=impl)


def digest():
    """One number for all results of the native paths."""
    found = hashlib.sha256()
    for impl, kind in PATHS:
        if impl != "tiled":
            for change in ({}, {"head_dim": 20, "softcap": 3.0}, {"num_keys": 190, "window": 30}):
                results = run(BASE.with_(padding="holes", **change), kind, impl=impl)
                for name in NAMES:
                    found.update(results[name].numpy().tobytes())
    return found.hexdigest()


def test_scratch_memory_may_hold_anything():
    """The C library fills all memory it hands out with 0xfe, which makes floats of -1.7e38."""
    done = subprocess.run(
        [sys.executable, "-c", "import conftest, kernels.test_paths as t; print(t.digest())"],
        env={**os.environ, "MALLOC_PERTURB_": "1", "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == digest(), done.stderr


@some_paths
def test_evaluation_first_and_training_later(impl, kind):
    """What the first call keeps for later ones serves both."""
    config = variant((5.5, 0.5), (21, 0.5), (77, 1.0), exponent=1.5, num_sinks=2)
    case = BASE.with_(config=config, num_queries=20, num_keys=20)
    inputs = case.inputs
    with torch.inference_mode():
        before = attend(case, kind, inputs, impl=impl)
    after = run(case, kind, impl=impl)
    assert torch.equal(before[0], after["output"])


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_native_kernels_refuse_a_second_derivative(routing):
    assert_no_second_derivative(BASE.with_(num_queries=8, num_keys=8), routing, impl="native")
