"""Times competitors in turn, so that disturbances of the machine affect all of them."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from functools import partial

# Shorter calls are repeated within a sample, so that the clock and the loop do not count.
_SAMPLE_SECONDS = 5e-3
_MIN_ROUNDS, _MAX_ROUNDS = 5, 30

Call = Callable[[], object]


def wall_seconds(call: Call, repeats: int) -> float:
    """Seconds per call, over `repeats` calls."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return max((time.perf_counter() - start) / repeats, 1e-9)


def cpu_seconds(call: Call, repeats: int) -> float:
    """Seconds of the process's CPU time a call, over `repeats` calls; others do not count."""
    start = time.process_time()
    for _ in range(repeats):
        call()
    return max((time.process_time() - start) / repeats, 1e-9)


def interleave(
    calls: Mapping[str, Call],
    *,
    seconds: float,
    time_calls: Callable[[Call, int], float] = wall_seconds,
) -> dict[str, tuple[float, ...]]:
    """Milliseconds per call of each competitor, one sample per round; about `seconds` in all.

    `time_calls` gives the seconds a call takes over some calls.

    Every call runs once before to warm up, and that run says how many rounds there are: at least 5,
    at most 30. Every other round goes backwards, so that nobody always follows the same neighbour.
    """
    samplers, round_seconds = {}, 0.0
    for name, call in calls.items():
        estimate = time_calls(call, 1)
        repeats = max(1, math.ceil(_SAMPLE_SECONDS / estimate))
        samplers[name] = partial(time_calls, call, repeats)
        round_seconds += estimate * repeats
    return _take_samples(samplers, seconds, round_seconds)


def interleave_passes(
    passes: Mapping[str, Callable[[], float]], *, seconds: float
) -> dict[str, tuple[float, ...]]:
    """The same of competitors that prepare themselves untimed and give the seconds of one step."""
    return _take_samples(passes, seconds, sum(wall_seconds(one, 1) for one in passes.values()))


def _take_samples(
    samplers: Mapping[str, Callable[[], float]], seconds: float, round_seconds: float
) -> dict[str, tuple[float, ...]]:
    if not samplers:
        return {}
    rounds = min(_MAX_ROUNDS, max(_MIN_ROUNDS, int(seconds / round_seconds)))
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for index in range(rounds):
            for name in list(samplers) if index % 2 == 0 else reversed(list(samplers)):
                samples[name].append(1e3 * samplers[name]())
    finally:
        if collecting:
            gc.enable()
    return {name: tuple(times) for name, times in samples.items()}
