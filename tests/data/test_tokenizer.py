"""Tokenizers: what they encode comes back, and nothing in a text can end it."""

import json
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mosar.data.documents import cut_pieces
from mosar.data.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    FileTokenizer,
    parse_bpe,
    read_tokenizer,
    train_bpe,
)
from mosar.errors import DataError

SAMPLE = ["def encode(text):\n    return [ord(c) for c in text]\n", "the words of the text\n"] * 20
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(SAMPLE, 290)


@given(texts)
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.end_of_text]) == text
    assert tokenizer.decode(np.array(ids, dtype=np.int64)) == text
    assert tokenizer.decode([0xE2, 65]) == "\ufffdA"


def test_bpe_round_trip(bpe):
    @given(texts)
    def check(text):
        ids = bpe.encode(text)
        assert all(0 <= i < bpe.vocab_size for i in ids)
        assert bpe.end_of_text not in ids
        assert bpe.decode([*ids, bpe.end_of_text]) == text
        assert [list(a) for a in bpe.encode_batch([text, "x"])] == [ids, bpe.encode("x")]

    check()


def test_the_end_of_text_spelt_out_is_text(bpe):
    for tokenizer in (bpe, ByteTokenizer()):
        ids = tokenizer.encode(f"a{END_OF_TEXT}b")
        assert tokenizer.end_of_text not in ids
        assert tokenizer.decode(ids) == f"a{END_OF_TEXT}b"


def test_pieces_give_the_tokens_of_the_whole(bpe):
    @given(st.text(alphabet="ab1 \n\t'sé.", max_size=200), st.integers(4, 40))
    def check(text, length):
        text = " ".join(text[i : i + length // 2] for i in range(0, len(text), length // 2))
        pieces = list(cut_pieces([text], length))
        # A cut inside a run without white space is the only one that may change tokens.
        cuts_at_space = all(b[0] in " \n\r\t" and not a[-1].isspace() for a, b in pairwise(pieces))
        if cuts_at_space:
            assert [i for piece in pieces for i in bpe.encode(piece)] == bpe.encode(text)

    check()


def test_bpe_learns_and_stays_within_its_size(bpe):
    assert bpe.vocab_size == 290
    assert len(bpe.encode("the words of the text\n")) < 15
    tiny = train_bpe(["ab ab"], 5000)
    assert 257 < tiny.vocab_size < 270


@pytest.mark.parametrize("error", [DataError("line 7 is wrong"), KeyboardInterrupt()])
def test_what_goes_wrong_in_the_texts_comes_out(error):
    def broken():
        yield from SAMPLE
        raise error

    with pytest.raises(type(error)) as caught:
        train_bpe(broken(), 300)
    assert str(caught.value) == str(error)


def test_training_is_the_same_in_another_process(bpe):
    code = f"import mosar.data.tokenizer as t; print(t.train_bpe({SAMPLE!r}, 290).file_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == repr(bpe.file_bytes())


def changed(bpe, **changes):
    return json.dumps(json.loads(bpe.file_bytes()) | changes).encode()


def test_habits_of_a_loaded_file_are_dropped(bpe):
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": END_OF_TEXT,
    }
    loaded = FileTokenizer(changed(bpe, truncation=truncation, padding=padding), "a file")
    assert loaded.encode("the words of the text") == bpe.encode("the words of the text")
    (batch,) = loaded.encode_batch(["the words of the text"])
    assert list(batch) == bpe.encode("the words of the text")


def test_end_of_text_of_a_loaded_file(bpe):
    values = json.loads(bpe.file_bytes())
    values["added_tokens"][0]["content"] = "<stop>"
    del values["model"]["vocab"][END_OF_TEXT]
    values["model"]["vocab"]["<stop>"] = 0
    content = json.dumps(values).encode()
    with pytest.raises(DataError, match="--end-of-text"):
        FileTokenizer(content, "a file")
    assert FileTokenizer(content, "a file", "<stop>").end_of_text == 0
    # Gaps in the ids count.
    values["added_tokens"].append(values["added_tokens"][0] | {"content": "<eos>", "id": 70_000})
    more = FileTokenizer(json.dumps(values).encode(), "a file", "<eos>")
    assert more.vocab_size > bpe.vocab_size


def test_a_file_that_is_no_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer\.json"):
        read_tokenizer(tmp_path)
    with pytest.raises(DataError, match="there is no tokenizer"):
        read_tokenizer(tmp_path / "nothing")


@pytest.mark.parametrize(
    "spec", ["bpe", "bpe:", "bpe:256", "bpe:-5", "bpe:many", "bpe:²", "bpe:1048577"]
)
def test_a_wrong_vocabulary_is_refused(spec):
    with pytest.raises(ValueError, match="VOCAB from 257 to 1048576"):
        parse_bpe(spec)
    assert [parse_bpe(other) for other in ("bpe:257", "byte", "folder/bpe:300")] == [
        257,
        None,
        None,
    ]
