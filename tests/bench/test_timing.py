"""Interleaved timing: who is called how often and in which order. No test looks at the clock."""

import gc

import pytest

from mosar.bench import timing
from mosar.bench.timing import interleave, interleave_passes


@pytest.fixture
def clock(monkeypatch):
    """A clock that calls move by hand."""

    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_rounds_alternate_and_samples_are_times_of_a_call(clock):
    order = []

    def call(name, seconds):
        def run():
            order.append(name)
            clock.now += seconds

        return run

    calls = {"fast": call("a", 0.1), "slow": call("b", 0.5)}
    samples = interleave(calls, seconds=3.7)
    assert order == [*"ab", *"ab", *"ba", *"ab", *"ba", *"ab", *"ba"]
    assert samples["fast"] == pytest.approx([100] * 6)
    assert samples["slow"] == pytest.approx([500] * 6)


@pytest.mark.parametrize(("seconds", "rounds"), [(0.001, 5), (1.0, 10), (1e6, 30)])
def test_number_of_rounds_is_bounded(clock, seconds, rounds):
    def call():
        clock.now += 0.0999

    assert len(interleave({"only": call}, seconds=seconds)["only"]) == rounds


def test_short_calls_are_repeated_within_a_sample(clock):
    count = 0

    def call():
        nonlocal count
        count += 1
        clock.now += 0.001

    samples = interleave({"only": call}, seconds=0.001)
    assert count == 1 + 5 * 5
    assert samples["only"] == pytest.approx([1] * 5)


def test_garbage_collection_is_off_while_timing_and_on_again_after_an_error():
    def call():
        if not gc.isenabled():
            raise RuntimeError("seen")

    with pytest.raises(RuntimeError, match="seen"):
        interleave({"only": call}, seconds=0.001)
    assert gc.isenabled()


def test_passes_give_their_own_times(clock):
    order = []

    def one_pass(name, seconds):
        def run():
            order.append(name)
            clock.now += 0.5
            return seconds

        return run

    samples = interleave_passes({"a": one_pass("a", 0.1), "b": one_pass("b", 0.2)}, seconds=6.1)
    assert order == [*"ab", *"abba" * 3]
    assert samples == {"a": pytest.approx([100] * 6), "b": pytest.approx([200] * 6)}
