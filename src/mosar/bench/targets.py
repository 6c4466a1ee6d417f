"""What the kernels are meant to reach, as ratios within one run on two cores in float32."""

from __future__ import annotations

from typing import NamedTuple

from mosar.bench.cases import Shape
from mosar.records import AttentionBenchmark

# Share of 1 / rho over dense SDPA that sparse routing must reach from 8192 tokens on.
_FORWARD = {Shape(8, 1, 256): 0.8, Shape(9, 3, 64): 0.7, Shape(8, 8, 64): 0.6}
_BACKWARD = {Shape(8, 1, 256): 0.6, Shape(9, 3, 64): 0.45, Shape(8, 8, 64): 0.45}


class Verdict(NamedTuple):
    """A target and whether it is met."""

    target: str
    met: bool


def verdicts(record: AttentionBenchmark) -> list[Verdict]:
    """The targets that apply to a row and have a figure; none for a wrong result."""
    shape, n = Shape(record.heads, record.kv_heads, record.head_dim), record.length
    # Nothing has been asked of a GPU yet.
    if shape not in _FORWARD or not record.correct or "device" in record.environment:
        return []
    found = []
    if record.speedup is not None:
        found += _speed_verdicts(record, shape, n)
    if record.mode == "sparse" and n >= 4096 and record.plan_share is not None:
        found.append(Verdict("plan ≤ 3 %", record.plan_share <= 0.03))
    if record.mode == "soft-train" and n == 8192 and record.memory_ratio is not None:
        found.append(Verdict("memory ≤ 2× SDPA", record.memory_ratio <= 2))
    return found


def _speed_verdicts(record: AttentionBenchmark, shape: Shape, n: int) -> list[Verdict]:
    speedup = record.speedup or 0.0
    efficiency = speedup * record.density
    if record.mode == "soft-train" and n == 2048:
        return [Verdict("≤ 1.3× SDPA", speedup >= 1 / 1.3)]
    if record.mode == "distance-train" and n == 2048:
        return [Verdict("≤ 1.2× SDPA", speedup >= 1 / 1.2)]
    if record.mode == "sparse-train" and n >= 8192:
        return [_share_of_ideal(_BACKWARD[shape], efficiency)]
    if record.mode != "sparse" or n < 256:
        return []
    if n >= 4096:
        return [_share_of_ideal(_FORWARD[shape] * (1 if n >= 8192 else 0.8), efficiency)]
    if n >= 2048:
        return [Verdict("≥ 1.5×", speedup >= 1.5)]
    return [Verdict("≤ 1.05× SDPA", speedup >= 1 / 1.05)] if n <= 1024 else []


def _share_of_ideal(share: float, efficiency: float) -> Verdict:
    return Verdict(f"≥ {share:.2g}/ρ", efficiency >= share)
