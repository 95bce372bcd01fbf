"""Looks at cores, memory, limits and disks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from sapwood.cli.doctor.finding import Finding

_GIB = 1 << 30
_DEMO_BYTES = 5 * _GIB
"""Memory that two workers on the demo model take."""
_FEW_FILES = 4096
_LITTLE_DISK = 2 * _GIB
_CGROUP = Path("/sys/fs/cgroup")


def examine_cores() -> Finding:
    """CPUs that this process may use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _text(_CGROUP / "cpu.max").partition(" ")
    if quota.isdigit() and int(quota) < count * int(period):
        return Finding(
            "cores",
            "note",
            f"{count}; the container may use {int(quota) / int(period):.1f} at a time",
            "sapwood up --threads N, with as many for all workers together as it may use",
        )
    return Finding("cores", "ok", str(count))


def examine_memory(meminfo: str | None = None) -> Finding:
    """Memory that is free, by the container's limit too.

    Args:
        meminfo: The text of ``/proc/meminfo``; None: this machine's.
    """
    text = _text(Path("/proc/meminfo")) if meminfo is None else meminfo
    values = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in text.splitlines() if line}
    if "MemTotal" not in values:
        return Finding("memory", "note", "this system does not say how much there is")
    total, free = values["MemTotal"], values.get("MemAvailable", values.get("MemFree", 0))
    limit = _text(_CGROUP / "memory.max")
    if limit.isdigit() and int(limit) < total:
        total = int(limit)
        free = min(free, total - int(_text(_CGROUP / "memory.current") or 0))
    found = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    if free < _DEMO_BYTES:
        note = f"{found}; two workers on the demo model take {_DEMO_BYTES / _GIB:.0f}"
        return Finding("memory", "note", note, "sapwood up --workers 1 --worker-kv-cache-gb 0.25")
    return Finding("memory", "ok", found)


def examine_files() -> Iterator[Finding]:
    """How many files and connections a process may have open."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 < most < _FEW_FILES:
        yield Finding("open files", "note", f"{most} a process: the router takes one a client", "ulimit -n 65536")
    else:
        yield Finding("open files", "ok", f"{most} a process")


def examine_disks() -> Iterator[Finding]:
    """Where models are kept: whether there is room, and whether this user may write."""
    from sapwood_common.models.model_files import packaged_path, sapwood_home

    yield _disk("SAPWOOD_HOME", sapwood_home(), needed=not packaged_path("demo").is_file())
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    yield _disk("HF_HOME", home, needed=False)
    if packaged_path("demo").is_file():
        yield Finding("demo model", "ok", str(packaged_path("demo")))
    else:
        yield Finding("demo model", "note", "not here yet; `sapwood up` fetches it", "sapwood model fetch demo")


def _disk(variable: str, folder: Path, *, needed: bool) -> Finding:
    there = next((parent for parent in (folder, *folder.parents) if parent.exists()), Path("/"))
    free = shutil.disk_usage(there).free
    found = f"{folder}: {free / _GIB:.1f} GiB free"
    mend = f"{variable}=/a/folder/elsewhere"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding(
            f"disk {variable}", "missing" if needed else "note", f"{found}, but this user may not write", mend
        )
    return (
        Finding(f"disk {variable}", "note", found, mend)
        if free < _LITTLE_DISK
        else Finding(f"disk {variable}", "ok", found)
    )


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
