"""Evaluates a run folder: its checkpoint at several lengths under several routings.

A run that learnt text is asked for perplexity, one that learnt a task for accuracy. What is already
in the run folder, from the same parameters and the same data, is not computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mosar.errors import ModelError
from mosar.evaluation.choices import check_modes, check_routings, parse_lengths
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
    modes: Sequence[str] = (),
    step: int | None = None,
    data: Path | str | None = None,
    tokens: int | None = None,
    progress: bool = True,
    force: bool = False,
    cell: Cell | None = None,
) -> list[EvaluationRecord] | list[RetrievalRecord]:
    """The records of a run, by length, then routing; each is also written to RUN/evaluations.

    lengths: "2x" of the training length, or tokens. routings: some of "soft", "top1", "sparse", or
    "native" for variants without routers; by default all there are. modes: ways to execute it that
    it was not trained with; they come in place of the default routings. step: a checkpoint, by
    default the newest. data: where the data of the run lies now. tokens: how many are predicted at
    each length, less where the split is shorter. force: compute what is there again. cell: what the
    records say they belong to. A ModelError or DataError says what is wrong with the run or
    its data, a ValueError what is wrong with the arguments.
    """
    run = Path(run)
    loaded = LoadedRun.open(run, step)
    sizes = parse_lengths(lengths, loaded.train_length)
    cell = loaded.cell if cell is None else cell
    chosen = check_modes(modes, loaded.geometry, cell.variant)
    if routings is not None or not chosen:
        chosen = check_routings(routings, loaded.geometry, cell.variant) + chosen
    inputs: dict[str, Any] = {"checkpoint": loaded.checksum, "data": loaded.data_fingerprint}
    if loaded.config.data.task == "text":
        folder = None if data is None else Path(data)
        source = ValidationText(loaded, sizes, data=folder, tokens=tokens)
        inputs["block"] = source.block
        measure: Any = evaluate_length
    else:
        _check_task(loaded, data)
        source, measure = Questions(loaded, sizes, tokens), evaluate_retrieval
    fields = {"cell": cell, "step": loaded.step, "train_length": loaded.train_length}
    with _writing(run):
        # A folder that cannot be written to must fail before anything is computed.
        (run / EVALUATIONS).mkdir(exist_ok=True)
    records: list[Any] = []
    for length in sizes:
        found = [] if force else _stored(loaded, length, chosen, source, inputs)
        if not found:
            label = f"{run.name}: step {loaded.step}, length {length}, {', '.join(chosen)}"
            with length_progress(label, source.passes(length), enabled=progress) as advance:
                found = measure(loaded, source, length, chosen, advance, inputs=inputs, **fields)
            with _writing(run):
                for record in found:
                    write_evaluation(run, record)
        records += [replace(record, cell=cell) for record in found]
    return records


def _check_task(loaded: LoadedRun, data: Path | str | None) -> None:
    task = loaded.config.data.task
    if data is not None:
        raise ValueError(f"{loaded.run} learnt the task {task}, which needs no data")
    if task_fingerprint(loaded.config) != loaded.data_fingerprint:
        raise ModelError(
            f"{loaded.run} learnt {task} with another version of mosar; train it again"
        )


def _stored(
    loaded: LoadedRun,
    length: int,
    routings: Sequence[str],
    source: ValidationText | Questions,
    inputs: dict[str, Any],
) -> list[Evaluation]:
    """Stored records of a length: all routings or none, since they are timed in turn."""
    found = [read_evaluation(loaded.run, loaded.step, length, routing, say) for routing in routings]
    same = [r for r in found if r and r.inputs == inputs and source.is_measured_by(r)]
    return same if len(same) == len(routings) else []


@contextmanager
def _writing(run: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(f"cannot write {error.filename or run}: {error.strerror}") from None
