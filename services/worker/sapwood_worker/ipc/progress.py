"""Shows the gRPC front whether the scheduler process runs, and for how long it has been at its current step, even a hung one.

A step here is a round of the event loop: messages, plan, cache and model. Eight bytes of shared memory hold when it began, by the
machine's monotonic clock; zero while the loop waits for messages. Writing them takes
neither a lock nor a message, so that a step that hangs with the interpreter's lock held is seen too. Eight more hold a count that
a thread of the process raises ten times a second, during a long step as well: where it stands still, the process does.
What follows is what a rank of several shows of itself (``records/ranks/waits.py``).
"""

from __future__ import annotations

import faulthandler
import mmap
import struct
import sys
import threading
import time
from pathlib import Path

from sapwood_worker.records.ranks.waits import WAITS_BYTES, Shown, Waits

PROGRESS_FILE = "progress"
"""Name of the progress file, in the folder of the sockets."""


def progress_file(rank: int) -> str:
    """The file's name for a rank of a group; that of rank 0 is the scheduler process's."""
    return f"{PROGRESS_FILE}-{rank}" if rank else PROGRESS_FILE


_BEGAN = struct.Struct("=d")
_PULSE = struct.Struct("=Q")
_PULSE_AT = _BEGAN.size
_WAITS_AT = _PULSE_AT + _PULSE.size
_SIZE = _WAITS_AT + WAITS_BYTES
_PULSE_SECONDS = 0.1


class StepProgress:
    """The scheduler process's side; also has the stacks of all threads written to standard error when a step hangs.

    Args:
        path: The shared file; :class:`ProgressView` has made it.
        timeout: Seconds after which a step counts as hung.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self._memory = _map(path)
        self._timeout = timeout
        self._armed_until = 0.0

    def begin(self) -> None:
        """Notes that a step begins."""
        now = time.monotonic()
        _BEGAN.pack_into(self._memory, 0, now)
        # Each arming starts a thread: once in a quarter of the time is enough, and the dump comes at most that much early.
        if now > self._armed_until:
            self._armed_until = now + self._timeout / 4
            faulthandler.dump_traceback_later(self._timeout, file=sys.stderr)

    def end(self) -> None:
        """Notes that the step has ended."""
        _BEGAN.pack_into(self._memory, 0, 0.0)

    def idle(self) -> None:
        """Notes that no step will begin before a message comes in."""
        if self._armed_until:
            self._armed_until = 0.0
            faulthandler.cancel_dump_traceback_later()


class Pulse:
    """A thread of the scheduler process that shows that the process runs, from construction to :meth:`stop`.

    Args:
        path: The shared file; :class:`ProgressView` has made it.

    Attributes:
        waits: Shows for whom the process waits.
    """

    def __init__(self, path: Path) -> None:
        self._memory = _map(path)
        self.waits = Waits(memoryview(self._memory)[_WAITS_AT:])
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        count = 0
        while not self._stopping.wait(_PULSE_SECONDS):
            count += 1
            _PULSE.pack_into(self._memory, _PULSE_AT, count)


class ProgressView:
    """The front's side of the shared memory.

    Args:
        path: The shared file; made anew.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_SIZE))
        self._memory = _map(path)

    def seconds(self) -> float:
        """Seconds since the current step began; 0 while there is none."""
        (began,) = _BEGAN.unpack_from(self._memory, 0)
        return time.monotonic() - began if began else 0.0

    def pulse(self) -> int:
        """A number that changes ten times a second while the process runs."""
        (count,) = _PULSE.unpack_from(self._memory, _PULSE_AT)
        return int(count)

    def waits(self) -> Shown:
        """Which ranks the process waits for, if it is one of several."""
        return Shown.of(memoryview(self._memory)[_WAITS_AT:])


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), _SIZE)
