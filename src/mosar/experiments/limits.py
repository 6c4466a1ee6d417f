"""How many cores and how much memory this process may use, within the limits of its control group.

A container sees the cores and the memory of the whole machine; its limits are in the files of its
control group (cgroup, version 1 or 2), or of a group above it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
# Limit and use, in version 2 and in version 1; then the caches that the system would give up.
_MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_CACHE = ("inactive_file", "total_inactive_file")


def available_cores() -> int:
    quotas = [max(1, math.ceil(quota)) for quota in _core_quotas()]
    return min([len(os.sched_getaffinity(0)), *quotas])


def available_memory() -> int:
    """Bytes that could be allocated, including caches that the system would give up."""
    return max(0, min([_free_memory(), *_group_memory()]))


def _free_memory() -> int:
    """Of the whole machine."""
    try:
        lines = (_ROOT / "proc/meminfo").read_text().splitlines()
        (size,) = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
        return 1024 * int(size)
    except (OSError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_memory() -> Iterator[int]:
    for folder in _group_folders("memory"):
        for limit, used in _MEMORY_FILES:
            try:
                most, now = (int((folder / name).read_text()) for name in (limit, used))
            except (OSError, ValueError):
                # There is no such file, or it says "max": no limit.
                continue
            yield most - now + _reclaimable(folder)


def _reclaimable(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    found = dict(line.split() for line in lines)
    return max(int(found.get(name, 0)) for name in _CACHE)


def _core_quotas() -> Iterator[float]:
    for folder in _group_folders("cpu"):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            try:
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                quota, period = ((folder / name).read_text().strip() for name in names)
            except OSError:
                continue
        # "max" and -1 say that there is no limit.
        if quota.isdecimal() and int(period):
            yield int(quota) / int(period)


def _group_folders(controller: str) -> Iterator[Path]:
    """The folders of this process's groups and of the groups above them."""
    try:
        lines = (_ROOT / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = _ROOT / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = mounted / controller if controllers else mounted
        group = base / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(base))
