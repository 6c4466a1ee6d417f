"""`mosar bench`: speed and memory, side by side.

An option has the name of the comparison's field that it sets; one that is not given leaves it to
its default.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from mosar.cli.app import command, command_group
from mosar.cli.options import (
    Geometry,
    Threads,
    check_figure,
    check_folder_of,
    listed,
    load_geometry,
    numbers,
    use_threads,
    write_figure,
)
from mosar.errors import MosarError

if TYPE_CHECKING:
    from mosar.bench.comparison import Comparison

_group = command_group(
    "bench", "Measure speed and memory.\n\nExample: mosar bench attention --lengths 2048,8192"
)
_SHAPES = "Query heads x key/value heads x head dim"
_LABELS = "independent or clustered (the paper's shares), or FILE.npz with labels_q and labels_k."
_FLEX = "FlexAttention compiles for ten seconds a length, so on the CPU from 1024 to 4096 tokens."
Labels = Annotated[str, Option(help=_LABELS)]
Seed = Annotated[int, Option(min=0, help="Of labels, queries, keys and values.")]
Seconds = Annotated[float, Option(help="About how long a row is timed, in 5 to 30 rounds.")]
Json = Annotated[Path | None, Option(help="Append a record a row to this file, as it is measured.")]


@command("attention", _group)
def bench_attention(
    mode: Annotated[
        str, Option(help="Some of sparse, sparse-train, soft-train, distance-train.")
    ] = "sparse",
    shapes: Annotated[str, Option(help=f"{_SHAPES}.")] = "8x1x256,8x8x64,9x3x64",
    lengths: Annotated[
        str | None,
        Option(help="Tokens; else 256 to 8192 (sparse), 2048,8192 (sparse-train) or 2048."),
    ] = None,
    competitors: Annotated[
        str | None,
        Option(help=f"Of sdpa, flash (GPU), reference, flex, flex-sorted, ours; else all. {_FLEX}"),
    ] = None,
    labels: Labels = "independent",
    memory: Annotated[
        str | None,
        Option(help="Tokens where memory is measured, or none; else 8192 or the most up to it."),
    ] = None,
    device: Annotated[str, Option(help="cpu, or cuda for a GPU (CUDA or HIP).")] = "cpu",
    dtype: Annotated[
        str | None, Option(help="float32, bfloat16 or float16; else float32, bfloat16 on a GPU.")
    ] = None,
    seed: Seed = 0,
    threads: Threads = None,
    seconds: Seconds = 10.0,
    config: Geometry = None,
    json: Json = None,
    plot: Annotated[Path | None, Option(help="Draw speed-up by length: .png, .svg, .pdf.")] = None,
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
    options = locals()
    _check_files(options)
    from mosar.bench.attention import AttentionComparison

    _compare(AttentionComparison, options)


@command("train", _group)
def bench_train(
    variants: Annotated[
        str | None,
        Option(help="Time these variants, or all, against rope instead; by CPU time."),
    ] = None,
    lengths: Annotated[
        str | None, Option(help="Tokens of a window; else 512,2048, with --variants 512.")
    ] = None,
    softcap: Annotated[
        str | None,
        Option(help="capped (Gemma 2's), plain, or both; else both, with --variants capped."),
    ] = None,
    preset: Annotated[str, Option(help="The size of the model.")] = "small",
    memory: Annotated[
        str | None,
        Option(help="Tokens where memory is measured, or none; else 2048. Not with --variants."),
    ] = None,
    threads: Threads = None,
    seconds: Annotated[
        float | None,
        Option(help="About how long a row is timed, in 5 to 30 rounds; else 60, variants 20."),
    ] = None,
    json: Json = None,
) -> None:
    """Time a training step: our rope and mosar, transformers' Gemma 2, a nanoGPT-style loop.

    All of the same size, in one run, interleaved. Losses are checked first, ours against float64
    and Gemma 2's against ours with the same weights; a wrong result gets no ratio, and the exit
    code 1.

    Example: mosar bench train

    Example: mosar bench train --lengths 512 --softcap plain --seconds 20 --json train.jsonl

    Example: mosar bench train --variants fox,moba --threads 1
    """
    options = locals()
    _check_files(options)
    from mosar.bench.training import TrainingComparison
    from mosar.bench.variants import VariantComparison

    if variants is not None and memory is not None:
        raise ValueError("--memory is not measured with --variants")
    del options["variants" if variants is None else "memory"]
    _compare(TrainingComparison if variants is None else VariantComparison, options)


@command("decode", _group)
def bench_decode(
    shapes: Annotated[str, Option(help=f"{_SHAPES}; not with --model.")] = "9x3x64,8x1x256",
    lengths: Annotated[
        str | None,
        Option(help="Tokens at the last step; else 2048,4096,8192,16384, with --model 16384."),
    ] = None,
    model: Annotated[
        str | None,
        Option(help="Time whole models of these sizes instead: smollm2, or tiny to try it out."),
    ] = None,
    labels: Labels = "independent",
    seed: Seed = 0,
    threads: Threads = None,
    seconds: Annotated[
        float | None,
        Option(help="About how long a row is timed, 5 to 30 passes; else 5, with --model 20."),
    ] = None,
    config: Geometry = None,
    json: Json = None,
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
    options = locals()
    _check_files(options)
    from mosar.bench.decode import DecodeComparison
    from mosar.bench.decode_model import ModelDecodeComparison

    del options["model" if model is None else "shapes"]
    _compare(DecodeComparison if model is None else ModelDecodeComparison, options)


def _check_files(options: dict[str, Any]) -> None:
    """Errors of paths, before torch is imported."""
    check_folder_of(options["json"])
    check_figure("--plot", options.get("plot"))
    if options.get("config") is not None:
        options["config"] = load_geometry(options["config"])
    labels = options.get("labels", "")
    if labels.endswith(".npz"):
        Path(labels).stat()


def _shapes(text: str) -> tuple[Any, ...]:
    from mosar.bench.problem import Shape

    shapes = tuple(Shape.parse(shape) for shape in listed(text))
    if not shapes:
        raise ValueError("at least one shape is needed")
    return shapes


# How the text of an option becomes its value, where it is not taken as it is.
_READ: dict[str, Callable[[Any], Any]] = {
    "mode": listed,
    "variants": listed,
    "softcap": listed,
    "competitors": listed,
    "shapes": _shapes,
    "lengths": partial(numbers, "--lengths"),
    "memory": lambda text: () if text == "none" else numbers("--memory", text),
}


def _compare(comparison_of: type[Comparison[Any, Any]], options: dict[str, Any]) -> None:
    """Measures, writes --json and --plot, and fails where a result is wrong."""
    json, plot, threads = (options.pop(name, None) for name in ("json", "plot", "threads"))
    comparison = comparison_of(
        **{
            name: _READ.get(name, lambda value: value)(value)
            for name, value in options.items()
            if value is not None
        }
    )
    use_threads(threads)
    from mosar.bench.terminal import show_comparison

    try:
        records = show_comparison(comparison, json)
    except (ValueError, RuntimeError) as error:
        raise MosarError(str(error)) from None
    if plot is not None and any(record.speedup is not None for record in records):
        from mosar.report.figures import draw_speedup

        write_figure(plot, draw_speedup(records))
    wrong = sum(not record.correct for record in records)
    if wrong:
        raise MosarError(f"{wrong} of {len(records)} rows gave a wrong result")
