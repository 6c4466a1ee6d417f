"""The native code under AddressSanitizer and UndefinedBehaviorSanitizer, by hand: `-m slow`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases import FORCED, Case, cases
from kernels.budget import PATHS, run
from model.streams import feed_all, new_cache, portions, stream, streams
from mosar import MoSARConfig, Regime
from mosar.kernels import native
from mosar.kernels.build import compile_library, find_compiler

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")
LONG = MoSARConfig(regimes=(Regime("S", 12, 0.75), Regime("M", 40.5, 0.5), Regime("G", 160, 1.0)))


def run_many_calls(library: str) -> None:
    """What the sanitizers watch: every path, forward and backward, one and two threads."""
    native.load_library = lambda: Path(library)
    native.load_operators()
    native_paths = [path for path in PATHS if path[0] != "tiled"]
    base = Case(config=LONG, dtype=torch.float32, batch=2, kv_heads=2, heads_per_kv=2)
    changes = [
        *({"num_queries": n, "num_keys": n} for n in (1, 2, 31, 33, 63, 64, 65, 129, 300)),
        *({"head_dim": d, "num_queries": 40, "num_keys": 70} for d in (1, 3, 16, 20, 80, 256)),
        *({"kv_heads": 1, "heads_per_kv": n, "num_queries": 50, "num_keys": 50} for n in (3, 8)),
        *({"probabilities": p, "num_queries": 200, "num_keys": 200} for p in FORCED),
        {"num_queries": 140, "num_keys": 150, "softcap": 3.0, "window": 30},
        {"num_queries": 140, "num_keys": 90, "positions": "gaps", "padding": "holes"},
    ]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for impl, kind in native_paths:
            for change in changes:
                run(base.with_(**change), kind, impl=impl)

    @settings(max_examples=400, deadline=None, database=None, suppress_health_check=HealthCheck)
    @given(st.data())
    def any_call(data):
        impl, kind = data.draw(st.sampled_from(native_paths))
        run(data.draw(cases(dtype=torch.float32, max_length=70)), kind, impl=impl)

    @settings(max_examples=150, deadline=None, database=None, suppress_health_check=HealthCheck)
    @given(st.data())
    def any_cache(data):
        dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
        case = data.draw(streams(max_length=150, dtype=dtype))
        cache = new_cache(case, impl="native", crop_margin=5)
        feed_all(cache, case, data.draw(portions(case.num_keys)))

    any_call()
    any_cache()
    for changes in ({"heads_per_kv": 8, "head_dim": 256}, {"heads_per_kv": 3, "head_dim": 20}):
        case = stream(config=LONG, kv_heads=2, num_keys=700, **changes)
        feed_all(new_cache(case, impl="native"), case, (600, *(1,) * 100))
    print("clean")


@pytest.mark.slow
def test_sanitizers_find_nothing(tmp_path):
    compiler, library = find_compiler(), tmp_path / "sanitized.so"
    assert compiler is not None
    compile_library(compiler, library, FLAGS)
    runtimes = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    tests = Path(__file__).parent.parent
    code = f"from kernels.test_sanitizer import run_many_calls; run_many_calls({str(library)!r})"
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(tests),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tests
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.endswith("clean\n")
