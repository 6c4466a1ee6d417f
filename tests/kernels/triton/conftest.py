"""The kernels in Triton's interpreter, in small blocks so that small problems have many of them."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]

    def pytest_terminal_summary(terminalreporter):
        terminalreporter.write_line("Triton is not installed: the GPU's kernels are not tested")

else:
    from triton.runtime import interpreter

    from mosar.kernels.triton import blocks, plan

    assert blocks.is_interpreted(), (
        "tests/conftest.py must set TRITON_INTERPRET before Triton is imported"
    )

    _patched = set()

    def _call_device_function(self, *args, **kwargs):
        """As InterpretedFunction.__call__, which patches the language in every call: half its time.

        Once per module is enough: what it patches for a called function it never restores.
        """
        module = self.fn.__module__
        if module not in _patched:
            interpreter._patch_lang(self.fn)
            _patched.add(module)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = _call_device_function
    _UNCHECKED = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)

    # On a GPU the ordinary maximum and minimum leave out what is not a number; numpy's do not.
    Builder = interpreter.InterpreterBuilder
    Builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    Builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)

    @pytest.fixture(autouse=True)
    def small_blocks(request, monkeypatch):
        if request.node.get_closest_marker("slow") is None:
            # Whether whole numbers overflow is 40 % of its time; slow tests ask.
            monkeypatch.setattr(interpreter.interpreter_builder, "options", _UNCHECKED)
        monkeypatch.setattr(blocks, "INTERPRETED", blocks.Blocks(32, 8, 4, 1))
        monkeypatch.setattr(plan, "BLOCK", 16)
        monkeypatch.setattr(plan, "_BLOCKS", 2)
