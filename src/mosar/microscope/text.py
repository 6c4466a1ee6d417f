"""A text for the microscope: how much of it is read, and which characters each token adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mosar.generation.streaming import UNFINISHED

# The tokenizer gets at most this many characters per token that may be shown.
_CHARACTERS_PER_TOKEN = 32


@dataclass(frozen=True)
class ReadText:
    """The tokens that are looked at."""

    tokens: list[int]
    pieces: list[str]
    """What each token adds to the text; "" where it is a part of a character, or special."""
    notes: list[str]
    """What was left out or replaced, in sentences."""


def read_text(
    text: str | bytes,
    encode: Callable[[str], list[int]],
    decode: Callable[[Sequence[int]], str],
    *,
    most: int,
) -> ReadText:
    """At most the first `most` tokens; invalid UTF-8 is replaced, and notes say so."""
    notes = []
    if isinstance(text, bytes):
        given, text = text, text.decode(errors="replace")
        if text.encode() != given:
            notes.append(f"Bytes that are not valid UTF-8 were replaced by {UNFINISHED}.")
    tokens = encode(text[: most * _CHARACTERS_PER_TOKEN])[:most]
    if not tokens:
        raise ValueError("the text is empty: there is nothing to look at")
    pieces = split_pieces(tokens, decode)
    shown = sum(map(len, pieces))
    if shown < len(text) and (len(tokens) == most or len(text) > most * _CHARACTERS_PER_TOKEN):
        notes.append(
            f"Only the first {len(tokens):,} tokens are shown: about {shown:,} of "
            f"{len(text):,} characters."
        )
    return ReadText(tokens, pieces, notes)


def split_pieces(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The characters that each token completes; all pieces together are the decoded text.

    A tokenizer may decode a token differently at the start of a text, so each token is decoded
    together with the piece before it.
    """
    pieces, context, shown = [], 0, 0
    before = ""
    for end in range(1, len(tokens) + 1):
        now = decode(tokens[context:end])
        added = now[len(before) :]
        # The other bytes of a character may follow. If the next token only adds to what is here,
        # the text itself has this sign.
        unfinished = added.endswith(UNFINISHED) and end < len(tokens)
        if unfinished:
            later = decode(tokens[context : end + 1])
            unfinished = len(later) == len(now) or not later.startswith(now)
        if added and not unfinished:
            context, shown = shown, end
            before = decode(tokens[context:end])
            pieces.append(added)
        else:
            pieces.append("")
    return pieces
