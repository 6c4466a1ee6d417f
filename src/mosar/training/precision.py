"""Precision of a pass: float32, or matrix products in bfloat16 if the machine supports them."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import torch

from mosar.errors import TrainingError

if TYPE_CHECKING:
    from mosar.training.config import TrainConfig


def automatic_precision(device: str) -> Literal["fp32", "bf16"]:
    """bfloat16 on a GPU that supports it, otherwise float32."""
    if device.partition(":")[0] != "cuda":
        return "fp32"
    # Without a GPU, this is for a plan of a run on one.
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "fp32"
    return "bf16"


def autocast(train: TrainConfig) -> AbstractContextManager[object]:
    """The context of a pass; parameters stay in float32."""
    device = torch.device(train.device).type
    return torch.autocast(device, torch.bfloat16, enabled=train.precision == "bf16")


def check_precision(train: TrainConfig) -> None:
    """A TrainingError if bfloat16 would kill the process."""
    if train.precision == "bf16" and torch.device(train.device).type == "cpu":
        check_cpu_bfloat16("train.precision=fp32")


def check_cpu_bfloat16(instead: str) -> None:
    """A TrainingError if bfloat16 would kill the process; `instead`: the setting that avoids it."""
    if not _survives_bfloat16():
        raise TrainingError(
            "bfloat16 crashes on this machine, which reports CPU instructions that it does not "
            f"have; set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 or {instead}"
        )


@lru_cache(maxsize=1)
def _survives_bfloat16() -> bool:
    # Some virtual machines report AMX and kill a process that uses it, so try in another process.
    # -P: do not run a torch.py in the working directory.
    code = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True).returncode >= 0
