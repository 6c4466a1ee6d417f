"""`mosar generate`, `export` and `import`: what trained models are used for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from mosar.cli.app import app
from mosar.cli.shared import (
    CommandFailed,
    Threads,
    one_line_errors,
    reported,
    use_threads,
)
from mosar.errors import MosarError


@app.command("generate")
def generate(
    model: Annotated[
        Path,
        typer.Argument(
            help="A run folder of mosar train, a folder of mosar export, or a retrofitted model.",
            show_default=False,
        ),
    ],
    prompt: Annotated[
        str, typer.Option(help="The text to go on with; - reads it from stdin; empty: a new text.")
    ],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Where to stop at the latest.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0: always the likeliest token.")
    ] = 0.8,
    top_k: Annotated[
        int | None,
        typer.Option(
            min=1, help="Only the k likeliest tokens; by default all.", show_default=False
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Only the likeliest tokens with this probability together; by default all.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Equal seeds write equal texts.")
    ] = 0,
    routing: Annotated[
        str | None,
        typer.Option(
            help="soft, top1 or sparse (the default, with a bounded cache); native for variants "
            "without routers.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            min=0, help="A checkpoint of a run; by default the newest.", show_default=False
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Where the data of the run lies, if it was moved.", show_default=False),
    ] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Show the prompt, too.")] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Speed, cache size and density, on stderr.")
    ] = False,
    threads: Threads = None,
) -> None:
    """Write text with a trained model, token by token on stdout.

    Example: mosar generate runs/mosar --prompt "def main(" --stats

    Example: mosar generate exported --prompt - --temperature 0 --max-new-tokens 50 < prompt.txt
    """
    with one_line_errors():
        from mosar.generation.command import run_generate_command

        use_threads(threads)
        try:
            run_generate_command(
                model,
                prompt,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                routing=routing,
                step=step,
                data=data,
                echo=echo,
                stats=stats,
            )
        except MosarError as error:
            raise CommandFailed(str(error)) from None
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        except BrokenPipeError:
            # Whoever read the text has read enough.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        except OSError as error:
            # What could not be written must not be tried again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise CommandFailed(error.strerror or str(error)) from None
        except KeyboardInterrupt:
            typer.echo()
            raise typer.Exit(130) from None


@app.command("export")
def export(
    run: Annotated[Path, typer.Argument(help="A run folder of mosar train.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    step: Annotated[
        int | None,
        typer.Option(min=0, help="A checkpoint; by default the newest.", show_default=False),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the parameters but the routers: float32, bfloat16 or float16.")
    ] = "float32",
    routing: Annotated[
        str, typer.Option(help="What the loaded model starts with: soft, top1 or sparse.")
    ] = "soft",
    data: Annotated[
        Path | None,
        typer.Option(help="Where the data of the run lies, if it was moved.", show_default=False),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an exported model in --out.")
    ] = False,
) -> None:
    """Export a checkpoint for transformers: weights, tokenizer, model card.

    --out appears when it is complete, not before. Loading it: docs/huggingface.md.

    Example: mosar export runs/mosar --out exported

    Example: mosar export runs/mosar --out exported --dtype bfloat16 --routing sparse
    """
    with one_line_errors(), _hf_errors():
        from mosar.integrations.hf.export import export_run

        made = export_run(run, out, step=step, dtype=dtype, routing=routing, data=data, force=force)
        typer.echo(f"The model: {made}")


@app.command("import")
def import_(
    folder: Annotated[
        Path,
        typer.Argument(help="A folder of mosar export, or of save_pretrained.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The run folder to make.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="The dataset of the run; needed where the model was not exported from one.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make a run folder from an exported model, with the same parameters to the bit.

    mosar evaluate, train and generate take it from there; the optimizer starts anew.

    Example: mosar import exported --out runs/again --data data/stdlib
    """
    with one_line_errors(), _hf_errors():
        from mosar.integrations.hf.run_import import import_model

        typer.echo(f"The run: {import_model(folder, out, data=data)}")


@contextmanager
def _hf_errors() -> Iterator[None]:
    """What goes wrong with a model of transformers, as the command line says it."""
    try:
        import mosar.integrations.hf  # noqa: F401
    except ModuleNotFoundError as error:
        raise CommandFailed(str(error)) from None
    with reported():
        yield
