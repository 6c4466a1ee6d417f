"""What `mosar generate` does: write on stdout, say on stderr what it took."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from mosar.generation.source import MeasuredReader, Source, open_source
from mosar.generation.streaming import stream_text
from mosar.model.generation import Sampling, write_tokens


def run_generate_command(
    folder: Path,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    routing: str | None,
    step: int | None,
    data: Path | None,
    echo: bool,
    stats: bool,
) -> None:
    """Writes the text that follows the prompt as it comes; prompt "-": stdin."""
    # What was asked for is checked before the model is loaded, which may take long.
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
    if sys.stdout is None:
        raise ValueError("stdout is closed, and the text goes there")
    prompt = _read_prompt(prompt)
    source = open_source(folder, routing=routing, step=step, data=data)
    timed = TimedReader(source.reader)
    tokens = _encode(source, prompt)
    written = write_tokens(
        timed,
        tokens,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        stop=source.end_of_text,
    )
    if echo:
        _show(prompt, sys.stdout)
    for piece in stream_text(written, source.decode, tokens):
        _show(piece, sys.stdout)
    _show("\n", sys.stdout)
    if stats:
        for line in statistics(timed, source.routing):
            print(line, file=sys.stderr)


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


def _encode(source: Source, prompt: str) -> list[int]:
    """The prompt's tokens; without any, a text begins where another one ended."""
    tokens = source.encode(prompt)
    if not tokens and source.end_of_text is None:
        raise ValueError("--prompt must not be empty: the model has no token that begins a text")
    return tokens or [source.end_of_text]  # pyright: ignore[reportReturnType]


def _show(text: str, out: TextIO) -> None:
    # A terminal that cannot show a character shows a question mark.
    encoding = out.encoding or "utf-8"
    out.write(text.encode(encoding, errors="replace").decode(encoding))
    out.flush()


class TimedReader:
    """A reader that notes how long each reading took: the prompt first, then token by token."""

    def __init__(self, reader: MeasuredReader, clock: Callable[[], float] = time.perf_counter):
        self.reader, self._clock = reader, clock
        self.readings: list[tuple[int, float]] = []

    def read(self, tokens: Sequence[int]):
        start = self._clock()
        logits = self.reader.read(tokens)
        self.readings.append((len(tokens), self._clock() - start))
        return logits


def statistics(timed: TimedReader, routing: str) -> list[str]:
    """What the writing took, a line a subject."""
    reader, (prompt, *rest) = timed.reader, timed.readings
    lines = [f"routing    {routing}", f"prompt     {_rate(*prompt)}"]
    if rest:
        lines.append(f"writing    {_rate(sum(n for n, _ in rest), sum(s for _, s in rest))}")
    dense = reader.dense_bytes
    lines.append(
        f"cache      {_bytes(reader.cache_bytes)} for {reader.num_tokens:,} tokens; dense "
        f"{_bytes(dense)} ({reader.cache_bytes / max(dense, 1):.2f} ×)"
    )
    density = reader.density
    if density is not None:
        lines.append(f"density    {density:.3f} of the causal pairs are inside the support")
    return lines


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens:,} tokens in {seconds:.3f} s, {tokens / max(seconds, 1e-9):,.1f} tokens/s"


def _bytes(count: int) -> str:
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
