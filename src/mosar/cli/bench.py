"""`mosar bench`: compares speed and memory.

Each option sets the field of the same name in the comparison. Without the option, the field keeps
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
    MovedData,
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
_LABELS = (
    "Regime labels: independent or clustered (both with the paper's routing shares), or FILE.npz "
    "with labels_q and labels_k."
)
_FLEX = (
    "FlexAttention needs ten seconds to compile for each length, so on the CPU it runs only from "
    "1024 to 4096 tokens."
)
Labels = Annotated[str, Option(help=_LABELS)]
Seed = Annotated[int, Option(min=0, help="Seed of labels, queries, keys and values.")]
Seconds = Annotated[float, Option(help="Approximate seconds for each row, in 5 to 30 rounds.")]
Json = Annotated[Path | None, Option(help="Append one record per row to this file.")]


@command("attention", _group)
def bench_attention(
    mode: Annotated[
        str, Option(help="One or more of sparse, sparse-train, soft-train, distance-train.")
    ] = "sparse",
    shapes: Annotated[str, Option(help=f"{_SHAPES}.")] = "8x1x256,8x8x64,9x3x64",
    lengths: Annotated[
        str | None,
        Option(help="Tokens; by default 256 to 8192 (sparse), 2048,8192 (sparse-train) or 2048."),
    ] = None,
    competitors: Annotated[
        str | None,
        Option(
            help="One or more of sdpa, flash (GPU), reference, flex, flex-sorted, ours; by default "
            f"all. {_FLEX}"
        ),
    ] = None,
    labels: Labels = "independent",
    memory: Annotated[
        str | None,
        Option(
            help="Lengths at which memory is measured, or none; by default the longest up to 8192."
        ),
    ] = None,
    device: Annotated[str, Option(help="cpu, or cuda for a GPU (CUDA or HIP).")] = "cpu",
    dtype: Annotated[
        str | None,
        Option(help="float32, bfloat16 or float16; by default float32 on the CPU, else bfloat16."),
    ] = None,
    seed: Seed = 0,
    threads: Threads = None,
    seconds: Seconds = 10.0,
    config: Geometry = None,
    json: Json = None,
    plot: Annotated[Path | None, Option(help="Plot speed-up by length: .png, .svg, .pdf.")] = None,
) -> None:
    """Time attention: dense SDPA, FlexAttention, our reference and our kernels.

    All are timed in one run, in turn. Our results are first compared with float64. If a result is
    wrong, no speed-up is printed and the exit code is 1. Options take several values, separated by
    commas.

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
        Option(help="Instead, compare the CPU time of these variants (or all) with that of rope."),
    ] = None,
    run_folder: Annotated[
        Path | None,
        Option(
            "--run",
            help="Instead, compare the CPU time of this run's trained model, on its own text, with "
            "that of rope.",
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        Option(help="Tokens in a window; by default 512,2048 (with --variants or --run: 512)."),
    ] = None,
    softcap: Annotated[
        str | None,
        Option(
            help="capped (as Gemma 2), plain or both; by default both (with --variants: capped; "
            "with --run: as it was trained)."
        ),
    ] = None,
    preset: Annotated[
        str | None,
        Option(help="The preset that gives the model its size; by default small. Not with --run."),
    ] = None,
    data: MovedData = None,
    memory: Annotated[
        str | None,
        Option(
            help="Lengths at which memory is measured, or none; by default 2048 (with --variants "
            "or --run: none)."
        ),
    ] = None,
    threads: Threads = None,
    seconds: Annotated[
        float | None,
        Option(
            help="Approximate seconds for each row, in 5 to 30 rounds; by default 60 (with "
            "--variants or --run: 20)."
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Time a training step: our rope and mosar, transformers' Gemma 2, a nanoGPT-style loop.

    All models have the same size and are timed in one run, in turn. The losses are checked first:
    ours against float64, and Gemma 2's against ours with the same weights. If a loss is wrong, no
    ratio is printed and the exit code is 1.

    Example: mosar bench train

    Example: mosar bench train --lengths 512 --softcap plain --seconds 20 --json train.jsonl

    Example: mosar bench train --variants fox,moba --threads 1

    Example: mosar bench train --run runs/mosar-plus --lengths 512,8192 --memory 8192
    """
    options = locals()
    _check_files(options)
    from mosar.bench.training import TrainingComparison
    from mosar.bench.variants import VariantComparison

    if data is not None and run_folder is None:
        raise ValueError(f"--data is that of a run, so it needs --run RUN; got --data {data}")
    if run_folder is None and variants is None:
        del options["variants"], options["run_folder"], options["data"]
        return _compare(TrainingComparison, options)
    if run_folder is not None:
        taken = {"--variants": variants, "--softcap": softcap, "--preset": preset}
        given = [name for name, value in taken.items() if value is not None]
        if given:
            raise ValueError(f"{given[0]} cannot be given with --run, which has its own")
    _compare(VariantComparison, options)


@command("decode", _group)
def bench_decode(
    shapes: Annotated[str, Option(help=f"{_SHAPES}; not with --model.")] = "9x3x64,8x1x256",
    lengths: Annotated[
        str | None,
        Option(help="Tokens at the last step; by default 2048 to 16384 (with --model: 16384)."),
    ] = None,
    model: Annotated[
        str | None,
        Option(help="Time whole models instead: smollm2 (its size), or tiny for a quick test."),
    ] = None,
    labels: Labels = "independent",
    seed: Seed = 0,
    threads: Threads = None,
    seconds: Annotated[
        float | None,
        Option(
            help="Approximate seconds for each row, in 5 to 30 passes; by default 5 (with --model: "
            "20)."
        ),
    ] = None,
    config: Geometry = None,
    json: Json = None,
) -> None:
    """Time the attention of one decode step: the regime cache against SDPA with a dense cache.

    A step appends one token to the cache and computes attention for its query. Both caches are
    timed in one run, in turn. Our results are first compared with float64. If a result is wrong, no
    speed-up is printed and the exit code is 1.

    With --model, the command times the generation of whole models: our decoder with the regime
    cache, our decoder with a dense cache, and transformers' Llama with its DynamicCache and SDPA.

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
    """Reports wrong paths before torch is imported."""
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


# Parses the text of an option; options that are not listed are taken as they are.
_PARSERS: dict[str, Callable[[Any], Any]] = {
    "mode": listed,
    "variants": listed,
    "softcap": listed,
    "competitors": listed,
    "shapes": _shapes,
    "lengths": partial(numbers, "--lengths"),
    "memory": lambda text: () if text == "none" else numbers("--memory", text),
}


def _compare(comparison_class: type[Comparison[Any, Any]], options: dict[str, Any]) -> None:
    """Measures, writes --json and --plot, and fails if a result is wrong."""
    json, plot, threads = (options.pop(name, None) for name in ("json", "plot", "threads"))
    comparison = comparison_class(
        **{
            name: _PARSERS.get(name, lambda value: value)(value)
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
