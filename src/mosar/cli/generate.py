"""`mosar generate`: writes text to stdout, and statistics to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from mosar.cli.app import command, discard_output
from mosar.cli.options import Adapter, Model, MovedData, Step, Threads, check_model, use_threads
from mosar.errors import MosarError

# Tokens of a prompt where nobody gives one: enough for attention to take a share of the time.
_LONG = 4096

if TYPE_CHECKING:
    from mosar.generation.source import Source
    from mosar.model.generation import MeasuredReader, Sampling


@command("generate")
def generate(
    model: Model = None,
    prompt: Annotated[
        str | None,
        Option(
            help="The text to continue; - reads stdin; an empty prompt starts a new text. Not "
            "needed with --compare."
        ),
    ] = None,
    adapter: Adapter = None,
    max_new_tokens: Annotated[int, Option(min=1, help="Write at most this many tokens.")] = 200,
    temperature: Annotated[
        float, Option(min=0.0, help="With 0, always take the most probable token.")
    ] = 0.8,
    top_k: Annotated[
        int | None, Option(min=1, help="Sample from the k most probable tokens; by default all.")
    ] = None,
    top_p: Annotated[
        float | None,
        Option(help="Sample from the most probable tokens whose probabilities sum to this."),
    ] = None,
    seed: Annotated[
        int, Option(min=0, max=2**63 - 1, help="The same seed gives the same text.")
    ] = 0,
    routing: Annotated[
        str | None,
        Option(
            help="soft, top1 or sparse (the default; its cache drops keys that cannot be read "
            "again); variants without routers have only native."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        Option(
            help="Retrofitted models: float32 (the default), bfloat16, or auto: bfloat16 if this "
            "CPU has instructions for it."
        ),
    ] = None,
    step: Step = None,
    data: MovedData = None,
    echo: Annotated[bool, Option("--echo", help="Show the prompt too.")] = False,
    stats: Annotated[
        bool, Option("--stats", help="Show speed, cache size and density on stderr.")
    ] = False,
    compare: Annotated[
        bool,
        Option(
            "--compare",
            help="Retrofitted models: also run the dense model; compare speed and cache.",
        ),
    ] = False,
    threads: Threads = None,
) -> None:
    """Write text with a trained model, token by token on stdout.

    Example: mosar generate --adapter smollm2-135m --compare --max-new-tokens 40

    Example: mosar generate runs/mosar --prompt "def main(" --stats

    Example: mosar generate exported --prompt - --temperature 0 --max-new-tokens 50 < prompt.txt
    """
    check_model(model, adapter)
    from mosar.generation.source import open_source
    from mosar.model.generation import Sampling

    use_threads(threads)
    # Check the options before loading the model, which may take long.
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    if sys.stdout is None:
        raise ValueError("stdout is closed, so the text cannot be written")
    if prompt is None and not compare:
        raise ValueError("--prompt is missing: the text to continue")
    text = None if prompt is None else _read_prompt(prompt)
    source = open_source(model, adapter=adapter, routing=routing, step=step, data=data, dtype=dtype)
    tokens = _long_prompt(source) if text is None else source.encode(text)
    if not tokens and source.end_of_text is None:
        raise ValueError("--prompt must not be empty: the model has no token that begins a text")
    timings: dict[str, _TimedReader] = {}
    try:
        if echo and text is not None:
            _show(text)
        for reading in _both(source) if compare else (source,):
            timed = _TimedReader(reading.reader)
            if compare:
                _show(f"[{reading.routing}] ")
            # Without a prompt, a text starts with the token that ends the text before it.
            _write(reading, timed, tokens or [source.end_of_text], max_new_tokens, sampling, seed)
            timings[reading.routing] = timed
    except BrokenPipeError:
        raise
    except OSError as error:
        # Exit must not try again to write what could not be written.
        discard_output()
        raise MosarError(error.strerror or str(error)) from None
    except KeyboardInterrupt:
        print()
        raise typer.Exit(130) from None
    lines = _comparison(*timings.items()) if compare else []
    if stats:
        lines += _statistics(timings[source.routing], source.routing)
    for line in lines:
        print(line, file=sys.stderr)


def _both(source: Source) -> Iterator[Source]:
    """The model with its routers, then with its own attention."""
    from mosar.generation.retrofitted import dense_twin

    yield source
    yield dense_twin(source)


def _long_prompt(source: Source) -> list[int]:
    """English text that every Python has: its own manual."""
    from pydoc_data.topics import topics

    text = "\n".join(topics.values())[: 8 * _LONG]
    return source.encode(text)[:_LONG]


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
    """The prompt; "-" reads it from stdin."""
    try:
        if prompt == "-":
            if sys.stdin is None:
                raise ValueError("--prompt - reads stdin, which is closed")
            prompt = sys.stdin.read()
        prompt.encode()
    except UnicodeError:
        raise ValueError("--prompt must be UTF-8 text") from None
    return prompt


def _show(text: str) -> None:
    # Characters that the terminal cannot show become question marks.
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()


class _TimedReader:
    """A reader that times each read: the prompt first, then token by token."""

    def __init__(self, reader: MeasuredReader, clock: Callable[[], float] = time.perf_counter):
        self.reader, self._clock = reader, clock
        self.readings: list[tuple[int, float]] = []

    def read(self, tokens: Sequence[int]) -> Any:
        start = self._clock()
        logits = self.reader.read(tokens)
        self.readings.append((len(tokens), self._clock() - start))
        return logits


def _statistics(timed: _TimedReader, routing: str) -> list[str]:
    """Speed, cache size and density, one line each."""
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


def _comparison(routed: tuple[str, _TimedReader], dense: tuple[str, _TimedReader]) -> list[str]:
    """Both ways side by side, one line per subject."""
    (name, ours), (other, theirs) = routed, dense
    lines = [f"{'':<12}{name:>14}{other:>14}"]

    def add(subject: str, figures: tuple[float, float], show: Callable[[float], str]) -> None:
        ratio = figures[0] / max(figures[1], 1e-9)
        shown = "".join(f"{show(figure):>14}" for figure in figures)
        lines.append(f"{subject:<12}{shown}{ratio:>10.2f} ×")

    seconds = [timed.readings[0][1] for timed in (ours, theirs)]
    add("prompt", (seconds[0], seconds[1]), lambda s: f"{s:.2f} s")
    if len(ours.readings) > 1 and len(theirs.readings) > 1:
        taken = [sum(s for _, s in t.readings[1:]) / len(t.readings[1:]) for t in (ours, theirs)]
        add("per token", (taken[0], taken[1]), lambda s: f"{1e3 * s:.1f} ms")
    held = (ours.reader.cache_bytes, theirs.reader.cache_bytes)
    add("cache", held, lambda b: _bytes(int(b)))
    lines.append(f"{'pairs read':<12}{ours.reader.density:>14.3f}{theirs.reader.density:>14.3f}")
    return lines


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens:,} tokens in {seconds:.3f} s, {tokens / max(seconds, 1e-9):,.1f} tokens/s"


def _bytes(count: int) -> str:
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
