"""What `mosar evaluate` does: evaluate, show, append the records to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from rich.console import Console

from mosar.evaluation.evaluate import evaluate
from mosar.evaluation.loaded_run import LoadedRun
from mosar.evaluation.store import EVALUATIONS
from mosar.evaluation.table import (
    bucket_table,
    layer_table,
    perplexity_table,
    retrieval_table,
    time_ratios,
)
from mosar.records import EvaluationRecord, RetrievalRecord, append_record

# Wide enough for every column.
_WIDTH = 150


def run_evaluate_command(
    run: Path,
    *,
    lengths: Sequence[str],
    routings: Sequence[str] | None,
    step: int | None,
    data: Path | None,
    tokens: int | None,
    against: Path | None,
    force: bool,
    details: bool,
    json: Path | None,
    progress: bool,
) -> None:
    """Evaluates and prints tables on stdout."""
    if json is not None and not json.absolute().parent.is_dir():
        raise ValueError(f"cannot write {json}: its folder does not exist")
    # A long evaluation must not end in something that could have been known.
    base = None if against is None else _comparable(run, against, step)
    records = evaluate(
        run,
        lengths=lengths,
        routings=routings,
        step=step,
        data=data,
        tokens=tokens,
        force=force,
        progress=progress,
    )
    console = Console()
    # A narrower terminal breaks the lines, which reads badly; leaving out figures would be worse.
    wide = Console(width=max(console.width, _WIDTH))
    if isinstance(records[0], RetrievalRecord):
        wide.print(retrieval_table(cast(list[RetrievalRecord], records)))
    else:
        texts = cast(list[EvaluationRecord], records)
        other = [] if base is None else _on_the_same_text(texts, base, step, data, progress)
        _show_perplexity(texts, other, wide, details=details)
        for line in time_ratios(texts):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    where = run / EVALUATIONS
    console.print(f"records in {where}", markup=False, highlight=False, soft_wrap=True)
    if json is not None:
        for record in records:
            append_record(json, record)


def _show_perplexity(
    records: list[EvaluationRecord],
    other: list[EvaluationRecord],
    console: Console,
    *,
    details: bool,
) -> None:
    console.print(perplexity_table(records, other))
    if details:
        for length in dict.fromkeys(record.length for record in records):
            rows = [record for record in records if record.length == length]
            console.print(bucket_table(rows))
            if rows[-1].layer_density:
                console.print(layer_table(rows[-1]))


def _comparable(run: Path, against: Path, step: int | None) -> LoadedRun:
    """The other run at the same step, once it is known that both learnt the same text."""
    ours, other = LoadedRun.open(run, step), LoadedRun.open(against, step)
    for loaded in (ours, other):
        if loaded.config.data.task != "text":
            raise ValueError(
                f"--against compares perplexities, and {loaded.run} learnt the task "
                f"{loaded.config.data.task}"
            )
    if ours.data_fingerprint != other.data_fingerprint:
        raise ValueError(f"--against {against} was trained on other data than {run}")
    return other


def _on_the_same_text(
    records: list[EvaluationRecord],
    other: LoadedRun,
    step: int | None,
    data: Path | None,
    progress: bool,
) -> list[EvaluationRecord]:
    """The other run at the lengths of the records, native or soft."""
    found = evaluate(
        other.run,
        lengths=sorted({record.length for record in records}),
        routings=other.geometry.routings[:1],
        step=step,
        data=data,
        tokens=records[0].tokens,
        progress=progress,
    )
    return cast(list[EvaluationRecord], found)
