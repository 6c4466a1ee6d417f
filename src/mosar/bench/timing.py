"""Times of competitors, interleaved: what disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping

import torch

# Shorter calls are repeated within a sample: the clock and the loop must not show.
_SAMPLE_SECONDS = 5e-3
_MIN_ROUNDS, _MAX_ROUNDS = 5, 30


def interleave(
    calls: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    time_calls: Callable[[Callable[[], object], int], float] | None = None,
) -> dict[str, tuple[float, ...]]:
    """Milliseconds a call of each competitor, one sample a round; about `seconds` in all.

    `time_calls` gives the seconds a call takes over some calls; by default by the wall clock.

    Every call runs once before to warm up, and that run says how many rounds there are: at least 5,
    at most 30. Every other round goes backwards, so that nobody always follows the same neighbour.
    """
    time_calls = time_calls or wall_seconds
    estimates = {name: time_calls(call, 1) for name, call in calls.items()}
    repeats = {
        name: max(1, math.ceil(_SAMPLE_SECONDS / estimate)) for name, estimate in estimates.items()
    }
    round_seconds = sum(estimates[name] * repeats[name] for name in calls)
    rounds = min(_MAX_ROUNDS, max(_MIN_ROUNDS, int(seconds / round_seconds)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for index in range(rounds):
            for name in list(calls) if index % 2 == 0 else reversed(list(calls)):
                samples[name].append(1e3 * time_calls(calls[name], repeats[name]))
    finally:
        if collecting:
            gc.enable()
    return {name: tuple(times) for name, times in samples.items()}


def wall_seconds(call: Callable[[], object], repeats: int) -> float:
    """Seconds a call, over `repeats` calls."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return max((time.perf_counter() - start) / repeats, 1e-9)


def gemm_gflops(size: int = 2048, runs: int = 5) -> float:
    """The best rate of a square float32 matrix product: what this machine can do."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    best = min(wall_seconds(lambda: torch.mm(a, b, out=out), 1) for _ in range(runs))
    return 2 * size**3 / best / 1e9
