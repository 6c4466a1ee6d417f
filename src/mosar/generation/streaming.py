"""Turns tokens into text as they arrive; a character is shown when all of its tokens are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

UNFINISHED = "�"


def stream_text(
    tokens: Iterable[int], decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()
) -> Iterator[str]:
    """Pieces of text that together are what `decode` makes of the tokens after the prompt.

    A tokenizer may write a token otherwise at the start of a text (without its space, say): each
    is decoded together with those of the piece before it.
    """
    seen = list(prompt)
    # What was shown ends at `shown`, and the piece before it started at `context`.
    context, shown = max(len(seen) - 8, 0), len(seen)
    for token in tokens:
        seen.append(token)
        piece = _added(seen, context, shown, decode)
        # Half of a character so far; a tokenizer may also have nothing to show for a token.
        if piece and not piece.endswith(UNFINISHED):
            yield piece
            context, shown = shown, len(seen)
    if rest := _added(seen, context, shown, decode):
        yield rest


def _added(
    seen: Sequence[int], context: int, shown: int, decode: Callable[[Sequence[int]], str]
) -> str:
    before, now = decode(seen[context:shown]), decode(seen[context:])
    return now[len(before) :]
