"""The GPU's kernels, interpreted, compute what the float64 reference defines."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import DISTANCE_BIASES, ROUTINGS, Case, cases
from kernels import test_learned_bias as learned_bias
from kernels.budget import (
    NAMES,
    assert_every_output_is_written,
    assert_no_second_derivative,
    assert_padding_does_not_matter,
    assert_rows_without_keys_are_zero,
    assert_within_budget,
    run,
    strided,
    transposed,
    viewed,
)
from kernels.test_far import CONFIGS, FarCase
from kernels.test_paths import GEOMETRIES, TRAITS, is_far
from mosar import MoSARConfig, Regime
from mosar.kernels.triton import blocks, ops

NARROW = MoSARConfig(
    max_length=48,
    regimes=(Regime("S", 5, 0.75), Regime("M", 20.5, 0.5), Regime("G", 48, 1.0)),
)
BASE = Case(
    config=NARROW,
    dtype=torch.float32,
    heads_per_kv=2,
    num_queries=27,
    num_keys=27,
    head_dim=12,
)
RICH = MoSARConfig(
    regimes=NARROW.regimes, routing_groups=2, num_sinks=2, exponent=1.5, composition="max"
)
# The interpreter's numpy remarks on log2(0), which a GPU takes as it is meant.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")
# One path for each kind of bias.
biases = pytest.mark.parametrize("kind", ("sparse", "soft", "both"))


@pytest.mark.parametrize("kinds", [("sparse",), ("soft",), ("top1", *DISTANCE_BIASES)])
@settings(max_examples=3)
@given(data=st.data())
def test_any_call(kinds, data):
    case = data.draw(cases(dtype=torch.float32, max_length=12))
    kind = data.draw(st.sampled_from(kinds))
    assert_within_budget(case, kind, impl="triton", conditioned=True)


@pytest.mark.parametrize("kind", ["sparse", "soft"])
def test_everything_at_once(kind):
    case = BASE.with_(
        config=RICH, batch=2, kv_heads=2, padding="holes", segments="packed", softcap=3.0
    )
    assert_within_budget(case.with_(num_queries=20, num_keys=29, window=25), kind, impl="triton")


SIZES = {
    "plain": {},
    # Heads of a tile fill it, leave rows over, or need two tiles.
    **{f"{n} heads": {"heads_per_kv": n, "num_queries": 20, "num_keys": 20} for n in (3, 8)},
    "40 heads": {"heads_per_kv": 40, "num_queries": 4, "num_keys": 4},
    **{f"dim {n}": {"head_dim": n, "num_queries": 17, "num_keys": 19} for n in (1, 80)},
    **{f"length {n}": {"num_queries": n, "num_keys": n, "batch": 2} for n in (1, 17)},
    "half": {"dtype": torch.float16, "softcap": 30.0, "num_queries": 25},
    **{f"scale {x}": {"scale": x, "num_queries": 10, "num_keys": 25} for x in (-1e4, 1e-30)},
}


@biases
@pytest.mark.parametrize("size", SIZES)
def test_sizes(kind, size):
    conditioned = size in ("length 1", "scale -10000.0")
    assert_within_budget(BASE.with_(**SIZES[size]), kind, impl="triton", conditioned=conditioned)


@pytest.mark.parametrize(("kind", "softcap"), [("sparse", None), ("top1", 20.0)])
def test_whole_blocks_on_plateaus(monkeypatch, kind, softcap):
    """Tiles of few tokens and long plateaus: most blocks need neither bias nor mask."""
    monkeypatch.setattr(blocks, "INTERPRETED", blocks.Blocks(32, 4, 4, 1))
    config = MoSARConfig(regimes=(Regime("S", 12, 0.9), Regime("G", 48, 1.0)))
    case = BASE.with_(config=config, heads_per_kv=8, head_dim=4, softcap=softcap)
    case = case.with_(num_queries=41, num_keys=41)
    assert_within_budget(case, kind, impl="triton")


@pytest.fixture
def exact_bfloat16(monkeypatch):
    """The interpreter multiplies the bits of bfloat16 matrices; this multiplies their numbers."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def numbers(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        return TensorHandle(numbers(a) @ numbers(b) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@biases
def test_bfloat16(exact_bfloat16, kind):
    case = BASE.with_(dtype=torch.bfloat16, softcap=30.0, num_queries=25)
    assert_within_budget(case, kind, impl="triton")


def test_a_large_score_that_is_worth_little():
    """In half precision weights are relative to what a row can get, not to its largest score."""
    config = MoSARConfig(regimes=(Regime("S", 1, 1.0), Regime("G", 30, 1.0)), barrier=13.0)
    case = BASE.with_(config=config, dtype=torch.float16, probabilities="first")
    q, k, v, pi_q, pi_k = (tensor.clone() for tensor in case.inputs)
    q[..., 0], k[..., 0], k[:, :, 0, 0] = 1.0, 0.0, 20.0
    inputs = (q, k, v, pi_q, pi_k)
    ours = run(case, "soft", impl="triton", inputs=inputs, scale=1.0)
    exact = tuple(tensor.double() for tensor in inputs)
    true = run(case, "soft", impl="reference", inputs=exact, scale=1.0)
    for name in NAMES[:2]:
        torch.testing.assert_close(ours[name].double(), true[name], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("kind", ["sparse", "soft"])
def test_heads_divided_among_programs(monkeypatch, kind):
    case = BASE.with_(heads_per_kv=4, num_queries=15, num_keys=15)
    monkeypatch.setattr(ops, "num_splits", lambda *_: 2)
    assert_within_budget(case, kind, impl="triton")
    assert_within_budget(case.with_(dtype=torch.float16), kind, impl="triton")


@biases
def test_contract(kind):
    small = BASE.with_(padding="holes", num_queries=12, num_keys=27)
    assert_padding_does_not_matter(small, kind, impl="triton", poison=math.nan)
    assert_every_output_is_written(small, kind, impl="triton")
    rows, bias = (
        BASE.with_(num_queries=20, num_keys=20, batch=2),
        "none" if kind == "both" else kind,
    )
    assert_rows_without_keys_are_zero(rows, bias, impl="triton")
    assert_no_second_derivative(BASE.with_(num_queries=4, num_keys=4), kind, impl="triton")
    for view in (transposed, strided):
        case = BASE.with_(num_queries=6, num_keys=9, batch=2)
        ours, expected = (
            run(case, kind, impl="triton", inputs=inputs) for inputs in viewed(case, view)
        )
        assert all(torch.equal(expected[name], ours[name]) for name in NAMES)


def test_offsets_beyond_32_bits():
    """Heads far apart in memory: the strides of a slice of a large buffer."""
    case = BASE.with_(num_queries=9, num_keys=9)
    # Address space alone: only the pages that hold the heads are ever touched.
    far = torch.empty(2**31 + 2**20, dtype=torch.float16)
    q = far.as_strided(case.q.shape, (0, 2**31, case.head_dim, 1))
    q.copy_(case.q)
    inputs = (q, case.k.half(), case.v.half(), case.pi_q, case.pi_k)
    near = (q.clone(), *inputs[1:])
    for kind in ("sparse", "soft"):
        ours, expected = (run(case, kind, impl="triton", inputs=x) for x in (inputs, near))
        assert all(torch.equal(expected[name], ours[name]) for name in NAMES)


@pytest.mark.parametrize("kind", ["sparse", "soft"])
def test_nothing_hides_a_diverging_model(kind):
    """A NaN of a real token shows in every row that reads it, as in the reference."""
    case = BASE.with_(num_queries=25, num_keys=25)
    k = case.k.clone()
    k[:, :, 3] = math.nan
    inputs = (case.q, k, *case.inputs[2:])
    ours, true = (run(case, kind, impl=impl, inputs=inputs) for impl in ("triton", "reference"))
    for name in NAMES[:2]:
        assert torch.equal(ours[name].isfinite(), true[name].isfinite())
    assert not true["output"].isfinite().all()


KEYED = {
    "plain": {"heads_per_kv": 3},
    "soft-cap, window": {"softcap": 2.0, "window": 20, "scale": 1.0},
    "packed": {"segments": "packed", "positions": "counted"},
    "padded": {"padding": "holes", "positions": "counted"},
    "last queries": {"num_queries": 9},
    "two groups": {"config": RICH},
}


@pytest.mark.parametrize("trait", KEYED)
def test_a_bias_of_keys(trait):
    """One that grows along the text: in hard regimes, and with a bias by distance."""
    case = BASE.with_(batch=2, kv_heads=2, num_queries=29, num_keys=29).with_(**KEYED[trait])
    bias = learned_bias.biases(case)
    far = bias[2].double() + 1e4
    for attend, added, more in (
        (learned_bias.run, bias, {"names": learned_bias.RESULTS}),
        (learned_bias.run_labels, far, {}),
    ):
        found, plain, exact = (
            attend(case, added, impl=impl, dtype=dtype, **more)
            for impl, dtype in (
                *(("triton", torch.float32), ("reference", torch.float32)),
                ("reference", torch.float64),
            )
        )
        learned_bias.assert_within_budget({"triton": found}, plain, exact)


def test_a_bias_of_keys_and_heads_divided_among_programs(monkeypatch):
    case = BASE.with_(heads_per_kv=4, num_queries=15, num_keys=15)
    of_key = learned_bias.biases(case)[2].double()
    whole = learned_bias.run_labels(case, of_key, impl="triton")
    monkeypatch.setattr(ops, "num_splits", lambda *_: 2)
    parts = learned_bias.run_labels(case, of_key, impl="triton")
    for name in learned_bias.RESULTS:
        torch.testing.assert_close(parts[name], whole[name])
    shifted = learned_bias.run_labels(case, of_key + 1e7, impl="triton")
    for name in learned_bias.RESULTS:
        if name != "lse":
            torch.testing.assert_close(shifted[name], parts[name], atol=2e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*ROUTINGS, *DISTANCE_BIASES])
@pytest.mark.parametrize("trait", TRAITS)
def test_traits(kind, trait):
    case = BASE.with_(**{"num_queries": 60, "num_keys": 60, "kv_heads": 2, **TRAITS[trait]})
    assert_within_budget(case, kind, impl="triton", conditioned=is_far(kind, trait))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*ROUTINGS, *DISTANCE_BIASES])
@settings(max_examples=100)
@given(data=st.data())
def test_any_call_at_length(kind, data):
    case = data.draw(cases(dtype=torch.float32, max_length=50))
    assert_within_budget(case, kind, impl="triton", conditioned=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*ROUTINGS, "both"])
@pytest.mark.parametrize("size", [(16, 16), (32, 64), (64, 32)])
def test_block_sizes(monkeypatch, kind, size):
    monkeypatch.setattr(blocks, "INTERPRETED", blocks.Blocks(*size, 4, 1))
    case = BASE.with_(
        num_queries=230, num_keys=300, kv_heads=2, config=GEOMETRIES["groups and sinks"]
    )
    assert_within_budget(case, kind, impl="triton")


@pytest.mark.parametrize("config", ["far", "far, other exponent"])
def test_gates_of_a_far_reach_are_computed(config):
    case = FarCase(config=CONFIGS[config], batch=1, num_queries=30, num_keys=40)
    assert_within_budget(case, "soft", impl="triton")
