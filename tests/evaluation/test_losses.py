"""Losses by token, window and position against their definitions."""

import pytest
import torch
import torch.nn.functional as F

from mosar.evaluation import losses
from mosar.evaluation.losses import LossTally, bucket_bounds, token_losses


@pytest.mark.parametrize("chunk", [1, 1 << 12, 1 << 21])
def test_token_losses_are_those_of_the_logits(loaded, monkeypatch, chunk):
    monkeypatch.setattr(losses, "_CHUNK_LOGITS", chunk)
    decoder = loaded("rope").decoder
    assert decoder.model_config.final_softcap is not None
    generator = torch.Generator().manual_seed(0)
    hidden = 5 * torch.randn(3, 70, 32, generator=generator)
    targets = torch.randint(257, (3, 70), generator=generator)
    expected = F.cross_entropy(decoder.logits(hidden).transpose(1, 2), targets, reduction="none")
    torch.testing.assert_close(token_losses(decoder, hidden, targets), expected)


def test_bounds_are_eighths_and_the_training_length():
    assert bucket_bounds(64, 64) == [0, 8, 16, 24, 32, 40, 48, 56, 64]
    assert bucket_bounds(256, 64) == [0, 32, 64, 96, 128, 160, 192, 224, 256]
    assert 64 in bucket_bounds(100, 64) and 64 not in bucket_bounds(50, 64)
    assert bucket_bounds(5, 64) == [0, 1, 2, 3, 4, 5]


def test_tally():
    values = torch.rand(6, 100, generator=torch.Generator().manual_seed(1))
    tally = LossTally(100, 64)
    for part in values.split([1, 2, 3]):
        tally.add(part)
    exact = values.double()
    assert tally.windows == 6
    assert tally.mean == pytest.approx(float(exact.mean()), rel=1e-12)
    assert tally.stderr == pytest.approx(float(exact.mean(dim=1).std()) / 6**0.5, rel=1e-9)
    buckets = tally.buckets()
    assert [row[:2] for row in buckets] == list(
        map(list, zip(tally.bounds, tally.bounds[1:], strict=False))
    )
    for first, end, mean, tokens in buckets:
        assert mean == pytest.approx(float(exact[:, first:end].mean()), rel=1e-12)
        assert tokens == 6 * (end - first)
    one = LossTally(10, 10)
    one.add(torch.ones(1, 10))
    assert (one.mean, one.stderr) == (1.0, 0.0)
