"""Text while it is written: pieces that join to the whole, and no half of a character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mosar.data.tokenizer import ByteTokenizer, train_bpe
from mosar.generation.streaming import stream_text

BPE = train_bpe(["one two three, naïve ☕ " * 20], 280)
TOKENIZERS = pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["byte", "bpe"])
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)


@TOKENIZERS
@given(prompt=TEXTS, text=TEXTS)
def test_pieces_join_to_the_text(tokenizer, prompt, text):
    before, tokens = tokenizer.encode(prompt), tokenizer.encode(text)
    pieces = list(stream_text(tokens, tokenizer.decode, before))
    assert "".join(pieces) == text
    assert all(pieces)


@TOKENIZERS
@given(tokens=st.lists(st.integers(0, 255), max_size=20))
def test_any_tokens_give_what_decoding_gives(tokenizer, tokens):
    """Also bytes that are no text."""
    joined = "".join(stream_text(tokens, tokenizer.decode))
    assert joined == tokenizer.decode(tokens)


def test_characters_come_whole_and_at_once():
    tokenizer = ByteTokenizer()
    shown, sent = [], []

    def tokens():
        for token in "a☕b".encode():
            sent.append(token)
            yield token
            shown.append("".join(pieces))

    pieces = []
    for piece in stream_text(tokens(), tokenizer.decode):
        pieces.append(piece)
    assert pieces == ["a", "☕", "b"]
    assert shown == ["a", "a", "a", "a☕", "a☕b"]


def test_a_space_that_is_dropped_at_the_start_is_not_dropped_in_the_middle():
    """As tokenizers with a word marker decode."""
    words = ["▁one", "▁two", "▁three"]
    decode = lambda ids: "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")  # noqa: E731
    assert "".join(stream_text([1, 2], decode, [0])) == " two three"
    assert list(stream_text([0, 1], decode)) == ["one", " two"]
