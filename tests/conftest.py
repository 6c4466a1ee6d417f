"""Settings of the whole test run.

`pytest --hypothesis-profile=thorough` draws new and many more examples.
"""

import os

# Some virtual machines report AMX and then kill the process that uses it (bfloat16 matmul).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# There is no GPU here: the GPU's kernels are interpreted. Triton reads this when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from hypothesis import settings

settings.register_profile("quick", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("thorough", deadline=None, max_examples=500, print_blob=True)
settings.load_profile("quick")

# Tests run in parallel processes; threads inside them would only fight for the same cores.
torch.set_num_threads(1)


def pytest_configure(config):
    """The marks in the tests of transformers, which tests/integrations/hf runs."""
    for name in ("flash_attn", "flash_attn_3", "flash_attn_4", "all_flash_attn", "torch_compile"):
        config.addinivalue_line("markers", f"{name}_test: of transformers")
    for name in ("accelerate_tests", "bitsandbytes", "generate"):
        config.addinivalue_line("markers", f"{name}: of transformers")


def pytest_report_teststatus(report):
    """A failure is named when it happens, also by parallel processes; pytest would print an F."""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = str(crash.message if crash else report.longrepr).partition("\n")[0]
        word = "FAILED" if report.when == "call" else "ERROR"
        category = "failed" if report.when == "call" else "error"
        return category, f"\n{word} {report.nodeid}: {reason[:300]}\n", word
    return None
