"""Far positions and far reaches: neither costs memory, and both are computed exactly.

Gates end at the longest reach of a configuration, so a table of them does too; where the reach
itself is far there is no table, and gates are computed.
"""

import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from unittest import mock

import pytest
import torch
from torch import Tensor

from cases import ROUTINGS, SMALL, Case
from kernels.budget import assert_within_budget
from kernels.test_paths import BASE, GEOMETRIES
from mosar import MoSARConfig, Regime, mosar_attention
from mosar.kernels import tables
from mosar.model.cache import RegimeLayerCache

FARTHEST = 2**31 - 3
PATHS = [
    *((impl, kind) for kind in ROUTINGS for impl in ("native", "tiled")),
    ("planned", "sparse"),
]
paths = pytest.mark.parametrize(("impl", "kind"), PATHS)


@dataclass(frozen=True, kw_only=True)
class FarCase(Case):
    """Tokens up to the last position there is, at distances of every order of magnitude."""

    dtype: torch.dtype = torch.float32
    batch: int = 2
    heads_per_kv: int = 2
    num_queries: int = 70
    num_keys: int = 90

    @cached_property
    def key_positions(self) -> Tensor:
        return FARTHEST - self._back("key_positions", self.num_keys)

    @cached_property
    def query_positions(self) -> Tensor:
        return FARTHEST - self._back("query_positions", self.num_queries)

    def _back(self, name: str, length: int) -> Tensor:
        uniform = torch.rand(self.batch, length, generator=self._stream(name), dtype=torch.float64)
        back = (FARTHEST**uniform - 1).long()
        back[:, 0] = 0
        return back.sort(dim=1, descending=True).values


def far(*reaches: float, plateaus: tuple[float, ...] = (0.75, 0.5), **changes) -> MoSARConfig:
    regimes = [
        Regime(f"R{index}", reach, plateau)
        for index, (reach, plateau) in enumerate(zip(reaches, (*plateaus, 1.0), strict=True))
    ]
    return MoSARConfig(regimes=tuple(regimes), **changes)


CONFIGS = {
    "near": far(128, 512, 2048),
    "far": far(3e5, 4e7, 1.9e9),
    "far, other exponent": far(3e5, 4e7, 1.9e9, exponent=1.5, num_sinks=2),
    "beyond every position": far(1e5, 3e9, 1e300, composition="max"),
    "steps": far(1e5 + 0.5, 3e7, 1e9, plateaus=(1.0, 1.0), composition="min"),
    # In float32 neither these plateaus nor these distances have the digits that the falls need.
    "short falls": far(1e6 + 0.3, 3e8 + 0.7, 1.5e9, plateaus=(0.999999, 0.99999999)),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@configs
@paths
def test_values_and_gradients(impl, kind, config):
    assert_within_budget(FarCase(config=config), kind, impl=impl)


@paths
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_any_gates_may_be_computed(impl, kind, geometry):
    with mock.patch.object(tables, "_LONGEST_TABLE", 0):
        assert_within_budget(BASE.with_(config=GEOMETRIES[geometry]), kind, impl=impl)


def test_a_fall_much_shorter_than_its_plateau():
    """In float32 a plateau of 999.37 is off by 3e-5: too much where the fall takes one distance."""
    config = MoSARConfig(regimes=(Regime("S", 1000.37, 0.999), Regime("G", 2048, 1.0)))
    case = Case(config=config, dtype=torch.float32, num_queries=50, num_keys=50)
    # Each token reads itself and one that is in the fall.
    at = 1000 * torch.arange(50)[None]
    with mock.patch.multiple(Case, query_positions=at, key_positions=at):
        assert_within_budget(case, "sparse", impl="planned")


def test_decoding_at_the_last_positions():
    """The cache's own kernel computes the same gates."""
    for config in CONFIGS.values():
        case = FarCase(config=config, batch=1, num_keys=60, num_queries=60)
        at, (labels_q, labels_k) = case.key_positions, case.labels
        cache = RegimeLayerCache(config, routing="sparse")
        for t in range(case.num_keys):
            here = slice(t, t + 1)
            cache.update(
                case.k[:, :, here], case.v[:, :, here], labels_k[:, None, here],
                key_positions=at[:, here],
            )  # fmt: skip
            found = cache.attend(case.q[:, :, here], labels_q[:, None, here], at[:, here])
            expected = mosar_attention(
                case.q[:, :, here].double(), case.k[:, :, : t + 1].double(),
                case.v[:, :, : t + 1].double(), case.pi_q[:, here], case.pi_k[:, : t + 1], config,
                routing="sparse", query_positions=at[:, here], key_positions=at[:, : t + 1],
                impl="reference",
            )  # fmt: skip
            torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(("kind", "name"), [("soft", "near"), ("soft", "far"), ("sparse", "far")])
def test_one_graph_for_any_position(kind, name):
    """No size of a graph follows from values, so that it is whole."""
    torch.compiler.reset()
    config = CONFIGS[name]
    case = FarCase(config=config)

    def attend(q, k, v, pi_q, pi_k, query_positions, key_positions):
        return mosar_attention(
            q, k, v, pi_q, pi_k, config, routing=kind, impl="native",
            query_positions=query_positions, key_positions=key_positions,
        )  # fmt: skip

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=False)
    at = case.query_positions, case.key_positions
    assert torch.equal(compiled(*case.inputs, *at), attend(*case.inputs, *at))
    at = case.query_positions // 1000, case.key_positions // 1000
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(*case.inputs, *at), attend(*case.inputs, *at))


def test_tables_end_at_the_reach():
    assert tables.gate_table(CONFIGS["near"]).shape == (3, 3, 1282)
    assert not tables.has_table(CONFIGS["far"])


MEMORY = """
import resource
from dataclasses import replace
import torch
from mosar import MoSARConfig, Regime, mosar_attention
from mosar.geometries import GEOMETRIES, VARIANTS, HeadShape

def largest():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

far = tuple(Regime(n, r, a) for n, r, a in (("S", 1e5, .5), ("M", 1e6, .5), ("G", 1.9e9, 1.)))
at = torch.tensor([[0, 1, 1_000_000, 1_999_999_999, 2_000_000_000]])
q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
hidden = torch.randn(1, 5, 16)
pi = torch.full((1, 5, 3), 1 / 3)

def everything(at):
    for config in (MoSARConfig(), MoSARConfig(regimes=far), MoSARConfig(regimes=far, exponent=1.)):
        for impl in ("native", "tiled", "reference"):
            for routing in ("soft", "top1", "sparse"):
                mosar_attention(
                    q, k, v, pi, pi, config, routing=routing, impl=impl,
                    query_positions=at, key_positions=at,
                )
    for name, attention in VARIANTS.items():
        if name in ("xpos", "kerple"):
            continue  # They compute up to some distance, and say so.
        for regimes in (None, far):
            changed = replace(attention, regimes=regimes)
            geometry = GEOMETRIES[changed.geometry](changed, HeadShape(2, 2, 8, 2048, 0, 16))
            x = [tensor.transpose(1, 2) for tensor in (q, k, v)]
            for routing in ("soft", "sparse"):
                out, _ = geometry(
                    *x, scale=1., routing=routing, query_positions=at, key_positions=at,
                    hidden=hidden,
                )
                assert out.isfinite().all()

with torch.no_grad():
    everything(torch.arange(5)[None])
    before = largest()
    # What would take all memory of the machine is to fail here.
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    everything(at)
print(largest() - before)
"""


def test_memory_does_not_grow_with_positions():
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 64


def test_positions_beyond_int32_are_refused_by_name():
    case = Case(dtype=torch.float32, config=SMALL)
    for name in ("query_positions", "key_positions"):
        at = {"query_positions": torch.arange(6)[None], "key_positions": torch.arange(6)[None]}
        at[name] = at[name] + FARTHEST
        with pytest.raises(
            ValueError, match=rf"{name} must stay below 2\^31 - 1, got {FARTHEST + 5}"
        ):
            mosar_attention(*case.inputs, case.config, **at)
