"""Evaluates a run folder: its checkpoint at several lengths under several routings.

A run that learnt text is asked for perplexity, one that learnt a task for accuracy. What is already
in the run folder, from the same parameters and the same data, is not computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mosar.errors import ModelError
from mosar.evaluation.choices import check_routings, parse_lengths
from mosar.evaluation.loaded_run import LoadedRun
from mosar.evaluation.perplexity import evaluate_length
from mosar.evaluation.progress import length_progress, say
from mosar.evaluation.retrieval import Questions, evaluate_retrieval
from mosar.evaluation.store import EVALUATIONS, Evaluation, read_evaluation, write_evaluation
from mosar.evaluation.validation_text import ValidationText
from mosar.records import Cell, EvaluationRecord, RetrievalRecord
from mosar.training.batches import task_fingerprint

LENGTHS = ("1x", "2x", "4x")


def evaluate(
    run: Path | str,
    *,
    lengths: Sequence[str | int] = LENGTHS,
    routings: Sequence[str] | None = None,
    step: int | None = None,
    data: Path | str | None = None,
    tokens: int | None = None,
    progress: bool = True,
    force: bool = False,
    cell: Cell | None = None,
) -> list[EvaluationRecord] | list[RetrievalRecord]:
    """The records of a run, by length, then routing; each is also written to RUN/evaluations.

    lengths: "2x" of the training length, or tokens. routings: some of "soft", "top1", "sparse", or
    "native" for variants without routers; by default all there are. step: a checkpoint, by default
    the newest. data: where the data of the run lies now. tokens: how many are predicted at each
    length, less where the split is shorter. force: compute what is there again. cell: what the
    records say they belong to. A ModelError or DataError says what is wrong with the run or
    its data, a ValueError what is wrong with the arguments.
    """
    run = Path(run)
    loaded = LoadedRun.open(run, step)
    sizes = parse_lengths(lengths, loaded.train_length)
    cell = loaded.cell if cell is None else cell
    chosen = check_routings(routings, loaded.geometry, cell.variant)
    inputs: dict[str, Any] = {"checkpoint": loaded.checksum}
    if loaded.config.data.task == "text":
        source = ValidationText(loaded, sizes, data=_path(data), tokens=tokens)
        inputs |= {"data": loaded.data_fingerprint, "block": source.block}
        measure = evaluate_length
    else:
        if data is not None:
            raise ValueError(f"{run} learnt the task {loaded.config.data.task}, which has no data")
        if task_fingerprint(loaded.config) != loaded.data_fingerprint:
            raise ModelError(
                f"{run} learnt {loaded.config.data.task} as another version of mosar makes it; "
                "train it again"
            )
        source = Questions(loaded, sizes, tokens)
        inputs |= {"data": loaded.data_fingerprint}
        measure = evaluate_retrieval
    _make_folder(run)
    records: list[Any] = []
    for length in sizes:
        found = [] if force else _stored(loaded, length, chosen, source, inputs)
        if not found:
            label = f"{run.name}: step {loaded.step}, length {length}, {', '.join(chosen)}"
            passes = source.passes(length)
            with length_progress(label, passes, enabled=progress) as advance:
                found = measure(
                    loaded,
                    source,  # pyright: ignore[reportArgumentType]
                    length,
                    chosen,
                    cell=cell,
                    inputs=inputs,
                    advance=advance,
                )
            for record in found:
                _write(run, record)
        records += [replace(record, cell=cell) for record in found]
    return records


def _path(data: Path | str | None) -> Path | None:
    return None if data is None else Path(data)


def _stored(
    loaded: LoadedRun,
    length: int,
    routings: Sequence[str],
    source: ValidationText | Questions,
    inputs: dict[str, Any],
) -> list[Evaluation]:
    """What is there of a length; all routings or none, their times being taken in turn."""
    found = [read_evaluation(loaded.run, loaded.step, length, routing, say) for routing in routings]
    same = [record for record in found if record is not None and _same(record, source, inputs)]
    return same if len(same) == len(routings) else []


def _same(record: Evaluation, source: ValidationText | Questions, inputs: dict[str, Any]) -> bool:
    if isinstance(source, ValidationText):
        as_many = isinstance(record, EvaluationRecord) and record.tokens == source.tokens
    else:
        asked = source.windows(record.length) * source.task.answers
        as_many = isinstance(record, RetrievalRecord) and record.answers == asked
    return as_many and record.inputs == inputs


def _make_folder(run: Path) -> None:
    """Before anything is computed: a folder that cannot be written to should say so now."""
    try:
        (run / EVALUATIONS).mkdir(exist_ok=True)
    except OSError as error:
        raise ModelError(f"cannot write {run / EVALUATIONS}: {error.strerror}") from None


def _write(run: Path, record: Evaluation) -> None:
    try:
        write_evaluation(run, record)
    except OSError as error:
        raise ModelError(f"cannot write {error.filename or run}: {error.strerror}") from None
