"""What every benchmark is: competitors compared on a list of cases, one record for each case.

Per case: build the competitors, check ours against an exact result, and only where it is right
time all of them interleaved and measure memory. A benchmark says which cases and competitors there
are and which columns its table has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import ClassVar, Generic, TypeVar

from mosar.bench.labels import DRAWN, make_labels
from mosar.bench.problem import Case, Shape
from mosar.bench.table import Column, Verdict
from mosar.core.config import MoSARConfig
from mosar.records import Benchmark, Measurement

C = TypeVar("C")
R = TypeVar("R", bound=Benchmark)
T = TypeVar("T")
Report = Callable[[str], None]
"""Is told what is being done."""


class Unavailable(RuntimeError):
    """A competitor or a figure cannot be had here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Comparison(ABC, Generic[C, R]):
    """Which rows are measured and how; checks itself."""

    lengths: tuple[int, ...] | None
    """Tokens; None: those that the benchmark chooses."""
    seconds: float
    """About how long the competitors of a row are timed, all together."""
    min_length: ClassVar[int] = 1
    title: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_lengths(self.lengths, self.min_length)
        if not self.seconds > 0:
            raise ValueError(f"seconds must be more than 0, got {self.seconds}")

    @abstractmethod
    def cases(self) -> list[C]:
        """One for each row."""

    @abstractmethod
    def measure(self, case: C, report: Report) -> R:
        """The row of a case; without times where a result is wrong."""

    @abstractmethod
    def columns(self, records: Sequence[R]) -> list[Column]:
        """The columns before the last one, which shows the verdicts."""

    @abstractmethod
    def judge(self, record: R) -> list[Verdict]:
        """The targets that apply to a right result and have a figure."""

    @abstractmethod
    def notes(self, records: Sequence[R]) -> str:
        """How the figures were taken, in a few sentences below the tables."""

    def title_of(self, record: R) -> str:
        """Of the table that the record is a row of."""
        return self.title

    def verdicts(self, record: R) -> list[Verdict]:
        return self.judge(record) if record.correct else []

    def prepare(self) -> None:
        """Finds out at once what would fail at the end of a long run."""

    def run(self, report: Report = lambda step: None) -> Iterator[R]:
        """Measures row by row."""
        self.prepare()
        return (
            self.measure(case, lambda step, case=case: report(f"{case}: {step}"))
            for case in self.cases()
        )


@dataclass(frozen=True, kw_only=True)
class RoutedComparison(Comparison[Case, R]):
    """A comparison whose cases have regimes."""

    labels: str = "independent"
    """One of labels.DRAWN or a file."""
    seed: int = 0
    config: MoSARConfig = field(default_factory=MoSARConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.labels.endswith(".npz"):
            check_names("labels", (self.labels,), (*DRAWN, "FILE.npz"))

    def prepare(self) -> None:
        lengths = [case.length for case in self.cases() if case.is_sparse]
        if lengths:
            make_labels(self.labels, max(lengths), self.seed, self.config)

    def draw_cases(
        self, shapes: Iterable[Shape], lengths: Iterable[int], mode: str = "sparse"
    ) -> list[Case]:
        """Shape by shape."""
        drawn = {"labels": self.labels, "seed": self.seed, "config": self.config}
        return [
            Case(mode=mode, shape=shape, length=length, **drawn)
            for shape, length in product(shapes, lengths)
        ]


def check_lengths(lengths: Sequence[int] | None, least: int = 1) -> None:
    for length in lengths or ():
        if length < least:
            raise ValueError(f"lengths must be at least {least}, got {length}")


def check_names(what: str, names: Sequence[object], known: Iterable[str]) -> None:
    """At least one name, and each a known one."""
    known = list(known)
    if not names:
        raise ValueError(f"at least one {what} is needed, of {', '.join(known)}")
    for name in names:
        if name not in known:
            raise ValueError(f"{what} must be one of {', '.join(known)}, got {name!r}")


def build_competitors(
    names: Iterable[str], build: Callable[[str], T]
) -> tuple[dict[str, T], dict[str, Measurement]]:
    """Who can run here; and of everybody else, why not."""
    built, missing = {}, {}
    for name in names:
        try:
            built[name] = build(name)
        except Unavailable as error:
            missing[name] = Measurement(unavailable=str(error))
    return built, missing


def with_times(record: R, samples_ms: Mapping[str, tuple[float, ...]]) -> R:
    timed = {name: Measurement(samples_ms=samples) for name, samples in samples_ms.items()}
    return replace(record, measurements=record.measurements | timed)


def with_memory(record: R, names: Iterable[str], measure_peak: Callable[[str], int]) -> R:
    """With the peak memory of some competitors, or why it is not known."""
    measured = dict(record.measurements)
    for name in names:
        before = measured.get(name, Measurement())
        try:
            measured[name] = replace(before, peak_bytes=measure_peak(name))
        except Unavailable as error:
            measured[name] = replace(before, unavailable=str(error))
    return replace(record, measurements=measured)
