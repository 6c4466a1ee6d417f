"""The text of an evaluation: the same tokens at every length, spread over the split."""

import shutil

import numpy as np
import pytest
import torch

from mosar.data.prepare import prepare
from mosar.errors import DataError, ModelError
from mosar.evaluation import validation_text as text_module
from mosar.evaluation.validation_text import ValidationText


def targets(text, length):
    return torch.cat([tokens[:, 1:].flatten() for tokens, _ in text.batches(length)])


@pytest.mark.parametrize("lengths", [(64, 128, 256), (64,), (60, 90), (7, 50, 100)])
def test_every_length_predicts_the_same_tokens(loaded, lengths, monkeypatch):
    monkeypatch.setattr(text_module, "PASS_TOKENS", 150)
    text = ValidationText(loaded(), lengths)
    assert text.block % max(lengths) == 0
    assert text.tokens == len(text.blocks) * text.block > 0
    expected = torch.cat([text.stream.windows([block], text.block)[0, 1:] for block in text.blocks])
    for length in lengths:
        batches = list(text.batches(length))
        assert len(batches) == text.passes(length)
        assert all(tokens.shape[1] == length + 1 for tokens, _ in batches)
        assert all(len(tokens) == 1 or len(tokens) * length <= 150 for tokens, _ in batches)
        assert torch.equal(targets(text, length), expected)


def test_the_amount_is_that_of_64_steps_or_all_there_is(loaded):
    # 64 steps see 64 x 8 x 64 tokens, the split has 3,049.
    text = ValidationText(loaded(), (64, 256))
    assert text.tokens == (text.stream.num_tokens - 1) // 256 * 256
    few = ValidationText(loaded(), (64, 256), tokens=1000)
    assert few.tokens == 3 * 256
    there = few.stream.num_windows(256)
    assert few.blocks.tolist() == [0, there // 3, 2 * there // 3]
    small = loaded("mosar", "train.micro_batch=1", "train.accumulation=1", "model.max_length=32")
    assert ValidationText(small, (32,)).tokens == 64 * 32


def test_documents_follow_the_windows(loaded):
    isolated = loaded("mosar", "data.isolate_documents=true")
    text = ValidationText(isolated, (64, 128))
    for tokens, segments in text.batches(64):
        assert segments.shape == (len(tokens), 64)
        ends = tokens[:, 1:-1] == text.stream.end_of_text
        assert torch.equal(segments[:, 1:] - segments[:, :-1], ends.long())
    assert all(segments is None for _, segments in ValidationText(loaded(), (64,)).batches(64))


def test_too_long_or_too_few(loaded):
    with pytest.raises(ModelError, match=r"3049 tokens, too few for a window of 4096 .*--len"):
        ValidationText(loaded(), (64, 4096))
    with pytest.raises(ModelError, match=r"a block of 6300, which windows of 63, 100 divide"):
        ValidationText(loaded(), (63, 100))
    with pytest.raises(ValueError, match=r"^tokens must be at least 256, for a win.*; got 255"):
        ValidationText(loaded(), (64, 256), tokens=255)
    with pytest.raises(
        ValueError, match=r"at least 180, for a block of 180, which windows of 60, "
    ):
        ValidationText(loaded(), (60, 90), tokens=120)


def test_other_and_damaged_data_is_refused(loaded, dataset, tmp_path):
    (tmp_path / "a.txt").write_text("Another text. " * 400)
    (tmp_path / "b.txt").write_text("And one more. " * 400)
    other = tmp_path / "other"
    prepare([str(tmp_path / "a.txt")], other, valid=[str(tmp_path / "b.txt")])
    with pytest.raises(ModelError, match=r"other is not the data that .* --data"):
        ValidationText(loaded(), (64,), data=other)
    damaged = shutil.copytree(dataset, tmp_path / "damaged")
    tokens = np.fromfile(damaged / "valid.bin", dtype="<u2")
    tokens[100] ^= 1
    tokens.tofile(damaged / "valid.bin")
    with pytest.raises(DataError, match=r"valid.bin was altered"):
        ValidationText(loaded(), (64,), data=damaged)
