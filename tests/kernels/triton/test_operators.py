"""The GPU's operators as torch sees them, and when they serve."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cases import Case
from kernels.budget import attend, distance_bias, run
from mosar import MoSARConfig, Regime, distance_attention, mosar_attention
from mosar.attention import _choose_implementation

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


class Recorder(TorchDispatchMode):
    """Keeps the arguments of the last call of each of our operators."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "mosar":
            self.calls[func] = [
                x.detach().clone() if isinstance(x, torch.Tensor) else x for x in args
            ]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["sparse", "soft", "both"])
def test_opcheck(kind):
    with Recorder() as recorder:
        run(CASE.with_(num_queries=5, num_keys=7), kind, impl="triton")
    names = [operator.name().removeprefix("mosar::triton_") for operator in recorder.calls]
    assert names == [*["plan"] * (kind == "sparse"), "attend", "attend_backward"]
    for operator, arguments in recorder.calls.items():
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


class Pretended:
    """As much of a tensor on a GPU as choosing needs."""

    def __init__(self, dtype=torch.bfloat16, length=10, head_dim=64):
        self.device, self.dtype = torch.device("cuda", 0), dtype
        self.shape = (1, 8, length, head_dim)


@pytest.mark.parametrize(
    ("given", "learned", "chosen"),
    [
        ({}, None, "triton"),
        ({"dtype": torch.float32, "head_dim": 256, "length": 4000}, [], "triton"),
        ({"dtype": torch.float64}, None, "reference"),
        ({"head_dim": 257, "length": 600}, None, "tiled"),
        ({"length": 600}, ["slopes"], "tiled"),
    ],
)
def test_auto_on_a_gpu(given, learned, chosen):
    q: Any = Pretended(**given)
    assert _choose_implementation("auto", q, q, learned) == chosen


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
        refusal.format('it needs Triton, which is not installed: pip install "mosar[gpu]"'),
        refusal.format("it runs on a GPU, and q is on cpu"),
    ], done.stderr
