"""Tasks of retrieval: every window can be answered from what it holds, and only so."""

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mosar.data.tasks import TASKS, make_windows

TRAIN_LENGTHS = st.sampled_from([16, 33, 64, 100, 256])


def lengths(draw, task):
    return draw(st.integers(task.shortest, 4 * task.shortest + 50))


@given(data=st.data(), train_length=TRAIN_LENGTHS, name=st.sampled_from(list(TASKS)))
def test_answers_are_where_the_distances_say(data, train_length, name):
    task = TASKS[name](train_length)
    length = lengths(data.draw, task)
    split = data.draw(st.sampled_from(["train", "valid", "test"]))
    windows = make_windows(task, range(4), length, split=split, seed=data.draw(st.integers(0, 9)))
    tokens, answers, distances = windows
    assert tokens.shape == (4, length + 1) and tokens.dtype == torch.int64
    assert int(tokens.min()) >= 0 and int(tokens.max()) < task.vocab_size
    assert answers.shape[:2] == distances.shape == (4, task.answers)
    assert (answers >= 0).all() and (answers < length).all()
    assert (distances >= 1).all()
    rows = torch.arange(4)[:, None, None]
    found = answers - distances[..., None]
    assert (found >= 0).all()
    # What has to be said stands where the distance says, for every token of an answer.
    assert torch.equal(tokens[rows, answers + 1], tokens[rows, found])
    assert int(windows.scored.sum()) == answers.numel()
    assert windows.scored[rows, answers].all()


@given(data=st.data(), train_length=TRAIN_LENGTHS)
def test_recall_tells_each_name_once_and_asks_once(data, train_length):
    task = TASKS["recall"](train_length)
    windows = make_windows(task, range(3), lengths(data.draw, task), split="test")
    for row, places, distances in zip(*windows, strict=True):
        asked = places[:, 0]
        told = asked - distances - 1
        names = row[asked]
        assert torch.equal(row[told], names)
        assert (names < task.names).all() and len(set(names.tolist())) == task.answers
        # No other token of the window is a name or a symbol, so nothing else can answer.
        assert sorted((row < task.names).nonzero()[:, 0].tolist()) == sorted(
            torch.cat([asked, told]).tolist()
        )
        symbols = row[asked + 1]
        assert (symbols >= task.names).all() and (symbols < task.names + task.symbols).all()
        assert len(set(symbols.tolist())) == task.answers
        fillers = row >= task.names + task.symbols
        assert int(fillers.sum()) == len(row) - 4 * task.answers


@given(data=st.data(), train_length=TRAIN_LENGTHS)
def test_a_passkey_is_told_once_and_asked_at_the_end(data, train_length):
    task = TASKS["passkey"](train_length)
    length = lengths(data.draw, task)
    windows = make_windows(task, range(3), length, split="train")
    for row in windows.tokens.tolist():
        assert row.count(task.key_mark) == row.count(task.ask_mark) == 1
        told, asked = row.index(task.key_mark), row.index(task.ask_mark)
        assert asked == length - 4 and told + 4 < asked
        assert row[told + 1 : told + 5] == row[asked + 1 :]
        assert len(set(row[asked + 1 :])) == 4
        filler = row[:told] + row[told + 5 : asked]
        assert all(token >= 2 + task.symbols for token in filler)
    assert windows.answers.tolist() == [[[length - 4, length - 3, length - 2, length - 1]]] * 3


@pytest.mark.parametrize("name", TASKS)
def test_a_window_follows_from_its_name_alone(name):
    task = TASKS[name](64)
    all_of_them = make_windows(task, range(6), 64, split="train", seed=3)
    for chosen in ([2], [5, 0], range(2, 5)):
        some = make_windows(task, chosen, 64, split="train", seed=3)
        for part, whole in zip(some, all_of_them, strict=True):
            assert torch.equal(part, whole[list(chosen)])
    others = [
        make_windows(task, range(6), 64, split="train", seed=4),
        make_windows(task, range(6), 64, split="test", seed=3),
        make_windows(task, range(6, 12), 64, split="train", seed=3),
    ]
    for other in others:
        assert not (other.tokens == all_of_them.tokens).all(dim=1).any()


@pytest.mark.parametrize(
    ("name", "digest"),
    [("passkey", "690e35ac2997edcd"), ("recall", "3719fac83c03c1f0")],
)
def test_windows_stay_the_same(name, digest):
    """Runs resume and compare by these: whoever changes them must change VERSION."""
    windows = make_windows(TASKS[name](64), range(8), 100, split="test")
    found = hashlib.sha256(b"".join(part.numpy().astype("<i8").tobytes() for part in windows))
    assert found.hexdigest()[:16] == digest


@pytest.mark.parametrize(("name", "least"), [("passkey", 4), ("recall", 1)])
def test_every_octave_is_asked_for_alike(name, least):
    task = TASKS[name](256)
    distances = make_windows(task, range(600), 256, split="test").distances.flatten()
    octaves = torch.tensor([(int(d) - 1).bit_length() for d in distances])
    first, last = (least - 1).bit_length(), 8
    counts = torch.bincount(octaves, minlength=last + 1)
    if name == "recall":
        # Distances are odd: 1, then 3, then 5 and 7, and so on.
        assert (distances % 2 == 1).all()
        counts = torch.cat([counts[:1], counts[2:]])
    else:
        assert counts[:first].sum() == 0
        counts = counts[first:]
    share = len(distances) / len(counts)
    # Four standard deviations of a share, and what crowding costs the long ones.
    assert (counts > share - 4 * share**0.5 - 0.15 * share).all(), counts
    assert (counts < share + 4 * share**0.5 + 0.15 * share).all(), counts


@pytest.mark.parametrize(("name", "shortest"), [("passkey", 16), ("recall", 64)])
def test_too_short_a_window_is_refused(name, shortest):
    task = TASKS[name](64)
    make_windows(task, [0], shortest, split="test")
    with pytest.raises(ValueError, match=f"at least {shortest} for {name}, got {shortest - 1}"):
        make_windows(task, [0], shortest - 1, split="test")
