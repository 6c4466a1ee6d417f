"""A dataset's tokenizer in the form of transformers: the same tokens for every text."""

from __future__ import annotations

from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Fast
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from transformers import PreTrainedTokenizerFast

from mosar.data.tokenizer import END_OF_TEXT, ByteTokenizer, FileTokenizer, Tokenizer


def fast_tokenizer(tokenizer: Tokenizer, max_length: int) -> PreTrainedTokenizerFast:
    """`tokenizer` for transformers; it pads on the left with end-of-text.

    "<|endoftext|>" spelt out in a text is text, as it was in training.
    """
    if isinstance(tokenizer, ByteTokenizer):
        fast, end = _byte_tokenizer(tokenizer), END_OF_TEXT
    else:
        assert isinstance(tokenizer, FileTokenizer)
        fast, end = Fast.from_str(tokenizer.file_bytes().decode()), tokenizer.end_of_text_token
        fast.no_truncation()
        fast.no_padding()
    made = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        eos_token=end,
        pad_token=end,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )
    assert made.convert_tokens_to_ids(end) == tokenizer.end_of_text
    return made


def _byte_tokenizer(tokenizer: ByteTokenizer) -> Fast:
    """A BPE without merges: a byte's token has the byte's own number."""
    vocabulary = {character: byte for byte, character in enumerate(_characters())}
    fast = Fast(models.BPE(vocab=vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = ByteLevelDecoder()
    fast.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    assert fast.token_to_id(END_OF_TEXT) == tokenizer.end_of_text
    return fast


def _characters() -> list[str]:
    """The character by which byte-level tokenizers write each of the 256 bytes.

    Printable Latin-1 stands for itself, the others follow in order from U+0100 on.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]
