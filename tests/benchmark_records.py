"""A benchmark record with round figures, for tests of what is made of records."""

from __future__ import annotations

from typing import Any

from mosar.records import AttentionBenchmark, ErrorCheck, Measurement


def make_benchmark(**changes: Any) -> AttentionBenchmark:
    """Density 0.1, SDPA 80 ms, ours 10 ms, the plan 0.2 ms, right."""
    fields: dict[str, Any] = {
        "mode": "sparse",
        "heads": 8,
        "kv_heads": 1,
        "head_dim": 256,
        "length": 8192,
        "labels": "independent",
        "seed": 3,
        "pairs": 1_000_000,
        "causal_pairs": 10_000_000,
        "gemm_gflops": 1000.0,
        "checks": {"out": ErrorCheck(error=1e-7, budget=1e-6)},
        "measurements": {
            "sdpa": Measurement(samples_ms=(70.0, 80.0, 90.0), peak_bytes=1000),
            "flex": Measurement(unavailable="no compiler"),
            "ours": Measurement(samples_ms=(12.0, 8.0, 10.0), peak_bytes=1500),
        },
        "plan": Measurement(samples_ms=(0.1, 0.2, 0.3)),
    }
    return AttentionBenchmark(**fields | changes)


def make_wrong_benchmark(**changes: Any) -> AttentionBenchmark:
    """The same with an error beyond its budget."""
    return make_benchmark(checks={"out": ErrorCheck(error=2e-6, budget=1e-6)}, **changes)
