"""CPUs that a process may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """CPUs that this process may use: those it may run on, or as many whole ones as a container may take at a time; at least 1.

    Args:
        cgroup: Where the kernel tells of the process's control group.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # there is no such file, or no limit: "max 100000"
        quota, period = (cgroup / "cpu.max").read_text().split()
        count = min(count, int(quota) // int(period))
    return max(1, count)
