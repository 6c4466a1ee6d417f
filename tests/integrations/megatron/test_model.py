"""A GPTModel of Megatron-core with MoSAR, on CPU with gloo; the other file does the work."""

import subprocess
import sys

import pytest

from integrations.megatron.processes import run_processes
from mosar.lazy import install_line


def test_tensor_parallel_sizes_agree_and_the_core_is_the_operator(tmp_path):
    pytest.importorskip(
        "megatron.core.package_info",
        reason=f"MEGATRON IS NOT TESTED: megatron-core is missing: {install_line('megatron')}",
    )
    run_processes("model_processes.py", tmp_path)


def test_without_megatron_the_extra_is_named():
    code = (
        "import sys; sys.modules['megatron'] = None\n"
        "from mosar.integrations.megatron import MoSARObjectiveState, ParallelRouter\n"
        "from mosar.integrations.megatron import mosar_layer_spec\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert "mosar_layer_spec needs megatron-core, which is not installed" in said
    assert 'pip install "megatron-core>=' in said
