"""The GPU's operators as torch sees them, and when they serve."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.library import wrap_triton

from cases import Case
from kernels.budget import attend, distance_bias, run
from kernels.test_operators import Recorder, copied
from mosar import MoSARConfig, Regime, distance_attention, mosar_attention
from mosar.attention import _choose_implementation
from mosar.kernels import triton
from mosar.kernels.triton import decode, ops, plan
from mosar.lazy import install_line
from mosar.model.cache import RegimeLayerCache

CONFIG = MoSARConfig(
    regimes=(Regime("S", 3, 0.75), Regime("M", 8, 0.5), Regime("G", 20, 1.0)), num_sinks=1
)
CASE = Case(
    config=CONFIG,
    dtype=torch.float32,
    batch=2,
    heads_per_kv=2,
    num_queries=10,
    num_keys=14,
    padding="holes",
)
# Those that can run where a kernel needs data: no graph is traced through it.
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("kind", ["sparse", "soft", "both"])
def test_opcheck(kind):
    with Recorder() as recorder:
        run(CASE.with_(num_queries=5, num_keys=7), kind, impl="triton")
    names = [operator.name().removeprefix("mosar::triton_") for operator in recorder.calls]
    assert names == [*["plan"] * (kind == "sparse"), "attend", "attend_backward"]
    for operator, arguments in recorder.calls.items():
        arguments = copied(arguments)
        if operator.name() == "mosar::triton_attend":
            for trained in arguments[:5]:
                if trained is not None:
                    trained.requires_grad_()
        torch.library.opcheck(operator, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("kind", ["sparse", "soft", "both"])
def test_autocast_changes_nothing(kind):
    expected = attend(CASE, kind, CASE.inputs, impl="triton")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attend(CASE, kind, CASE.inputs, impl="triton")
    assert all(map(torch.equal, found, expected))


def test_evaluation_first_and_training_later():
    """What the first call keeps for later ones serves both."""
    config = MoSARConfig(regimes=(Regime("S", 2.5, 0.5), Regime("G", 17, 1.0)), num_sinks=2)
    for kind in ("sparse", "soft"):
        case = CASE.with_(config=config, padding="none")
        assert case.inputs
        with torch.inference_mode():
            before, _ = attend(case, kind, case.inputs, impl="triton")
        assert torch.equal(before, run(case, kind, impl="triton")["output"])


def test_refusals():
    with pytest.raises(ValueError, match=r"impl='triton' cannot serve: .*float64"):
        mosar_attention(
            *CASE.with_(dtype=torch.float64).inputs, CONFIG, impl="triton", **CASE.options
        )
    wide = CASE.with_(head_dim=257)
    with pytest.raises(ValueError, match="head dims up to 256, and q has 257"):
        mosar_attention(*wide.inputs, CONFIG, impl="triton", **CASE.options)
    bias = {"slopes": distance_bias(CASE, "slopes")["slopes"].requires_grad_()}
    with pytest.raises(ValueError, match="no gradient to slopes"):
        distance_attention(CASE.q, CASE.k, CASE.v, impl="triton", **bias)


@pytest.mark.parametrize("impl", ["triton", "native", "tiled"])
def test_what_is_not_a_number_is_seen(monkeypatch, impl):
    """As in the reference: a router that has diverged must not train on in silence."""
    pi_q = CASE.pi_q.clone()
    pi_q[0, ..., -1, :] = float("nan")
    inputs = (*CASE.inputs[:3], pi_q, CASE.pi_k)
    # As on a GPU, and in a graph of torch.compile.
    monkeypatch.setattr("mosar.attention.can_check_values", lambda tensor: False)
    found = run(CASE, "soft", impl=impl, inputs=inputs)
    expected = run(CASE, "soft", impl="reference", inputs=inputs)
    for name in ("output", "lse", "dq", "dk", "dv"):
        assert torch.equal(found[name].isnan(), expected[name].isnan()), name
    assert expected["output"].isnan().any() and found["dpi_k"].isnan().any()


def test_newer_settings_of_tf32():
    """Older and newer settings are not to be mixed: torch refuses to read one after the other."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    assert ops._dot_precision(torch.ones(1)) == "ieee"
    matmul.fp32_precision = "tf32"
    try:
        assert ops._dot_precision(torch.ones(1)) == "tf32"
        assert ops._dot_precision(torch.ones(1, dtype=torch.float16)) == "ieee"
        run(CASE.with_(num_queries=3, num_keys=3), "sparse", impl="triton")
    finally:
        matmul.fp32_precision = before


def test_launches_are_made_on_the_tensors_device(monkeypatch):
    """Triton launches on the current device; each operator makes that of its tensors current."""
    inside, seen = [], []

    class Guard:
        def __init__(self, tensor):
            self.shape = tensor.shape

        def __enter__(self):
            inside.append(self.shape)

        def __exit__(self, *_):
            inside.pop()

    def launch(kernel):
        seen.append(bool(inside))
        return wrap_triton(kernel)

    monkeypatch.setattr(torch.cuda, "device_of", Guard)
    for module in (ops, plan, decode):
        monkeypatch.setattr(module, "wrap_triton", launch)
    for kind in ("sparse", "soft"):
        run(CASE, kind, impl="triton")
    cache = RegimeLayerCache(CONFIG, impl="triton")
    cache.update(CASE.k, CASE.v, CASE.labels[1])
    cache.settle()
    cache.attend(CASE.q[:, :, :1], CASE.labels[0][:, :1])
    assert len(seen) > 15 and all(seen)


def test_a_short_table_is_refused_without_reading_values(monkeypatch):
    """What exists follows from the shapes alone, so a GPU need not be waited for."""
    monkeypatch.setattr("mosar.attention.can_check_values", lambda tensor: False)
    with pytest.raises(
        ValueError, match="log_gate covers distances up to 4, but a pair at distance 9"
    ):
        distance_attention(*(torch.ones(1, 1, 10, 8),) * 3, log_gate=torch.zeros(1, 5))


class Pretended:
    """As much of a tensor on a GPU as choosing needs."""

    def __init__(self, dtype=torch.bfloat16, length=10, head_dim=64):
        self.device, self.dtype = torch.device("cuda", 0), dtype
        self.shape = (1, 8, length, head_dim)


@pytest.mark.parametrize(
    ("given", "lacks", "chosen"),
    [
        ({}, None, "triton"),
        ({"dtype": torch.float32, "head_dim": 256, "length": 4000}, None, "triton"),
        ({"dtype": torch.float64}, None, "reference"),
        ({"head_dim": 257, "length": 600}, None, "tiled"),
        ({"length": 600}, "it gives no gradient to slopes", "tiled"),
    ],
)
def test_auto_on_a_gpu(given, lacks, chosen):
    q: Any = Pretended(**given)
    assert _choose_implementation("auto", q, q, lacks) == chosen


@pytest.mark.parametrize(
    ("hip", "capability", "chosen"),
    [(None, (8, 0), "triton"), (None, (7, 5), "reference"), ("6.4", (7, 5), "triton")],
)
def test_auto_on_an_old_gpu(monkeypatch, hip, capability, chosen):
    monkeypatch.setattr("mosar.kernels.triton.blocks.is_interpreted", lambda: False)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    triton._kept_machine_obstacle.cache_clear()
    q: Any = Pretended()
    try:
        assert _choose_implementation("auto", q, q) == chosen
    finally:
        triton._kept_machine_obstacle.cache_clear()


WITHOUT_A_GPU = """
import sys
import torch
from mosar import MoSARConfig, forced_routing, mosar_attention
from mosar.kernels import triton as package
config = MoSARConfig.scaled(32)
pi = forced_routing(config, "S", batch=1, length=4)
q = torch.ones(1, 1, 4, 8)
hidden = {"triton": None}
for modules in (hidden, {}):
    sys.modules.update(modules)
    mosar_attention(q, q, q, pi, pi, config)
    try:
        mosar_attention(q, q, q, pi, pi, config, impl="triton")
    except ValueError as error:
        print(error)
    for name in modules:
        del sys.modules[name]
    package._kept_machine_obstacle.cache_clear()
"""


def test_where_it_cannot_run():
    """Without Triton, and without a GPU: one line says so, and everything else works."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_GPU], capture_output=True, text=True, env=environment
    )
    refusal = "impl='triton' cannot serve: {}; use impl='auto'"
    assert done.stdout.splitlines() == [
        refusal.format(f"it needs Triton, which is not installed: {install_line('gpu')}"),
        refusal.format("it runs on a GPU, and q is on cpu"),
    ], done.stderr
