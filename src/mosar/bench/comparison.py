"""A benchmark: competitors compared on a list of cases, with one record per case.

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

from mosar.bench.labels import check_source, make_labels
from mosar.bench.problem import Case, Shape
from mosar.bench.table import Column, Verdict
from mosar.core.config import MoSARConfig
from mosar.records import Benchmark, Measurement

C = TypeVar("C")
R = TypeVar("R", bound=Benchmark)
T = TypeVar("T")
Report = Callable[[str], None]
"""Called with a description of the current step."""


class Unavailable(RuntimeError):
    """A competitor or a figure is not available here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Comparison(ABC, Generic[C, R]):
    """Which rows are measured, and how."""

    lengths: tuple[int, ...] | None
    """Numbers of tokens; None: the benchmark's default."""
    seconds: float
    """About how many seconds the competitors of a row are timed, in total."""
    min_length: ClassVar[int] = 1
    title: ClassVar[str] = ""

    def __post_init__(self) -> None:
        self.check_lengths(self.lengths)
        if not self.seconds > 0:
            raise ValueError(f"seconds must be more than 0, got {self.seconds}")

    def check_lengths(self, lengths: Sequence[int] | None) -> None:
        for length in lengths or ():
            if length < self.min_length:
                raise ValueError(f"lengths must be at least {self.min_length}, got {length}")

    @abstractmethod
    def cases(self) -> list[C]:
        """The cases, one per row."""

    @abstractmethod
    def measure(self, case: C, report: Report) -> R:
        """The record of a case; without times if a result is wrong."""

    @abstractmethod
    def columns(self, records: Sequence[R]) -> list[Column]:
        """The columns, without the last one, which shows the verdicts."""

    @abstractmethod
    def judge(self, record: R) -> list[Verdict]:
        """The targets for a correct result."""

    @abstractmethod
    def notes(self, records: Sequence[R]) -> str:
        """How the figures were measured, shown below the tables."""

    def title_of(self, record: R) -> str:
        """The title of the table with this record."""
        return self.title

    def verdicts(self, record: R) -> list[Verdict]:
        return self.judge(record) if record.correct else []

    def run(self, report: Report = lambda step: None) -> Iterator[R]:
        """Measures row by row, after checks for what would fail later."""
        return (
            self.measure(case, lambda step, case=case: report(f"{case}: {step}"))
            for case in self.cases()
        )

    def build(
        self, names: Iterable[str], build: Callable[[str], T]
    ) -> tuple[dict[str, T], dict[str, Measurement]]:
        """The competitors that can run here, and why the others cannot."""
        built, missing = {}, {}
        for name in names:
            try:
                built[name] = build(name)
            except Unavailable as error:
                missing[name] = Measurement(unavailable=str(error))
        return built, missing

    def with_times(self, record: R, samples_ms: Mapping[str, tuple[float, ...]]) -> R:
        timed = {name: Measurement(samples_ms=samples) for name, samples in samples_ms.items()}
        return replace(record, measurements=record.measurements | timed)

    def with_memory(self, record: R, names: Iterable[str], peak_of: Callable[[str], int]) -> R:
        """Adds the peak memory of some competitors, or why it is not known."""
        peaks, missing = self.build(names, peak_of)
        measured = dict(record.measurements)
        for name in (*peaks, *missing):
            found = missing.get(name) or Measurement(peak_bytes=peaks[name])
            samples_ms = record.measurements.get(name, found).samples_ms
            measured[name] = replace(found, samples_ms=samples_ms)
        return replace(record, measurements=measured)


@dataclass(frozen=True, kw_only=True)
class RoutedComparison(Comparison[Case, R]):
    """A comparison whose cases have regimes."""

    labels: str = "independent"
    """One of labels.DRAWN or a file."""
    seed: int = 0
    config: MoSARConfig = field(default_factory=MoSARConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_source(self.labels)

    def run(self, report: Report = lambda step: None) -> Iterator[R]:
        # Check at the start that there are enough labels.
        for length in sorted(case.length for case in self.cases() if case.is_sparse)[-1:]:
            make_labels(self.labels, length, self.seed, self.config)
        return super().run(report)

    def draw_cases(
        self, shapes: Iterable[Shape], lengths: Iterable[int], mode: str = "sparse"
    ) -> list[Case]:
        """Shape by shape."""
        drawn = {"labels": self.labels, "seed": self.seed, "config": self.config}
        return [
            Case(mode=mode, shape=shape, length=length, **drawn)
            for shape, length in product(shapes, lengths)
        ]


def check_names(what: str, names: Sequence[object], known: Iterable[str]) -> None:
    """A ValueError unless there is at least one name and all are known."""
    known = list(known)
    if not names:
        raise ValueError(f"at least one {what} is needed, of {', '.join(known)}")
    for name in names:
        if name not in known:
            raise ValueError(f"{what} must be one of {', '.join(known)}, got {name!r}")
