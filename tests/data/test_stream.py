"""The stream: packing comes back, windows tile it, and the order of an epoch is stateless."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mosar.data.config import DataConfig
from mosar.data.prepare import prepare
from mosar.data.stream import TokenStream, batch_indices
from mosar.data.tokenizer import load_tokenizer


def window_order(number, seed, epoch):
    """The order in which an epoch reads its windows."""
    return batch_indices(epoch, number, number, seed)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(str.strip)


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:270"])
def test_packing_comes_back(tokenizer, tmp_path_factory):
    @settings(max_examples=15)
    @given(st.lists(texts, min_size=1, max_size=8), st.lists(texts, min_size=1, max_size=3))
    def check(train, valid):
        with tempfile.TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as folder:
            names = {}
            for split, documents in (("train", train), ("valid", valid)):
                names[split] = []
                for number, text in enumerate(documents):
                    path = Path(folder, f"{split}{number}.txt")
                    path.write_bytes(text.encode())
                    names[split].append(str(path))
            out = Path(folder, "set")
            prepare(names["train"], out, valid=names["valid"], tokenizer=tokenizer)
            coder = load_tokenizer(out)
            for split, documents in (("train", train), ("valid", valid)):
                stream = TokenStream(out, split, verify=True)
                # A byte order mark at the beginning of a file is no text.
                wanted = [text.removeprefix("\ufeff") for text in documents]
                wanted = [text for text in wanted if text.strip()]
                ids = [
                    token for text in wanted for token in (*coder.encode(text), coder.end_of_text)
                ]
                if wanted:
                    (window,) = stream.windows([0], len(ids) - 1).tolist()
                    assert window == ids
                assert (stream.num_tokens, stream.num_documents) == (len(ids), len(wanted))

    check()


def test_windows_tile_the_stream(dataset):
    stream = TokenStream(dataset)
    (whole,) = stream.windows([0], stream.num_tokens - 1)
    for length in (1, 2, 7, 64, stream.num_tokens - 1, stream.num_tokens, 10**6):
        number = stream.num_windows(length)
        assert number == (stream.num_tokens - 1) // length
        windows = stream.windows(range(number), length)
        assert windows.shape == (number, length + 1)
        assert windows.dtype == torch.int64
        assert windows[:, :-1].flatten().equal(whole[: number * length])
        assert windows[:, 1:].flatten().equal(whole[1 : number * length + 1])


@pytest.mark.parametrize("indices", [[-1], [0, 10**6], [[0]]])
def test_indices_outside_are_refused(dataset, indices):
    stream = TokenStream(dataset)
    with pytest.raises(ValueError, match="indices must"):
        stream.windows(indices, 8)
    with pytest.raises(ValueError, match="indices must"):
        stream.segments(indices, 8)


@pytest.mark.parametrize("length", [0, -1, 2.5])
def test_a_wrong_length_is_refused(dataset, length):
    with pytest.raises(ValueError, match="length must be an integer >= 1"):
        TokenStream(dataset).num_windows(length)


def test_segments_change_where_documents_begin(dataset):
    stream = TokenStream(dataset)
    length = stream.num_tokens - 1
    (tokens,) = stream.windows([0], length)
    (segments,) = stream.segments([0], length)
    # The first document is number 0; each end-of-text opens the next, which all targets are of.
    assert segments.equal((tokens[:-1] == stream.end_of_text).cumsum(0))
    assert segments.max() == stream.num_documents - 1
    short = stream.segments(range(stream.num_windows(16)), 16)
    assert short.shape == (stream.num_windows(16), 16)
    assert short.flatten().equal(segments[: short.numel()])


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 50))
def test_an_epoch_reads_every_window_once(number, seed, epoch):
    order = window_order(number, seed, epoch)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(number))
    assert np.array_equal(order, window_order(number, seed, epoch))


@given(st.integers(1, 200), st.integers(1, 50), st.integers(0, 9), st.integers(0, 40))
def test_batches_are_slices_of_the_epochs(number, batch, seed, step):
    epochs = range((step * batch) // number, ((step + 1) * batch - 1) // number + 1)
    row = np.concatenate([window_order(number, seed, epoch) for epoch in epochs])
    start = step * batch - epochs[0] * number
    assert np.array_equal(batch_indices(step, batch, number, seed), row[start : start + batch])


def test_seeds_and_epochs_differ_and_mix_well():
    orders = [window_order(1000, seed, epoch) for seed in range(3) for epoch in range(3)]
    for i, one in enumerate(orders):
        assert abs(np.corrcoef(one, np.arange(1000))[0, 1]) < 0.12
        for other in orders[:i]:
            assert (one == other).sum() < 12
    # Each window comes first about as often as any other.
    first = np.bincount([window_order(10, 0, epoch)[0] for epoch in range(2000)], minlength=10)
    assert first.min() > 140
    assert first.max() < 260


def test_the_order_is_the_same_on_every_machine():
    """Written down: neither a version of numpy nor of Python may change a run's data."""
    assert window_order(10, 0, 0).tolist() == [2, 5, 7, 9, 4, 3, 6, 1, 8, 0]
    wanted = [517274110649, 698689810433, 165193131809, 121906338432]
    assert batch_indices(7, 4, 10**12, 3).tolist() == wanted


@pytest.mark.parametrize(("step", "batch", "number"), [(-1, 4, 10), (0, 0, 10), (0, 4, 0)])
def test_wrong_batches_are_refused(step, batch, number):
    with pytest.raises(ValueError, match="must be >="):
        batch_indices(step, batch, number, 0)


def test_config_checks_itself(tmp_path):
    assert DataConfig(folder=tmp_path, seed=np.int64(3)) == DataConfig(folder=str(tmp_path), seed=3)
    for wrong in ({"folder": ""}, {"folder": 3}, {"isolate_documents": 1}, {"seed": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            DataConfig(**wrong)
