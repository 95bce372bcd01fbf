"""A child process that an event loop can wait for, started without running anybody's fork handlers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from sapwood_common.python_process import python_command, python_environment

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TELLS = Path("/proc/self/stat").exists()


class ChildProcess:
    """A Python process that is a child of this one.

    It is not asyncio's: uvloop forks, and a fork in a process where gRPC's threads run gives a child that now and then ends
    by SIGSEGV before it has become the program. ``subprocess`` calls vfork, which runs no fork handlers. A thread waits for
    the end.

    Args:
        command: The arguments of Python.
        said: What it reads from its standard input, which others cannot see, as they can a command line.
        descriptors: File descriptors that it gets, by the same numbers.
    """

    def __init__(self, command: Sequence[str], said: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        with tempfile.TemporaryFile() as file:  # not a pipe: it never blocks
            file.write(said)
            file.seek(0)
            self._process = subprocess.Popen(
                python_command(*command), stdin=file, pass_fds=descriptors, env=python_environment()
            )
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        threading.Thread(target=self._watch, args=(asyncio.get_running_loop(),), daemon=True).start()

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the number of the signal that ended it, or None while it runs."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """Waits for the end; returns :attr:`returncode`. May be cancelled, and be called by several."""
        return await asyncio.shield(self._ended)

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, or is about to, as the kernel tells; False where the kernel does not tell."""
        return _TELLS and self._stat()[:1] in ([], [b"Z"], [b"X"])

    def cpu_ticks(self) -> int:
        """The CPU time that it has used, in the kernel's ticks; 0 where the kernel does not tell."""
        fields = self._stat()
        return int(fields[11]) + int(fields[12]) if fields else 0

    def state(self) -> str:
        """What its main thread does: ``R`` runs or waits for a CPU, ``S`` sleeps, ``D`` waits for a disk, ``T`` is stopped;
        ``R`` where the kernel does not tell."""
        fields = self._stat()
        return fields[0].decode() if fields else "R"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it; False where the kernel does not tell."""
        return self.state() in ("T", "t")

    @property
    def wants_cpu(self) -> bool:
        """Whether one of its threads runs or waits for a CPU; False where the kernel does not tell."""
        try:
            threads = [each.name for each in Path(f"/proc/{self._process.pid}/task").iterdir()]
        except OSError:
            return False
        return any(_stat_of(f"{self._process.pid}/task/{thread}")[:1] == [b"R"] for thread in threads)

    def resident_bytes(self) -> int:
        """The memory that it has in use, what it shares with others included; 0 where the kernel does not tell."""
        fields = self._stat()
        return int(fields[21]) * _PAGE if fields else 0

    def show_stacks(self) -> None:
        """Has it write its threads' stacks to standard error (``core/child.py``)."""
        self._process.send_signal(signal.SIGUSR2)

    def kill(self) -> None:
        """Sends SIGKILL; nothing happens after the end."""
        self._process.kill()

    def _stat(self) -> list[bytes]:
        return _stat_of(str(self._process.pid))

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._ended.set_result, code)


def _stat_of(task: str) -> list[bytes]:
    """What the kernel tells of a process or thread, from its state on; empty if it tells nothing, or there is none."""
    try:
        stat = Path(f"/proc/{task}/stat").read_bytes()
    except OSError:
        return []
    return stat.rpartition(b")")[2].split()  # the name before may hold anything
