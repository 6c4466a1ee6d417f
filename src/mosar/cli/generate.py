"""`mosar generate`: writes text on stdout, and on stderr what it took."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from mosar.cli.app import command, discard_output
from mosar.cli.options import MovedData, Step, Threads, check_model, use_threads
from mosar.errors import MosarError

if TYPE_CHECKING:
    from mosar.generation.source import Source
    from mosar.model.generation import MeasuredReader, Sampling


@command("generate")
def generate(
    model: Annotated[
        Path,
        Argument(
            help="A run folder of mosar train, a folder of mosar export, or a retrofitted model.",
            show_default=False,
        ),
    ],
    prompt: Annotated[
        str, Option(help="The text to go on with; - reads it from stdin; empty: a new text.")
    ],
    max_new_tokens: Annotated[int, Option(min=1, help="Where to stop at the latest.")] = 200,
    temperature: Annotated[float, Option(min=0.0, help="0: always the likeliest token.")] = 0.8,
    top_k: Annotated[
        int | None, Option(min=1, help="Only the k likeliest tokens; by default all.")
    ] = None,
    top_p: Annotated[
        float | None,
        Option(help="Only the likeliest tokens with this probability together; by default all."),
    ] = None,
    seed: Annotated[int, Option(min=0, max=2**63 - 1, help="Equal seeds write equal texts.")] = 0,
    routing: Annotated[
        str | None,
        Option(
            help="soft, top1 or sparse (the default, with a bounded cache); native for variants "
            "without routers."
        ),
    ] = None,
    step: Step = None,
    data: MovedData = None,
    echo: Annotated[bool, Option("--echo", help="Show the prompt, too.")] = False,
    stats: Annotated[
        bool, Option("--stats", help="Speed, cache size and density, on stderr.")
    ] = False,
    threads: Threads = None,
) -> None:
    """Write text with a trained model, token by token on stdout.

    Example: mosar generate runs/mosar --prompt "def main(" --stats

    Example: mosar generate exported --prompt - --temperature 0 --max-new-tokens 50 < prompt.txt
    """
    check_model(model)
    from mosar.generation.source import open_source
    from mosar.model.generation import Sampling

    use_threads(threads)
    # What was asked for is checked before the model is loaded, which may take long.
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    if sys.stdout is None:
        raise ValueError("stdout is closed, and the text goes there")
    prompt = _read_prompt(prompt)
    source = open_source(model, routing=routing, step=step, data=data)
    tokens = source.encode(prompt)
    if not tokens and source.end_of_text is None:
        raise ValueError("--prompt must not be empty: the model has no token that begins a text")
    timed = _TimedReader(source.reader)
    try:
        if echo:
            _show(prompt)
        # Without a prompt, a text begins where another one ended.
        _write(source, timed, tokens or [source.end_of_text], max_new_tokens, sampling, seed)
    except BrokenPipeError:
        raise
    except OSError as error:
        # Exit must not try again to write what could not be written.
        discard_output()
        raise MosarError(error.strerror or str(error)) from None
    except KeyboardInterrupt:
        print()
        raise typer.Exit(130) from None
    if stats:
        for line in _statistics(timed, source.routing):
            print(line, file=sys.stderr)


def _write(
    source: Source, timed: _TimedReader, tokens: Any, most: int, sampling: Sampling, seed: int
) -> None:
    from mosar.generation.streaming import stream_text
    from mosar.model.generation import write_tokens

    options = {"max_new_tokens": most, "sampling": sampling, "seed": seed}
    written = write_tokens(timed, tokens, stop=source.end_of_text, **options)
    for piece in stream_text(written, source.decode, tokens):
        _show(piece)
    _show("\n")


def _read_prompt(prompt: str) -> str:
    """The text itself, from stdin where it is "-"."""
    try:
        if prompt == "-":
            if sys.stdin is None:
                raise ValueError("--prompt - reads stdin, which is closed")
            prompt = sys.stdin.read()
        prompt.encode()
    except UnicodeError:
        raise ValueError("--prompt must be UTF-8 text, and it is not") from None
    return prompt


def _show(text: str) -> None:
    # A terminal that cannot show a character shows a question mark.
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()


class _TimedReader:
    """A reader that notes how long each reading took: the prompt first, then token by token."""

    def __init__(self, reader: MeasuredReader, clock: Callable[[], float] = time.perf_counter):
        self.reader, self._clock = reader, clock
        self.readings: list[tuple[int, float]] = []

    def read(self, tokens: Sequence[int]) -> Any:
        start = self._clock()
        logits = self.reader.read(tokens)
        self.readings.append((len(tokens), self._clock() - start))
        return logits


def _statistics(timed: _TimedReader, routing: str) -> list[str]:
    """What the writing took, one line per subject."""
    reader, (prompt, *rest) = timed.reader, timed.readings
    lines = [f"routing    {routing}", f"prompt     {_rate(*prompt)}"]
    if rest:
        lines.append(f"writing    {_rate(sum(n for n, _ in rest), sum(s for _, s in rest))}")
    dense = reader.dense_bytes
    reason = ""
    if reader.cache_bytes > dense:
        reason = "; it reserves room for later keys, so short texts do not save"
    lines.append(
        f"cache      {_bytes(reader.cache_bytes)} for {reader.num_tokens:,} tokens; dense "
        f"{_bytes(dense)} ({reader.cache_bytes / max(dense, 1):.2f} ×{reason})"
    )
    lines.append(f"density    {reader.density:.3f} of the causal pairs are inside the support")
    return lines


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens:,} tokens in {seconds:.3f} s, {tokens / max(seconds, 1e-9):,.1f} tokens/s"


def _bytes(count: int) -> str:
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
