"""`mosar retrofit`: trains routers for a pretrained model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from mosar.cli.app import command
from mosar.cli.options import Geometry, Progress, TextField, Threads, load_geometry, use_threads
from mosar.errors import ModelError
from mosar.files import check_folder

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from mosar.integrations.retrofit.attach import Retrofit
    from mosar.integrations.retrofit.config import RetrofitSettings

# A density further from its target than this share of it is a miss.
_NEAR = 0.1


@command("retrofit")
def retrofit(
    model: Annotated[
        str,
        Argument(
            help="A causal transformers model: a folder, a GGUF file or a name on the hub.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None, Option(help="The run folder; an existing run is resumed.", show_default=False)
    ] = None,
    data: Annotated[
        list[str] | None,
        Option(
            help="Text sources as for mosar prepare, or a dataset made by it with the model's "
            "tokenizer; can be repeated. By default stdlib."
        ),
    ] = None,
    target_density: Annotated[
        float | None,
        Option(help="The share of pairs that sparse routing should read; by default 0.25."),
    ] = None,
    length: Annotated[
        int | None,
        Option(
            help="Tokens in a window; by default 4096, or the model's context if that is shorter."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        Option(
            help="Number of training windows; by default 20. With 0, the routers of --start-from "
            "are only moved to the target density."
        ),
    ] = None,
    lora: Annotated[
        int | None,
        Option(
            metavar="RANK",
            help="Also train changes of this rank to the projections of q, k and the output. The "
            "second phase trains them: add --set tune_steps=16. By default 0: only routers.",
        ),
    ] = None,
    config: Geometry = None,
    changes: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting, like updates=4; can be repeated. Keys: docs/retrofit.md.",
        ),
    ] = None,
    start_from: Annotated[
        Path | None,
        Option(
            help="Start from the routers of another run, or of an included adapter like "
            "smollm2-135m; a new density then needs fewer steps."
        ),
    ] = None,
    estimate: Annotated[
        int | None,
        Option(
            min=1,
            metavar="WINDOWS",
            help="Do not train. Use this many windows to estimate what is lost and saved if fewer "
            "pairs are read.",
        ),
    ] = None,
    dtype: Annotated[
        str,
        Option(
            help="The base model's weights while the routers are trained: float32, bfloat16, or "
            "auto: bfloat16 if this CPU has instructions for it, which takes less time. What is "
            "measured afterwards is the float32 model."
        ),
    ] = "float32",
    text_field: TextField = "text",
    evaluate: Annotated[
        bool, Option(help="After training, measure perplexity, prefill and cache.")
    ] = True,
    threads: Threads = None,
    progress: Progress = True,
) -> None:
    """Add routers to a pretrained model and train only the routers.

    The weights of the model do not change. The routers learn from the model's own attention, layer
    by layer. The command writes an adapter of a few MB to --out. mosar evaluate and mosar generate
    can load it. Ctrl-C saves; the same command resumes.

    Example: mosar retrofit HuggingFaceTB/SmolLM2-135M --data articles.jsonl.gz --out runs/smollm2

    Example: mosar retrofit model.gguf --data book.txt --out runs/mine --target-density 0.1

    Example: mosar retrofit models/mine --out runs/try --length 1024 --steps 10 --no-evaluate

    Example: mosar retrofit models/mine --data book.txt --estimate 16 --length 4096

    Example: mosar retrofit models/mine --out runs/lora --lora 8 --set tune_steps=16
    """
    if out is None and estimate is None:
        raise ValueError("--out is missing: the run folder")
    sources = data or ["stdlib"]
    _check_paths(model, sources, start_from)
    geometry = None if config is None else load_geometry(config)
    import torch

    from mosar.cli.report import report_retrofit
    from mosar.core.config import MoSARConfig
    from mosar.integrations.retrofit.adapter import load_retrofitted, read_description
    from mosar.integrations.retrofit.attach import default_config
    from mosar.integrations.retrofit.attach import retrofit as attach
    from mosar.integrations.retrofit.base_model import BaseIdentity, load_base, weights_dtype
    from mosar.integrations.retrofit.config import RetrofitSettings, changed_settings
    from mosar.integrations.retrofit.evaluate import ROUTINGS
    from mosar.integrations.retrofit.evaluator import ROUNDS, Evaluator
    from mosar.integrations.retrofit.train import train_retrofit
    from mosar.integrations.retrofit.windows import read_windows

    use_threads(threads)
    given = {"target_density": target_density, "length": length, "steps": steps, "lora": lora}
    named = changed_settings({n: v for n, v in given.items() if v is not None}, changes or ())
    start = {} if start_from is None else read_description(start_from)
    rank = named.get("lora", start.get("lora", 0))
    if RetrofitSettings(**named).total_steps:
        named["lora"] = rank
    weights = weights_dtype(dtype)
    base_model, tokenizer = load_base(model, dtype=weights)
    settings = _settings_for(base_model, named)
    if estimate is not None:
        text = read_windows(
            *(sources, tokenizer, settings.length), train=0, valid=estimate, text_field=text_field
        )
        attached = attach(base_model, geometry or default_config(base_model))
        _show_estimate(attached, text.valid, progress)
        return
    assert out is not None
    identity = BaseIdentity.of(base_model, _absolute(model))
    windows = read_windows(
        sources,
        tokenizer,
        settings.length,
        train=settings.total_steps,
        valid=settings.valid_windows,
        text_field=text_field,
    )
    if geometry is None and start:
        geometry = MoSARConfig.from_dict(start["geometry"])
    attached = attach(base_model, geometry or default_config(base_model), lora=rank)
    result = train_retrofit(
        attached,
        windows,
        settings,
        out,
        base=identity,
        start_from=start_from,
        notes={"data": [_absolute(source) for source in sources], "text_field": text_field},
        progress=progress,
    )
    lost = f" and {100 * result.lost:.1f} % of the attention lost" if settings.total_steps else ""
    print(
        f"{out}: density {result.density:.3f} (target {settings.target_density:g}){lost} at "
        f"{settings.length} tokens"
    )
    if abs(result.density - settings.target_density) > _NEAR * settings.target_density:
        advice = "it reads fewer pairs than asked for; a larger --target-density keeps more"
        if result.density > settings.target_density:
            advice = "it reads more pairs than asked for; more --steps bring the density down"
        print(f"note: the target density was missed: {advice}", file=sys.stderr)
    if evaluate:
        if weights != torch.float32:
            # Both hold the narrow model.
            del base_model, attached
            attached = load_retrofitted(out)
        evaluator = Evaluator(attached, out, windows.valid, [settings.length - 1], progress)
        evaluator.routings(ROUTINGS)
        evaluator.speed(ROUNDS)
        report_retrofit(out)


def _show_estimate(attached: Retrofit, windows: Tensor, progress: bool) -> None:
    """A line per density: what a window and choices by the token would lose, and the speed."""
    from mosar.evaluation.progress import length_progress
    from mosar.integrations.retrofit.estimate import estimate_frontier

    label = f"dense passes over {windows.shape[1]} tokens"
    with length_progress(label, len(windows), enabled=progress) as advance:
        found = estimate_frontier(attached, windows, advance=advance)
    print(
        f"{len(windows)} windows of {found.length:,} tokens; attention is "
        f"{100 * found.attention_share:.0f} % of the arithmetic of a prompt"
    )
    print("pairs read   lost by a window   lost by choice   prompt at most")
    rows = zip(found.density, found.window, found.choice, strict=True)
    for density, window, choice in rows:
        print(
            f"{density:10.2f} {100 * window:16.1f} % {100 * choice:14.1f} % "
            f"{found.speedup(density):14.2f} ×"
        )
    print("lost: the share of the model's attention on pairs that are not read")


def _check_paths(model: str, sources: list[str], start_from: Path | None) -> None:
    """Reports wrong paths before torch and transformers are imported."""
    from mosar.data.corpora import find_source
    from mosar.data.manifest import MANIFEST

    path = Path(model)
    # A name on the hub is NAME or OWNER/NAME.
    is_path = path.is_absolute() or model.startswith(".") or len(path.parts) > 2
    is_path |= path.suffix == ".gguf" or (len(path.parts) == 2 and path.parent.is_dir())
    if is_path and not path.exists():
        raise ModelError(f"cannot load {model}: there is no such file or folder")
    for source in sources:
        if not (Path(source) / MANIFEST).is_file():
            find_source(source)
    if start_from is not None and not start_from.exists():
        from mosar.integrations.retrofit.entry import ready_adapters

        if str(start_from) not in ready_adapters():
            check_folder(start_from, "folder", "mosar retrofit")


def _settings_for(model: PreTrainedModel, named: dict[str, Any]) -> RetrofitSettings:
    """Settings from the named ones; by default windows are no longer than the model's context."""
    from mosar.integrations.retrofit.base_model import check_length, context_length
    from mosar.integrations.retrofit.config import RetrofitSettings

    most = context_length(model)
    if "length" in named or most is None or most >= RetrofitSettings.length:
        settings = RetrofitSettings(**named)
        check_length(model, settings.length)
        return settings
    print(f"windows of {most} tokens: the base model reads no more", file=sys.stderr)
    return RetrofitSettings(**named, length=most)


def _absolute(source: str) -> str:
    """An absolute path; a name on the hub stays as it is."""
    path = Path(source)
    return str(path.absolute()) if path.exists() else source
