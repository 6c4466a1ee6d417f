"""The native kernels as narrower instruction sets than this CPU's compile them.

Every other test runs what the compiler makes of all that this CPU has. Elsewhere vectors are
shorter, registers fewer and sums in another order, with the same budget. Each set is built once
(the build's own cache keeps it) and tested in a process of its own: a process holds the operators
once.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from mosar.kernels import native
from mosar.kernels.build import instruction_sets, load_library

TESTS = Path(__file__).parent.parent
# One test of each kind, on every native path: sums over dimensions, keys and queries, masks,
# gates, half precision, decoding.
CHOSEN = (
    "kernels/test_paths.py::test_any_barrier[native-soft]",
    "kernels/test_paths.py::test_traits",
    "kernels/test_length.py::test_many_keys",
    "kernels/test_decode.py::test_traits",
    "kernels/test_decode.py::test_every_float16_is_widened_exactly",
    "kernels/test_elementwise.py",
    "core/test_choice_gradient.py::test_the_native_pass_gives_the_same",
)


def run_tests(isa: str) -> int:
    native.load_library = partial(load_library, isa)
    chosen = [str(TESTS / name) for name in CHOSEN]
    return pytest.main(
        ["-q", "-p", "no:cacheprovider", "-k", "not tiled", "-m", "not slow", *chosen]
    )


@pytest.mark.parametrize("isa", instruction_sets()[:-1])
def test_narrower_instruction_sets(isa):
    environment = {name: text for name, text in os.environ.items() if "PYTEST" not in name}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from kernels.test_instruction_sets import run_tests as run; "
            f"raise SystemExit(run({isa!r}))",
        ],
        env={**environment, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path[1:]])},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_the_widest_set_is_what_native_means():
    sets = instruction_sets()
    assert not sets or sets[0] == "portable"
    assert len({load_library(isa) for isa in ("native", *sets[:1])}) == 1 + bool(sets)
