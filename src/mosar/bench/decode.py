"""One step of decoding, its attention alone: `mosar bench decode`.

Per row: draw a text, check ours against float64, time whole passes of some steps, interleaved.

    sdpa   the new key and value go into a dense cache that was made large enough before, and
           torch's attention reads it whole, in the quickest form that is legal
    ours   the regime cache under sparse routing: update, then attend

A step is timed with all it does: appending, evicting, growing, finding the slices, attending.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mosar.attention import mosar_attention
from mosar.bench.cases import Shape
from mosar.bench.correctness import error_check
from mosar.bench.labels import DRAWN, make_labels
from mosar.core.config import MoSARConfig
from mosar.core.hard_domain import build_hard_domain
from mosar.model.regime_cache import RegimeLayerCache
from mosar.records import DecodeBenchmark, ErrorCheck, Measurement

SHAPES = (Shape(9, 3, 64), Shape(8, 1, 256))
LENGTHS = (2048, 4096, 8192, 16384)
# Steps that are timed in one go; enough that every regime has its share of the queries.
STEPS = 128
_MIN_ROUNDS, _MAX_ROUNDS = 5, 30
_CHECKED_STEPS = 24
_TRIAL_STEPS = 8

Report = Callable[[str], None]
Pass = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class DecodeBenchmarkSettings:
    """Which rows are measured and how; checks itself."""

    shapes: tuple[Shape, ...] = SHAPES
    lengths: tuple[int, ...] = LENGTHS
    """Tokens of context of the last step."""
    labels: str = "independent"
    """One of labels.DRAWN or a file."""
    seed: int = 0
    seconds: float = 5.0
    """About how long a row is timed."""
    config: MoSARConfig = field(default_factory=MoSARConfig)

    def __post_init__(self) -> None:
        if not self.shapes or not self.lengths:
            raise ValueError("at least one shape and one length are needed")
        for length in self.lengths:
            if length < 2:
                raise ValueError(f"lengths must be at least 2, got {length}")
        if self.labels not in DRAWN and not self.labels.endswith(".npz"):
            raise ValueError(f"labels must be one of {DRAWN} or FILE.npz, got {self.labels!r}")
        if not self.seconds > 0:
            raise ValueError(f"seconds must be more than 0, got {self.seconds}")

    def cases(self) -> list[DecodeCase]:
        """One a row, shape by shape."""
        common = {"labels": self.labels, "seed": self.seed, "config": self.config}
        return [
            DecodeCase(shape=shape, length=length, **common)
            for shape in self.shapes
            for length in self.lengths
        ]


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """One row of the benchmark."""

    shape: Shape
    length: int
    labels: str = "independent"
    seed: int = 0
    config: MoSARConfig = field(default_factory=MoSARConfig)

    @property
    def steps(self) -> int:
        return min(STEPS, self.length // 2)

    @property
    def start(self) -> int:
        """Tokens that are there before the first step."""
        return self.length - self.steps


@dataclass(frozen=True)
class DecodeProblem:
    """A text as its layer sees it; the last `case.steps` tokens are decoded."""

    case: DecodeCase
    q: Tensor
    """[1, Hq, steps, D]."""
    k: Tensor
    """[1, Hkv, length, D]."""
    v: Tensor
    labels_q: Tensor
    """[1, steps]."""
    labels_k: Tensor
    """[1, length]."""


def build_problem(case: DecodeCase) -> DecodeProblem:
    generator = torch.Generator().manual_seed(case.seed)
    shape = case.shape

    def normal(heads: int, length: int) -> Tensor:
        return torch.randn(1, heads, length, shape.head_dim, generator=generator)

    labels_q, labels_k = make_labels(case.labels, case.length, case.seed, case.config)
    return DecodeProblem(
        case,
        normal(shape.heads, case.steps),
        normal(shape.kv_heads, case.length),
        normal(shape.kv_heads, case.length),
        labels_q[None, case.start :],
        labels_k[None],
    )


def run_decode_benchmark(
    settings: DecodeBenchmarkSettings, report: Report = lambda step: None
) -> Iterator[DecodeBenchmark]:
    """Measures row by row; `report` is told what is being done."""
    for case in settings.cases():
        yield _measure(case, settings, report)


@torch.inference_mode()
def _measure(
    case: DecodeCase, settings: DecodeBenchmarkSettings, report: Report
) -> DecodeBenchmark:
    row = f"{case.shape}, n = {case.length}"
    report(f"{row}: checking")
    problem = build_problem(case)
    ours = OurSteps(problem)
    check = check_steps(problem)
    ours()
    dense_bytes = 2 * problem.k.nbytes
    record = DecodeBenchmark(
        heads=case.shape.heads,
        kv_heads=case.shape.kv_heads,
        head_dim=case.shape.head_dim,
        length=case.length,
        steps=case.steps,
        labels=case.labels.rpartition("/")[2],
        seed=case.seed,
        keys_read=_keys_read(problem),
        allocated_bytes=ours.cache.allocated_bytes,
        used_bytes=ours.cache.used_bytes,
        dense_bytes=dense_bytes,
        dense_form="none",
        checks={"out": check},
        measurements={},
    )
    if not record.correct:
        return record
    report(f"{row}: timing")
    form = quickest_form(problem)
    samples = interleave_passes(
        {"sdpa": DenseSteps(problem, form), "ours": ours}, case.steps, seconds=settings.seconds
    )
    measured = {name: Measurement(samples_ms=times) for name, times in samples.items()}
    return replace(record, dense_form=form, measurements=measured)


class OurSteps:
    """All steps through a cache that was filled before; a call gives their seconds."""

    def __init__(self, problem: DecodeProblem):
        self.problem = problem
        self.cache = RegimeLayerCache(problem.case.config)

    def fill(self) -> None:
        """A new cache with the tokens before the first step, as a prefill leaves it."""
        problem, start = self.problem, self.problem.case.start
        self.cache = RegimeLayerCache(problem.case.config)
        k, v = (x[:, :, :start] for x in (problem.k, problem.v))
        self.cache.update(k, v, problem.labels_k[:, :start])
        self.cache.settle()

    def tokens(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
        """q, k, v and labels of each step, cut before anything is timed."""
        problem, start = self.problem, self.problem.case.start
        return [
            (
                problem.q[:, :, i : i + 1].contiguous(),
                problem.k[:, :, start + i : start + i + 1].contiguous(),
                problem.v[:, :, start + i : start + i + 1].contiguous(),
                problem.labels_q[:, i : i + 1],
                problem.labels_k[:, start + i : start + i + 1],
            )
            for i in range(problem.case.steps)
        ]

    def step(self, q: Tensor, k: Tensor, v: Tensor, label_q: Tensor, label_k: Tensor) -> Tensor:
        self.cache.update(k, v, label_k)
        return self.cache.attend(q, label_q)

    def __call__(self) -> float:
        self.fill()
        tokens = self.tokens()
        begin = time.perf_counter()
        for token in tokens:
            self.step(*token)
        return time.perf_counter() - begin


class DenseSteps:
    """The same with a dense cache of the full length and torch's attention, in one of its forms.

    grouped: the query heads of a key head as so many queries of it, which all read every key.
    gqa: `enable_gqa`. expanded: the cache holds keys and values once per query head.
    """

    FORMS = ("grouped", "gqa", "expanded")

    def __init__(self, problem: DecodeProblem, form: str, steps: int | None = None):
        self.problem, self.form = problem, form
        case = problem.case
        self.steps = case.steps if steps is None else steps
        self.share = case.shape.heads // case.shape.kv_heads
        repeats = self.share if form == "expanded" else 1
        self.k, self.v = (x.repeat_interleave(repeats, dim=1) for x in (problem.k, problem.v))

    def step(self, q: Tensor, k: Tensor, v: Tensor, at: int) -> Tensor:
        self.k[:, :, at : at + 1] = k
        self.v[:, :, at : at + 1] = v
        keys, values = self.k[:, :, : at + 1], self.v[:, :, : at + 1]
        if self.form == "grouped":
            grouped = q.view(1, keys.shape[1], self.share, q.shape[3])
            return F.scaled_dot_product_attention(grouped, keys, values).view(q.shape)
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=self.form == "gqa")

    def outputs(self) -> Tensor:
        """[1, Hq, steps, D]."""
        return torch.cat([self.step(*token) for token in self._tokens()], dim=2)

    def _tokens(self) -> list[tuple[Tensor, Tensor, Tensor, int]]:
        problem, start = self.problem, self.problem.case.start
        repeats = self.share if self.form == "expanded" else 1
        k, v = (x[:, :, start:].repeat_interleave(repeats, 1) for x in (problem.k, problem.v))
        return [
            (
                problem.q[:, :, i : i + 1].contiguous(),
                k[:, :, i : i + 1].contiguous(),
                v[:, :, i : i + 1].contiguous(),
                start + i,
            )
            for i in range(self.steps)
        ]

    def __call__(self) -> float:
        tokens = self._tokens()
        begin = time.perf_counter()
        for token in tokens:
            self.step(*token)
        return time.perf_counter() - begin


def quickest_form(problem: DecodeProblem) -> str:
    """The form of torch's attention that a few steps find the quickest here."""
    steps = min(_TRIAL_STEPS, problem.case.steps)
    seconds = {}
    for form in DenseSteps.FORMS:
        trial = DenseSteps(problem, form, steps)
        trial()
        seconds[form] = min(trial() for _ in range(3))
    return min(seconds, key=seconds.__getitem__)


def interleave_passes(
    passes: Mapping[str, Pass], steps: int, *, seconds: float
) -> dict[str, tuple[float, ...]]:
    """Milliseconds a step of each competitor, one pass a round, every other round backwards.

    A pass prepares itself untimed and gives the seconds of its steps. The first one warms up and
    says how many rounds there are: at least 5, at most 30.
    """
    estimate = 0.0
    for one in passes.values():
        begin = time.perf_counter()
        one()
        estimate += time.perf_counter() - begin
    rounds = min(_MAX_ROUNDS, max(_MIN_ROUNDS, int(seconds / estimate)))
    samples: dict[str, list[float]] = {name: [] for name in passes}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for index in range(rounds):
            for name in list(passes) if index % 2 == 0 else reversed(list(passes)):
                samples[name].append(1e3 * passes[name]() / steps)
    finally:
        if collecting:
            gc.enable()
    return {name: tuple(times) for name, times in samples.items()}


def check_steps(problem: DecodeProblem) -> ErrorCheck:
    """Outputs of some steps, the last among them, against the float64 definition."""
    case, ours = problem.case, OurSteps(problem)
    ours.fill()
    outputs = torch.cat([ours.step(*token) for token in ours.tokens()], dim=2)
    generator = torch.Generator().manual_seed(case.seed)
    chosen = torch.randperm(case.steps - 1, generator=generator)[: _CHECKED_STEPS - 1]
    chosen = torch.cat([chosen.sort().values, torch.tensor([case.steps - 1])])

    def dense(dtype: torch.dtype) -> Tensor:
        regimes = case.config.num_regimes
        out = mosar_attention(
            problem.q[:, :, chosen].to(dtype),
            problem.k.to(dtype),
            problem.v.to(dtype),
            F.one_hot(problem.labels_q[:, chosen], regimes).to(dtype),
            F.one_hot(problem.labels_k, regimes).to(dtype),
            case.config,
            routing="sparse",
            query_positions=case.start + chosen[None],
            impl="reference",
        )
        assert isinstance(out, Tensor)
        return out

    return error_check(outputs[:, :, chosen], dense(torch.float32), dense(torch.float64))


def _keys_read(problem: DecodeProblem) -> float:
    """How many keys a step reads on average: those of the support."""
    case = problem.case
    domain = build_hard_domain(
        problem.labels_q,
        problem.labels_k,
        case.config,
        query_positions=torch.arange(case.start, case.length)[None],
        materialize=False,
    )
    return domain.count / case.steps
