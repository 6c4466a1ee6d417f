"""A dataset's tokenizer in transformers gives the same tokens, and they give back the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mosar.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe
from mosar.integrations.hf.tokenizer import fast_tokenizer

BPE = train_bpe(
    ["the cat sat on the mat, the mat sat on the cat. " * 20, "naïve café ☕ " * 9], 320
)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=40) | st.sampled_from(
    ["", "  the cat\n\n", "<|endoftext|>", "a<|endoftext|>b", "naïve ☕ 漢字 \x00\x7f\r\n"]
)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["byte", "bpe"])
@given(text=TEXTS)
def test_same_tokens(tokenizer, text):
    fast = fast_tokenizer(tokenizer, 32)
    tokens = tokenizer.encode(text)
    assert fast(text)["input_ids"] == tokens
    assert fast.decode(tokens) == text
    assert fast.decode([*tokens, tokenizer.end_of_text], skip_special_tokens=True) == text


def test_every_byte_is_its_own_token():
    fast = fast_tokenizer(ByteTokenizer(), 32)
    assert sorted(fast.get_vocab().values()) == list(range(257))
    assert fast("é€")["input_ids"] == list("é€".encode())


@pytest.mark.parametrize("kind", ["dataset", "bpe_dataset"])
def test_saved_and_loaded(kind, request, tmp_path):
    tokenizer = load_tokenizer(request.getfixturevalue(kind))
    fast_tokenizer(tokenizer, 32).save_pretrained(tmp_path)
    fast = AutoTokenizer.from_pretrained(tmp_path)
    text = "some text<|endoftext|> ☕"
    assert fast(text)["input_ids"] == tokenizer.encode(text)
    assert fast.eos_token_id == fast.pad_token_id == tokenizer.end_of_text
    assert fast.model_max_length == 32
    batch = fast(["a", "abc d"], padding=True, return_tensors="pt")
    assert batch["attention_mask"][0, 0] == 0 and batch["attention_mask"][:, -1].all()
