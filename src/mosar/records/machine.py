"""The software and the machine behind a result."""

from __future__ import annotations

import platform
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

from mosar.version import __version__


def environment() -> dict[str, Any]:
    """The software and the machine that a result was made with."""
    import torch

    return {
        "mosar": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "commit": _commit(),
    }


@lru_cache(maxsize=1)
def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@lru_cache(maxsize=1)
def _commit() -> str | None:
    """The commit of this source tree, with "+" if it was changed since; None without one."""
    folder = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout

    try:
        # An installed copy may be inside another repository; only ours tracks this file.
        git("ls-files", "--error-unmatch", __file__)
        commit = git("rev-parse", "HEAD").strip()
        return commit + ("+" if git("status", "--porcelain", "--", str(folder)) else "")
    except (OSError, subprocess.SubprocessError):
        return None
