"""Attention, ours against others: `mosar bench attention`.

Per row: draw the problem, check ours against float64, time everybody interleaved, measure memory.

    sdpa          torch's dense causal attention, without any geometry: the one to beat
    flash         the same, FlashAttention and nothing else (GPU)
    reference     our dense definition in plain PyTorch
    flex          FlexAttention compiled, tokens as they come
    flex-sorted   FlexAttention compiled, tokens sorted by our plan
    ours          the public operator with impl="auto"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from mosar.bench.cases import MODES, Case, Problem, Shape, build_problem, call_of
from mosar.bench.correctness import check_problem, exact_rows
from mosar.bench.devices import DEVICES, DTYPES, Device, open_device
from mosar.bench.flex import FlexUnavailable, first_call, flex_call
from mosar.bench.labels import DRAWN, make_labels
from mosar.bench.memory import MemoryUnavailable
from mosar.bench.timing import interleave
from mosar.core.config import MoSARConfig
from mosar.core.hard_domain import build_hard_domain
from mosar.core.layout import resolve_layout
from mosar.kernels.build import NativeBuildError
from mosar.kernels.plan import Plan, PlanInput, build_plan, dense_plan_input, sparse_plan_input
from mosar.records import AttentionBenchmark, Measurement, environment

COMPETITORS = ("sdpa", "flash", "reference", "flex", "flex-sorted", "ours")
SHAPES = (Shape(8, 1, 256), Shape(8, 8, 64), Shape(9, 3, 64))
_LENGTHS = {
    "sparse": (256, 512, 1024, 2048, 4096, 8192),
    "sparse-train": (2048, 8192),
    "soft-train": (2048,),
    "distance-train": (2048,),
}
# A GPU is idle in short ones.
_LENGTHS_CUDA = {
    "sparse": (1024, 2048, 4096, 8192, 16384, 32768),
    "sparse-train": (2048, 8192, 32768),
    "soft-train": (2048, 8192),
    "distance-train": (2048, 8192),
}
_MEMORY_LENGTH = 8192
# The reference holds several n x n tensors a head.
_REFERENCE_LENGTH = 2048
# Each length costs FlexAttention a compilation of some ten seconds: unasked, only these.
_FLEX_LENGTHS = (1024, 4096)
# How far a competitor may be off, relative to the largest entry, and still do the same task.
_SAME_TASK = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}

Call = Callable[[], tuple[Tensor, ...]]
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class AttentionBenchmarkSettings:
    """Which rows are measured and how; checks itself."""

    modes: tuple[str, ...] = ("sparse",)
    shapes: tuple[Shape, ...] = SHAPES
    lengths: tuple[int, ...] | None = None
    """Lengths that are timed; None: those of the mode."""
    memory_lengths: tuple[int, ...] | None = None
    """Lengths whose memory is measured; None: 8192, or the largest given one up to it."""
    competitors: tuple[str, ...] | None = None
    """Some of COMPETITORS; None: all that make sense on the device."""
    labels: str = "independent"
    """One of labels.DRAWN or a file."""
    seed: int = 0
    seconds: float = 10.0
    """About how long the competitors of a row are timed, all together."""
    config: MoSARConfig = field(default_factory=MoSARConfig)
    device: str = "cpu"
    dtype: str | None = None
    """Of q, k and v; None: float32 on the CPU, bfloat16 on a GPU."""

    def __post_init__(self) -> None:
        _check_names("device", (self.device,), DEVICES)
        _check_names("dtype", () if self.dtype is None else (self.dtype,), DTYPES, least=0)
        if self.device == "cpu" and self.dtype not in (None, "float32"):
            raise ValueError(f"on the CPU dtype must be float32, got {self.dtype!r}")
        _check_names("mode", self.modes, MODES)
        _check_names("competitor", self.chosen_competitors, self._known_competitors)
        if not self.shapes:
            raise ValueError("at least one shape is needed")
        for length in (*(self.lengths or (1,)), *(self.memory_lengths or (1,))):
            if length < 1:
                raise ValueError(f"lengths must be at least 1, got {length}")
        if self.labels not in DRAWN and not self.labels.endswith(".npz"):
            raise ValueError(f"labels must be one of {DRAWN} or FILE.npz, got {self.labels!r}")
        if not self.seconds > 0:
            raise ValueError(f"seconds must be more than 0, got {self.seconds}")

    @property
    def _known_competitors(self) -> tuple[str, ...]:
        # On the CPU torch's dense attention is its FlashAttention.
        return tuple(name for name in COMPETITORS if self.device != "cpu" or name != "flash")

    @property
    def chosen_competitors(self) -> tuple[str, ...]:
        if self.competitors is not None:
            return self.competitors
        return self._known_competitors

    def timed_lengths(self, mode: str) -> tuple[int, ...]:
        if self.lengths is not None:
            return self.lengths
        return (_LENGTHS if self.device == "cpu" else _LENGTHS_CUDA)[mode]

    def remembered_lengths(self) -> tuple[int, ...]:
        """The lengths whose memory is measured."""
        if self.memory_lengths is not None:
            return self.memory_lengths
        if self.lengths is None:
            return (_MEMORY_LENGTH,)
        return (max((n for n in self.lengths if n <= _MEMORY_LENGTH), default=0),)

    def cases(self) -> list[Case]:
        """One a row, shape by shape."""
        common = {"labels": self.labels, "seed": self.seed, "config": self.config}
        return [
            Case(mode=mode, shape=shape, length=length, **common)
            for mode in self.modes
            for shape in self.shapes
            for length in sorted({*self.timed_lengths(mode), *self.remembered_lengths()} - {0})
        ]


def run_attention_benchmark(
    settings: AttentionBenchmarkSettings, report: Report = lambda step: None
) -> Iterator[AttentionBenchmark]:
    """Measures row by row; `report` is told what is being done. Labels are checked at once."""
    device = open_device(settings.device, settings.dtype)
    cases = [replace(case, device=device.place, dtype=device.dtype) for case in settings.cases()]
    # A long run must not find out at its end that there are too few labels.
    sparse_lengths = [case.length for case in cases if case.is_sparse]
    if sparse_lengths:
        make_labels(settings.labels, max(sparse_lengths), settings.seed, settings.config)

    def rows() -> Iterator[AttentionBenchmark]:
        report("the speed of a large matrix product")
        peak = 0.0
        for case in cases:
            # Again at every row: whoever else used the machine at one moment must not set the peak.
            peak = max(peak, device.gemm_gflops())
            yield _measure(case, settings, device, peak, report)

    return rows()


def _measure(
    case: Case,
    settings: AttentionBenchmarkSettings,
    device: Device,
    peak: float,
    report: Report,
) -> AttentionBenchmark:
    row = f"{case.mode} {case.shape}, n = {case.length}"
    report(f"{row}: checking against float64")
    problem = build_problem(case)
    pairs, causal_pairs = _count_pairs(problem)
    record = AttentionBenchmark(
        mode=case.mode,
        **case.shape._asdict(),
        length=case.length,
        labels=Path(case.labels).name if case.is_sparse else "none",
        seed=case.seed,
        pairs=pairs,
        causal_pairs=causal_pairs,
        gemm_gflops=peak,
        checks=check_problem(problem),
        measurements={},
        plan=Measurement(),
        environment=environment() | device.describe(),
    )
    if not record.correct:
        return record
    if case.length in settings.timed_lengths(case.mode):
        record = _with_times(
            record, problem, settings, device, lambda step: report(f"{row}: {step}")
        )
    if case.length in settings.remembered_lengths():
        report(f"{row}: memory")
        record = _with_memory(record, case, settings, device)
    return record


def _with_times(
    record: AttentionBenchmark,
    problem: Problem,
    settings: AttentionBenchmarkSettings,
    device: Device,
    report: Report,
) -> AttentionBenchmark:
    calls: dict[str, Callable[[], object]] = {}
    measured: dict[str, Measurement] = {}
    for name in settings.chosen_competitors:
        obstacle = _obstacle(name, problem.case, asked=settings.competitors is not None)
        if obstacle is None:
            try:
                calls[name] = _prepare(name, problem, report)
            except (FlexUnavailable, FlashUnavailable) as error:
                obstacle = str(error)
        measured[name] = Measurement(unavailable=obstacle)
    report("timing " + ", ".join(calls))
    if "ours" in calls:
        calls["plan"] = _plan_call(problem)
    for call in calls.values():
        device.warm_up(call)
    times = interleave(calls, seconds=settings.seconds, time_calls=device.seconds) if calls else {}
    plan = Measurement(samples_ms=times.pop("plan", ()))
    measured |= {name: Measurement(samples_ms=samples) for name, samples in times.items()}
    return replace(record, measurements=measured, plan=plan)


def _obstacle(name: str, case: Case, *, asked: bool) -> str | None:
    """Why a competitor is left out before anything is tried."""
    if name == "reference" and case.length > _REFERENCE_LENGTH:
        return f"the reference holds n x n tensors; timed up to n = {_REFERENCE_LENGTH}"
    first, last = _FLEX_LENGTHS
    unasked = case.device == "cpu" and not asked
    if name.startswith("flex") and unasked and not first <= case.length <= last:
        return f"compiled for {first} to {last} tokens unless it is asked for by name"
    return None


def _prepare(name: str, problem: Problem, report: Report) -> Call:
    """The call of a competitor, which has run once and, where it should, given our result."""
    if name == "flash":
        return _prepare_flash(problem)
    if not name.startswith("flex"):
        return call_of(problem, name)
    report(f"compiling {name}")
    call = flex_call(problem, is_sorted=name == "flex-sorted")
    out = first_call(call)
    rows, exact = exact_rows(problem)
    error = float((out[:, :, rows].double() - exact).abs().max() / exact.abs().max())
    if not error <= _SAME_TASK[problem.case.dtype]:
        raise FlexUnavailable(f"compiled FlexAttention is wrong here, off by {error:.1e}")
    return call


def _prepare_flash(problem: Problem) -> Call:
    call = call_of(problem, "flash")
    try:
        call()
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise FlashUnavailable(f"FlashAttention does not take this: {reason}") from None
    return call


class FlashUnavailable(RuntimeError):
    """FlashAttention cannot serve here; the message says why."""


def _plan_call(problem: Problem) -> Callable[[], object]:
    """Making the plan that ours makes in each call."""
    from mosar.kernels.triton import obstacle

    case, labels = problem.case, _labels(problem)
    layout = resolve_layout(1, case.length, case.length, device=problem.q.device)
    if case.device != "cpu" and obstacle(problem.q) is None:
        from mosar.kernels.triton import plan

        if not case.is_sparse:
            return lambda: plan.dense_plan(layout)
        return lambda: plan.sparse_plan(*labels, case.config, layout)
    plan_of = _planner() if case.device == "cpu" else build_plan
    if not case.is_sparse:
        return lambda: plan_of(dense_plan_input(layout))
    return lambda: plan_of(sparse_plan_input(*labels, case.config, layout))


def _planner() -> Callable[[PlanInput], Plan]:
    """The native planner, or that of torch operators where there is no compiler."""
    from mosar.kernels import native

    try:
        native.load_operators()
    except (NativeBuildError, OSError):
        return build_plan
    return native.build_native_plan


def _with_memory(
    record: AttentionBenchmark, case: Case, settings: AttentionBenchmarkSettings, device: Device
) -> AttentionBenchmark:
    """With the peak memory of those whose memory is asked about: SDPA and ours."""
    measured = dict(record.measurements)
    for name in ("sdpa", "ours"):
        if name not in settings.chosen_competitors:
            continue
        before = measured.get(name, Measurement())
        try:
            measured[name] = replace(before, peak_bytes=device.measure_peak(case, name))
        except MemoryUnavailable as error:
            measured[name] = replace(before, unavailable=str(error))
    return replace(record, measurements=measured)


def _count_pairs(problem: Problem) -> tuple[int, int]:
    """Pairs that are evaluated, and all causal ones."""
    length = problem.case.length
    causal = length * (length + 1) // 2
    if not problem.case.is_sparse:
        return causal, causal
    domain = build_hard_domain(*_labels(problem), problem.case.config, materialize=False)
    return domain.count, domain.causal_count


def _labels(problem: Problem) -> tuple[Tensor, Tensor]:
    return problem.pi_q.argmax(dim=-1), problem.pi_k.argmax(dim=-1)


def _check_names(what: str, names: tuple[str, ...], known: tuple[str, ...], least: int = 1) -> None:
    if len(names) < least:
        raise ValueError(f"at least one {what} is needed, of {', '.join(known)}")
    for name in names:
        if name not in known:
            raise ValueError(f"{what} must be one of {', '.join(known)}, got {name!r}")
