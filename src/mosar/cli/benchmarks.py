"""`mosar bench`: speed and memory, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from mosar.cli.app import bench_app
from mosar.cli.shared import (
    CommandFailed,
    Threads,
    figure_suffix,
    listed,
    load_config,
    numbers,
    one_line_errors,
    reported,
    use_threads,
    write_whole,
)


@bench_app.command("attention")
def bench_attention(
    mode: Annotated[
        str,
        typer.Option(help="Some of sparse, sparse-train, soft-train, distance-train."),
    ] = "sparse",
    shapes: Annotated[
        str, typer.Option(help="Query heads x key/value heads x head dim.")
    ] = "8x1x256,8x8x64,9x3x64",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens. By default 256 to 8192 for sparse, 2048,8192 for sparse-train, else 2048."
        ),
    ] = None,
    competitors: Annotated[
        str | None,
        typer.Option(
            help="Some of sdpa, flash (GPU), reference, flex, flex-sorted, ours. By default all; "
            "compiling FlexAttention takes ten seconds a length, so on the CPU only from 1024 to "
            "4096 tokens."
        ),
    ] = None,
    labels: Annotated[
        str,
        typer.Option(
            help="independent or clustered (the paper's shares at 8k), or FILE.npz with integer "
            "arrays labels_q and labels_k."
        ),
    ] = "independent",
    memory: Annotated[
        str | None,
        typer.Option(
            help="Tokens at which peak memory is measured, or none. By default 8192, or the "
            "largest of --lengths up to it."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda for a GPU (CUDA or HIP).")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16. By default float32 on the CPU, else bfloat16.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of labels, queries, keys and values.")] = 0,
    threads: Threads = None,
    seconds: Annotated[
        float, typer.Option(help="About how long a row is timed; 5 to 30 rounds in any case.")
    ] = 10.0,
    config: Annotated[
        Path | None,
        typer.Option(help="A MoSARConfig as JSON; by default the paper's geometry."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Append a record a row to this file, as it is measured.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw speed-up against length: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Time attention side by side: dense SDPA, FlexAttention, our reference, ours.

    All in one run, interleaved. Ours is checked against float64 first; a wrong result gets no
    speed-up, and the exit code 1. Options that take several values take them with commas.

    Example: mosar bench attention

    Example: mosar bench attention --lengths 4096,8192,16384 --competitors sdpa,ours

    Example: mosar bench attention --mode soft-train,distance-train --shapes 8x1x256

    Example: mosar bench attention --labels clustered --json bench.jsonl --plot speedup.png

    Example: mosar bench attention --device cuda --mode sparse,sparse-train,soft-train
    """
    with one_line_errors():
        geometry = load_config(config, None)
        from mosar.bench.attention import AttentionBenchmarkSettings
        from mosar.bench.cases import Shape
        from mosar.bench.terminal import show_attention_benchmark

        with reported():
            settings = AttentionBenchmarkSettings(
                modes=listed(mode),
                shapes=tuple(Shape.parse(shape) for shape in listed(shapes)),
                lengths=None if lengths is None else numbers("--lengths", lengths),
                memory_lengths=_memory_lengths(memory),
                competitors=None if competitors is None else listed(competitors),
                labels=labels,
                seed=seed,
                seconds=seconds,
                config=geometry,
                device=device,
                dtype=dtype,
            )
        suffix = None if plot is None else figure_suffix("--plot", plot)
        records = _measure(partial(show_attention_benchmark, settings), threads, json, plot)
        if plot is not None and any(record.speedup is not None for record in records):
            from mosar.report.figures import draw_speedup, render_figure

            write_whole(plot, render_figure(draw_speedup(records), suffix or ""))
        _refuse_wrong(records)


@bench_app.command("train")
def bench_train(
    lengths: Annotated[str, typer.Option(help="Tokens of a window.")] = "512,2048",
    softcap: Annotated[
        str, typer.Option(help="capped (Gemma 2's soft-caps), plain (none), or both.")
    ] = "capped,plain",
    preset: Annotated[str, typer.Option(help="The size of the model.")] = "small",
    memory: Annotated[
        str, typer.Option(help="Tokens at which peak memory is measured, or none.")
    ] = "2048",
    threads: Threads = None,
    seconds: Annotated[
        float, typer.Option(help="About how long a row is timed; 5 to 30 rounds in any case.")
    ] = 60.0,
    json: Annotated[
        Path | None, typer.Option(help="Append a record a row to this file, as it is measured.")
    ] = None,
) -> None:
    """Time a training step: our rope and mosar, transformers' Gemma 2, a nanoGPT-style loop.

    All of the same size, in one run, interleaved. Losses are checked first, ours against float64
    and Gemma 2's against ours with the same weights; a wrong result gets no ratio, and the exit
    code 1.

    Example: mosar bench train

    Example: mosar bench train --lengths 512 --softcap plain --seconds 20 --json train.jsonl
    """
    with one_line_errors():
        from mosar.bench.terminal import show_training_benchmark
        from mosar.bench.training import TrainingBenchmarkSettings

        with reported():
            settings = TrainingBenchmarkSettings(
                lengths=numbers("--lengths", lengths),
                settings=listed(softcap),
                preset=preset,
                memory_lengths=_memory_lengths(memory) or (),
                seconds=seconds,
            )
        _refuse_wrong(_measure(partial(show_training_benchmark, settings), threads, json))


@bench_app.command("decode")
def bench_decode(
    shapes: Annotated[
        str, typer.Option(help="Query heads x key/value heads x head dim; not with --model.")
    ] = "9x3x64,8x1x256",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens of context at the last step. By default 2048,4096,8192,16384; with "
            "--model 16384.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Time whole models of these sizes instead: smollm2, or tiny to try it out.",
            show_default=False,
        ),
    ] = None,
    labels: Annotated[
        str,
        typer.Option(
            help="independent or clustered (the paper's shares at 8k), or FILE.npz with integer "
            "arrays labels_q and labels_k."
        ),
    ] = "independent",
    seed: Annotated[int, typer.Option(min=0, help="Of labels, queries, keys and values.")] = 0,
    threads: Threads = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="About how long a row is timed; 5 to 30 passes in any case. By default 5; with "
            "--model 20.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A MoSARConfig as JSON; by default the paper's geometry."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Append a record a row to this file, as it is measured.")
    ] = None,
) -> None:
    """Time one decode step's attention: the regime cache against SDPA over a dense cache.

    A step appends a token and attends with its query. Both in one run, interleaved; ours is checked
    against float64 first, and a wrong result gets no speed-up, and the exit code 1.

    With --model, whole models write: our decoder with the regime cache, our decoder with a dense
    one, and transformers' Llama with its DynamicCache and SDPA.

    Example: mosar bench decode

    Example: mosar bench decode --shapes 8x8x64 --lengths 4096,32768 --json decode.jsonl

    Example: mosar bench decode --model smollm2
    """
    with one_line_errors():
        geometry = load_config(config, None)
        from mosar.bench import terminal
        from mosar.bench.cases import Shape
        from mosar.bench.decode import DecodeBenchmarkSettings
        from mosar.bench.decode_model import ModelDecodeSettings

        common: dict[str, Any] = {"labels": labels, "seed": seed, "config": geometry}
        with reported():
            if lengths is not None:
                common["lengths"] = numbers("--lengths", lengths)
            if seconds is not None:
                common["seconds"] = seconds
            if model is None:
                common["shapes"] = tuple(Shape.parse(shape) for shape in listed(shapes))
                run = partial(terminal.show_decode_benchmark, DecodeBenchmarkSettings(**common))
            else:
                settings = ModelDecodeSettings(model=model, **common)
                run = partial(terminal.show_model_decode_benchmark, settings)
        _refuse_wrong(_measure(run, threads, json))


Rows = TypeVar("Rows", bound=Sequence[Any])


def _measure(
    show: Callable[[Path | None], Rows], threads: int | None, json: Path | None, *files: Path | None
) -> Rows:
    """The rows of a benchmark, appended to `json`; `files` are to be written after it."""
    # A long run must not end in a file that cannot be written.
    for path in (json, *files):
        if path is not None and not path.absolute().parent.is_dir():
            raise CommandFailed(f"cannot write {path}: its folder does not exist")
    use_threads(threads)
    with reported(ValueError, RuntimeError):
        return show(json)


def _refuse_wrong(records: Sequence[Any]) -> None:
    wrong = [record for record in records if not record.correct]
    if wrong:
        raise CommandFailed(f"{len(wrong)} of {len(records)} rows gave a wrong result")


def _memory_lengths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    return () if text == "none" else numbers("--memory", text)
