"""Cores and memory within the limits of control groups, both versions."""

import pytest

from mosar.experiments import limits

FREE = 16_000_000 * 1024


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Writes files of a machine with 8 cores; a path ends up below its root."""
    monkeypatch.setattr(limits, "_ROOT", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))

    def write(files):
        for name, text in ({"proc/meminfo": "MemAvailable: 16000000 kB\n"} | files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


def test_without_limits_the_machine_counts(machine):
    machine({})
    assert (limits.available_cores(), limits.available_memory()) == (8, FREE)
    machine(
        {
            "proc/self/cgroup": "4:memory:/job\n1:cpu,cpuacct:/\n0::/\n",
            "sys/fs/cgroup/memory.max": "max\n",
            "sys/fs/cgroup/memory.current": "1000\n",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        }
    )
    assert (limits.available_cores(), limits.available_memory()) == (8, FREE)


@pytest.mark.parametrize("group", ["", "/slice/job"])
def test_version_2_counts_groups_above_and_caches(machine, group):
    machine(
        {
            "proc/self/cgroup": f"0::{group or '/'}\n",
            f"sys/fs/cgroup{group}/cpu.max": "max 100000\n" if group else "250000 100000\n",
            "sys/fs/cgroup/cpu.max": "250000 100000\n",
            f"sys/fs/cgroup{group}/memory.max": "3000000000\n",
            f"sys/fs/cgroup{group}/memory.current": "1000000000\n",
            f"sys/fs/cgroup{group}/memory.stat": "anon 5\ninactive_file 200000000\n",
        }
    )
    assert (limits.available_cores(), limits.available_memory()) == (3, 2_200_000_000)


def test_version_1(machine):
    machine(
        {
            "proc/self/cgroup": "4:memory:/a/b\n1:cpu,cpuacct:/a\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "2000000000\n",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "2500000000\n",
            "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "5000000000\n",
            "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": "1\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
        }
    )
    assert (limits.available_cores(), limits.available_memory()) == (1, 0)
