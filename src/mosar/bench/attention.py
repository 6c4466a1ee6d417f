"""Compares our attention with others: `mosar bench attention`.

    sdpa          torch's dense causal attention, without any geometry: the one to beat
    flash         the same, FlashAttention and nothing else (GPU)
    reference     our dense definition in plain PyTorch
    flex          FlexAttention compiled, tokens as they come
    flex-sorted   FlexAttention compiled, tokens sorted by our plan
    ours          the public operator with impl="auto"

The plan that ours makes in each call is timed by itself, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate

from mosar.bench.comparison import Report, RoutedComparison, Unavailable, check_names
from mosar.bench.correctness import check_problem, choose_rows, dense_rows, largest_error
from mosar.bench.devices import DEVICES, DTYPES, Cpu, Cuda, open_device
from mosar.bench.flex import first_call, flex_call
from mosar.bench.problem import MODES, Case, Problem, Shape, build_problem, call_of, count_pairs
from mosar.bench.table import MIB, Column, Verdict, verdict
from mosar.bench.timing import interleave
from mosar.core.layout import resolve_layout
from mosar.kernels.build import NativeBuildError
from mosar.kernels.plan import build_plan, dense_plan_input, sparse_plan_input
from mosar.records import AttentionBenchmark, Measurement, environment

# By device; on the CPU torch's dense attention is its FlashAttention already.
COMPETITORS = {
    "cpu": ("sdpa", "reference", "flex", "flex-sorted", "ours"),
    "cuda": ("sdpa", "flash", "reference", "flex", "flex-sorted", "ours"),
}
SHAPES = (Shape(8, 1, 256), Shape(8, 8, 64), Shape(9, 3, 64))
# By device and mode; short lengths leave a GPU idle.
_LENGTHS = {
    "cpu": {"sparse": (256, 512, 1024, 2048, 4096, 8192), "sparse-train": (2048, 8192)},
    "cuda": {"sparse": (1024, 2048, 4096, 8192, 16384, 32768), "sparse-train": (2048, 8192, 32768)},
}
_OTHER_LENGTHS = {"cpu": (2048,), "cuda": (2048, 8192)}
_MEMORY_LENGTH = 8192
# The reference holds several n x n tensors per head.
_REFERENCE_LENGTH = 2048
# FlexAttention compiles about ten seconds for each length, so by default it has only these.
_FLEX_LENGTHS = (1024, 4096)
# The largest error of a competitor, relative to the largest entry, for the same task.
_SAME_TASK = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}
_DESCRIPTIONS = {
    "sparse": "forward, the pairs of the support only",
    "sparse-train": "forward + backward, the pairs of the support only",
    "soft-train": "forward + backward of soft routing, all pairs",
    "distance-train": "forward + backward with a soft-cap, all pairs",
}
# Targets on two cores in float32: how much slower than SDPA training with all pairs may be, and the
# share of 1 / rho over dense SDPA that sparse routing must reach from 8192 tokens on.
_DENSE_TRAINING = {"soft-train": 1.3, "distance-train": 1.2}
_FORWARD = {"8x1x256": 0.8, "9x3x64": 0.7, "8x8x64": 0.6}
_BACKWARD = {"8x1x256": 0.6, "9x3x64": 0.45, "8x8x64": 0.45}


@dataclass(frozen=True, kw_only=True)
class AttentionComparison(RoutedComparison[AttentionBenchmark]):
    mode: tuple[str, ...] = ("sparse",)
    shapes: tuple[Shape, ...] = SHAPES
    lengths: tuple[int, ...] | None = None
    """Lengths that are timed; None: those of the mode."""
    memory: tuple[int, ...] | None = None
    """Lengths whose memory is measured; None: 8192, or the largest given one up to it."""
    competitors: tuple[str, ...] | None = None
    """One or more of COMPETITORS; None: all that make sense on the device."""
    seconds: float = 10.0
    device: str = "cpu"
    dtype: str | None = None
    """Data type of q, k and v; None: float32 on the CPU, bfloat16 on a GPU."""

    def __post_init__(self) -> None:
        check_names("device", (self.device,), DEVICES)
        if self.dtype is not None:
            check_names("dtype", (self.dtype,), DTYPES)
        if self.device == "cpu" and self.dtype not in (None, "float32"):
            raise ValueError(f"on the CPU dtype must be float32, got {self.dtype!r}")
        check_names("mode", self.mode, MODES)
        check_names("competitor", self.chosen_competitors, COMPETITORS[self.device])
        self.check_lengths(self.memory)
        super().__post_init__()

    @property
    def chosen_competitors(self) -> tuple[str, ...]:
        return COMPETITORS[self.device] if self.competitors is None else self.competitors

    def timed_lengths(self, mode: str) -> tuple[int, ...]:
        if self.lengths is not None:
            return self.lengths
        return _LENGTHS[self.device].get(mode, _OTHER_LENGTHS[self.device])

    @property
    def memory_lengths(self) -> tuple[int, ...]:
        if self.memory is not None:
            return self.memory
        if self.lengths is None:
            return (_MEMORY_LENGTH,)
        return tuple(sorted(n for n in self.lengths if n <= _MEMORY_LENGTH)[-1:])

    def cases(self) -> list[Case]:
        return [
            case
            for mode in self.mode
            for case in self.draw_cases(
                self.shapes, sorted({*self.timed_lengths(mode), *self.memory_lengths}), mode
            )
        ]

    @cached_property
    def opened(self) -> Cpu | Cuda:
        return open_device(self.device, self.dtype)

    def run(self, report: Report = lambda step: None) -> Iterator[AttentionBenchmark]:
        _ = self.opened

        def keep_peak(before: AttentionBenchmark, row: AttentionBenchmark) -> AttentionBenchmark:
            # A busy moment of the machine must not set its peak.
            return replace(row, gemm_gflops=max(before.gemm_gflops, row.gemm_gflops))

        return accumulate(super().run(report), keep_peak)

    def measure(self, case: Case, report: Report) -> AttentionBenchmark:
        report("the speed of a large matrix product")
        device = self.opened
        peak = device.gemm_gflops()
        report("checking against float64")
        problem = build_problem(replace(case, device=device.place, dtype=device.dtype))
        pairs, causal_pairs = count_pairs(problem)
        record = AttentionBenchmark(
            mode=case.mode,
            **case.record_fields(),
            **case.shape._asdict(),
            pairs=pairs,
            causal_pairs=causal_pairs,
            gemm_gflops=peak,
            checks=check_problem(problem),
            measurements={},
            plan=Measurement(),
            environment=environment() | device.describe(),
        )
        if record.correct and case.length in self.timed_lengths(case.mode):
            record = self._with_times(record, problem, report)
        if record.correct and case.length in self.memory_lengths:
            report("memory")
            asked = [name for name in ("sdpa", "ours") if name in self.chosen_competitors]
            record = self.with_memory(record, asked, partial(device.measure_peak, problem.case))
        return record

    def _with_times(
        self, record: AttentionBenchmark, problem: Problem, report: Report
    ) -> AttentionBenchmark:
        calls, missing = self.build(
            self.chosen_competitors, lambda name: self._build_call(name, problem, report)
        )
        report("timing " + ", ".join(calls))
        if "ours" in calls:
            calls["plan"] = _plan_call(problem)
        for call in calls.values():
            self.opened.warm_up(call)
        times = interleave(calls, seconds=self.seconds, time_calls=self.opened.seconds)
        plan = Measurement(samples_ms=times.pop("plan", ()))
        return self.with_times(replace(record, measurements=missing, plan=plan), times)

    def _build_call(self, name: str, problem: Problem, report: Report) -> Callable[[], object]:
        """The call of a competitor, after a check that it gives our result."""
        case, (first, last) = problem.case, _FLEX_LENGTHS
        if name == "reference" and case.length > _REFERENCE_LENGTH:
            raise Unavailable(f"it holds n x n tensors; timed up to n = {_REFERENCE_LENGTH}")
        if not name.startswith("flex"):
            call = call_of(problem, name)
            if name == "flash":
                first_call("FlashAttention", call)
            return call
        unasked = self.device == "cpu" and self.competitors is None
        if unasked and not first <= case.length <= last:
            raise Unavailable(f"by default compiled only for {first} to {last} tokens")
        report(f"compiling {name}")
        call = flex_call(problem, is_sorted=name == "flex-sorted")
        out = first_call("FlexAttention", call)
        rows = choose_rows(case.length, case.seed)
        exact = dense_rows(problem, rows, out.double().dtype)[0]
        error = largest_error(out[:, :, rows], exact) / float(exact.abs().max())
        if not error <= _SAME_TASK[case.dtype]:
            raise Unavailable(f"compiled FlexAttention is wrong here, off by {error:.1e}")
        return call

    def title_of(self, record: AttentionBenchmark) -> str:
        return f"{record.mode}: {_DESCRIPTIONS[record.mode]}"

    def columns(self, records: Sequence[AttentionBenchmark]) -> list[Column]:
        peak = _best_gemm(records)

        def rate(r: AttentionBenchmark) -> str | None:
            return None if r.gflops is None else f"{r.gflops:.0f} ({100 * r.gflops / peak:.0f})"

        def time(name: str) -> Column:
            heading = "SDPA" if name == "sdpa" else name.replace("-", " ")
            column = Column(f"{heading}\nms", lambda r: r.median_ms(name), ".2f")
            return column._replace(is_optional=name not in ("sdpa", "ours"))

        return [
            Column("shape", lambda r: r.shape, is_head=True),
            Column("n", lambda r: r.length, is_head=True),
            Column("ρ", lambda r: r.density, ".3f", is_head=True),
            *map(time, COMPETITORS["cuda"]),
            Column("speed-up\n× SDPA", lambda r: r.speedup, ".2f"),
            Column("speed-up\n× ρ", lambda r: r.speedup_times_density, ".2f"),
            Column("plan\n%", lambda r: r.plan_share, ".1f", 100),
            Column("memory MiB\nours / SDPA", lambda r: r.peaks_bytes("ours", "sdpa"), ".1f", MIB),
            Column("GFLOP/s\n(% of peak)", rate),
        ]

    def judge(self, record: AttentionBenchmark) -> list[Verdict]:
        mode, shape, n = record.mode, record.shape, record.length

        def at_most(times: float) -> list[Verdict]:
            return verdict(f"≤ {times:g}× SDPA", record.speedup, least=1 / times)

        def share_of_ideal(share: float) -> list[Verdict]:
            return verdict(f"≥ {share:.2g}/ρ", record.speedup_times_density, least=share)

        # There are no targets for a GPU yet.
        if shape not in _FORWARD or "device" in record.environment:
            return []
        if mode == "soft-train" and n == 8192:
            return verdict("memory ≤ 2× SDPA", record.memory_ratio, most=2)
        if mode in _DENSE_TRAINING:
            return at_most(_DENSE_TRAINING[mode]) if n == 2048 else []
        if mode == "sparse-train":
            return share_of_ideal(_BACKWARD[shape]) if n >= 8192 else []
        if n >= 4096:
            ideal = share_of_ideal(_FORWARD[shape] * (1 if n >= 8192 else 0.8))
            return ideal + verdict("plan ≤ 3 %", record.plan_share, most=0.03)
        if n >= 2048:
            return verdict("≥ 1.5×", record.speedup, least=1.5)
        return at_most(1.05) if 256 <= n <= 1024 else []

    def notes(self, records: Sequence[AttentionBenchmark]) -> str:
        drawn = next((record.labels for record in records if record.labels != "none"), "none")
        fresh = "" if "device" in records[0].environment else " in a fresh process"
        return (
            f"GEMM peak {_best_gemm(records):.0f} GFLOP/s in this run. "
            f"Labels: {drawn}, seed {records[0].seed}. Memory: peak of one call{fresh} above its "
            "inputs. GFLOP/s count exact pairs."
        )


def _best_gemm(records: Sequence[AttentionBenchmark]) -> float:
    """The best matrix product of the run, to which every row is compared."""
    return max(record.gemm_gflops for record in records)


def _plan_call(problem: Problem) -> Callable[[], object]:
    """Builds the plan that our attention builds in each call."""
    from mosar.kernels import native
    from mosar.kernels.triton import obstacle

    case, labels = problem.case, problem.labels
    layout = resolve_layout(1, case.length, case.length, device=problem.q.device)
    if case.device != "cpu" and obstacle(problem.q) is None:
        from mosar.kernels.triton import plan

        if not case.is_sparse:
            return lambda: plan.dense_plan(layout)
        return lambda: plan.sparse_plan(*labels, case.config, layout)
    plan_of = build_plan
    if case.device == "cpu":
        # Without a compiler, the plan is that of the torch operators.
        with suppress(NativeBuildError, OSError):
            native.load_operators()
            plan_of = native.build_native_plan
    if not case.is_sparse:
        return lambda: plan_of(dense_plan_input(layout))
    return lambda: plan_of(sparse_plan_input(*labels, case.config, layout))
