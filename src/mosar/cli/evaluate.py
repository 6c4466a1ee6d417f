"""`mosar evaluate`: evaluates a run of `mosar train` or a retrofitted model."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Argument, Option

from mosar.cli.app import command
from mosar.cli.options import (
    Lengths,
    PredictedTokens,
    Progress,
    Step,
    Threads,
    check_folder_of,
    check_run,
    listed,
    numbers,
    use_threads,
)

if TYPE_CHECKING:
    from rich.console import Console

    from mosar.evaluation.loaded_run import LoadedRun
    from mosar.records import EvaluationRecord, Record, RetrievalRecord


@command("evaluate", stopped="stopped; what was finished is in the run folder")
def evaluate(
    run: Annotated[
        Path,
        Argument(help="A run folder made by mosar train or mosar retrofit.", show_default=False),
    ],
    lengths: Lengths = "1x,2x,4x",
    routing: Annotated[
        str | None,
        Option(
            help="One or more of soft, top1, sparse. Variants without routers have only native, "
            "retrofitted models also have dense. By default all."
        ),
    ] = None,
    mode: Annotated[
        str | None,
        Option(
            help="Other ways to run the trained model. For rope: pi, ntk, yarn, dynamic-ntk, "
            "streaming, minference, flexprefill; for xpos: lex; for fox: acp."
        ),
    ] = None,
    step: Step = None,
    data: Annotated[
        Path | None,
        Option(
            help="New path of the run's dataset, if it was moved. Retrofitted models: other text "
            "to evaluate on; sources as for mosar prepare."
        ),
    ] = None,
    tokens: PredictedTokens = None,
    against: Annotated[
        Path | None,
        Option(help="Also show the difference from this other run (at the same --step, if given)."),
    ] = None,
    details: Annotated[
        bool, Option("--details", help="Also show results by position and layer.")
    ] = False,
    force: Annotated[
        bool, Option("--force", help="Recompute results that already exist in the run folder.")
    ] = False,
    documents: Annotated[
        int | None,
        Option(
            min=1,
            help="Retrofitted models: read the beginning of this many long documents.",
        ),
    ] = None,
    skip_documents: Annotated[
        int | None,
        Option(
            min=1,
            help="Retrofitted models: leave out the first long documents, for example those on "
            "which you chose between runs.",
        ),
    ] = None,
    baseline_windows: Annotated[
        str | None,
        Option(
            metavar="REACHES",
            help="Retrofitted models: fixed windows to compare with, like 128,512.",
        ),
    ] = None,
    timing: Annotated[
        int | None,
        Option(
            min=0,
            metavar="ROUNDS",
            help="Retrofitted models: rounds of timing, 0 for no timing; by default 3.",
        ),
    ] = None,
    speed_lengths: Annotated[
        str | None,
        Option(
            metavar="LENGTHS",
            help="Retrofitted models: more prompt lengths to time, like 16384; can exceed the "
            "context.",
        ),
    ] = None,
    speed_batch: Annotated[
        str | None,
        Option(
            metavar="PROMPTS",
            help="Retrofitted models: numbers of prompts to time side by side, like 1,4; by "
            "default 1.",
        ),
    ] = None,
    speed_dtype: Annotated[
        str | None,
        Option(
            help="Retrofitted models: weights to time, float32 (the default), bfloat16, or auto: "
            "bfloat16 if this CPU has instructions for it."
        ),
    ] = None,
    needles: Annotated[
        int | None,
        Option(
            min=1,
            metavar="TEXTS",
            help="Retrofitted models: also run needle tasks, with this many texts per task and "
            "length.",
        ),
    ] = None,
    needle_tasks: Annotated[
        str | None,
        Option(
            metavar="TASKS",
            help="Some of single, multi-key, multi-value, tracking, common words; by default all.",
        ),
    ] = None,
    json: Annotated[Path | None, Option(help="Append the records to this file.")] = None,
    threads: Threads = None,
    progress: Progress = True,
) -> None:
    """Evaluate a run: perplexity by length and routing, reach, density, discarded mass.

    The same validation text is predicted at every length. If the run was trained on a task
    (data.task), the command measures accuracy by distance instead of perplexity. It saves its
    records in RUN/evaluations. If the run is a retrofit, the command compares it with the base
    model, also in speed and cache size, and writes RUN/report.md.

    Example: mosar evaluate runs/mosar

    Example: mosar evaluate runs/mosar --lengths 1x,8x --routing top1,sparse --details

    Example: mosar evaluate runs/mosar --against runs/rope

    Example: mosar evaluate runs/rope --mode yarn,streaming,flexprefill

    Example: mosar evaluate runs/smollm2 --lengths 2048,8192 --baseline-windows 128,512,1088
    """
    for folder in (run,) if against is None else (run, against):
        check_run(folder, "mosar train or retrofit")
    check_folder_of(json)
    from mosar.integrations.retrofit.entry import is_retrofitted
    from mosar.records import append_record

    use_threads(threads)
    asked: dict[str, Any] = {
        "lengths": listed(lengths),
        "routings": None if routing is None else listed(routing),
        "modes": () if mode is None else listed(mode),
        "data": data,
        "tokens": tokens,
        "force": force,
        "progress": progress,
    }
    of_runs = {"--step": step, "--against": against, "--details": details or None}
    of_retrofits = {"--documents": documents, "--baseline-windows": baseline_windows}
    of_retrofits |= {
        "--skip-documents": skip_documents,
        "--needle-tasks": needle_tasks,
        "--timing": timing,
        "--needles": needles,
        "--speed-lengths": speed_lengths,
        "--speed-batch": speed_batch,
        "--speed-dtype": speed_dtype,
    }
    if is_retrofitted(run):
        _refuse(of_runs | {"--mode": mode}, "is for runs of mosar train, and this was retrofitted")
        del asked["modes"]
        asked |= {"documents": documents, "skip_documents": skip_documents or 0}
        asked |= {"needles": needles or 0}
        if needle_tasks is not None:
            if needles is None:
                raise ValueError(f"--needle-tasks {needle_tasks} needs --needles")
            asked["needle_tasks"] = listed(needle_tasks)
        if speed_lengths is not None:
            asked["speed_lengths"] = numbers("--speed-lengths", speed_lengths)
        if speed_batch is not None:
            asked["speed_batches"] = numbers("--speed-batch", speed_batch)
        if speed_dtype is not None:
            asked["speed_dtype"] = speed_dtype
        records = _evaluate_retrofit(run, baseline_windows, timing, asked)
    else:
        _refuse(of_retrofits, "is for retrofitted models")
        records = _evaluate_run(run, step, against, details, asked)
    if json is not None:
        for record in records:
            append_record(json, record)


def _refuse(options: dict[str, Any], why: str) -> None:
    for option, value in options.items():
        if value is not None:
            raise ValueError(f"{option} {why}")


def _evaluate_retrofit(
    folder: Path,
    windows: str | None,
    rounds: int | None,
    asked: dict[str, Any],
) -> list[Record]:
    from mosar.cli.report import report_retrofit
    from mosar.integrations.retrofit.evaluator import ROUNDS, evaluate_folder

    if windows is not None:
        # It draws their frontier; a long evaluation must not fail at its end for want of it.
        import_module("matplotlib")
    records = evaluate_folder(
        folder,
        windows=() if windows is None else numbers("--baseline-windows", windows),
        rounds=ROUNDS if rounds is None else rounds,
        **asked,
    )
    report_retrofit(folder)
    return records


def _evaluate_run(
    run: Path, step: int | None, against: Path | None, details: bool, asked: dict[str, Any]
) -> list[EvaluationRecord] | list[RetrievalRecord]:
    from mosar.evaluation import table
    from mosar.evaluation.evaluate import evaluate
    from mosar.evaluation.store import EVALUATIONS
    from mosar.records import RetrievalRecord
    from mosar.terminal import table_console

    # A long evaluation must not fail at its end because of the other run.
    base = None if against is None else _comparable(run, against, step)
    records = evaluate(run, step=step, **asked)
    console = table_console()
    if isinstance(records[0], RetrievalRecord):
        console.print(table.retrieval_table(cast("list[RetrievalRecord]", records)))
    else:
        texts = cast("list[EvaluationRecord]", records)
        other = []
        if base is not None:
            other = evaluate(
                base.run,
                lengths=sorted({record.length for record in texts}),
                routings=base.geometry.routings[:1],
                step=step,
                data=asked["data"],
                tokens=texts[0].tokens,
                progress=asked["progress"],
            )
        console.print(table.perplexity_table(texts, cast("list[EvaluationRecord]", other)))
        if details:
            _show_details(texts, console)
        for line in table.time_ratios(texts):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"records in {run / EVALUATIONS}", markup=False, highlight=False, soft_wrap=True)
    return records


def _show_details(records: list[EvaluationRecord], console: Console) -> None:
    from mosar.evaluation.table import bucket_table, layer_table

    for length in dict.fromkeys(record.length for record in records):
        rows = [record for record in records if record.length == length]
        console.print(bucket_table(rows))
        if rows[-1].layer_density:
            console.print(layer_table(rows[-1]))


def _comparable(run: Path, against: Path, step: int | None) -> LoadedRun:
    """The other run at the same step, once it is known that both learnt the same text."""
    from mosar.evaluation.loaded_run import LoadedRun

    ours, other = LoadedRun.open(run, step), LoadedRun.open(against, step)
    for loaded in (ours, other):
        if loaded.config.data.task != "text":
            raise ValueError(
                f"--against compares perplexities, but {loaded.run} learnt the task "
                f"{loaded.config.data.task}"
            )
    if ours.data_fingerprint != other.data_fingerprint:
        raise ValueError(f"--against {against} was trained on other data than {run}")
    return other
