"""Whether the scheduler process and the front are alive and well, as each shows it."""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from sapwood_net.pacing.loop_lag import LoopLag
from sapwood_worker.records.ranks import WAITS_BYTES, Shown, Waits

# Shows the gRPC front whether the scheduler process runs, and for how long it has been at its current step, even a hung
# one.
#
# A step here is a round of the event loop: messages, plan, cache and model. Eight bytes of shared memory hold when it
# began, by the machine's monotonic clock; zero while the loop waits for messages. Writing them takes neither a lock nor
# a message, so that a step that hangs with the interpreter's lock held is seen too. Eight more hold a count that a
# thread of the process raises ten times a second, during a long step as well: where it stands still, the process does.
# After these come the values in which a rank shows its progress (``records/ranks.py``).


PROGRESS_FILE = "progress"
"""Name of the progress file, in the folder of the sockets."""


def progress_file(rank: int) -> str:
    """The file's name for a rank of a group; that of rank 0 is the scheduler process's."""
    return f"{PROGRESS_FILE}-{rank}" if rank else PROGRESS_FILE


BEGAN = struct.Struct("=d")
_PULSE = struct.Struct("=Q")
_PULSE_AT = BEGAN.size
_WAITS_AT = _PULSE_AT + _PULSE.size
_SIZE = _WAITS_AT + WAITS_BYTES
_PULSE_SECONDS = 0.1


class Heartbeat:
    """A thread of the scheduler process that shows that the process runs, from construction to :meth:`stop`.

    Args:
        path: The shared file; :class:`ProgressView` has made it.

    Attributes:
        waits: Shows for whom the process waits.
    """

    def __init__(self, path: Path) -> None:
        self._memory = map_progress(path)
        self.waits = Waits(memoryview(self._memory)[_WAITS_AT:])
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
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
        path: The shared file; an old one is replaced.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_SIZE))
        self._memory = map_progress(path)

    def seconds(self) -> float:
        """Seconds since the current step began; 0 while there is none."""
        (began,) = BEGAN.unpack_from(self._memory, 0)
        return time.monotonic() - began if began else 0.0

    def heartbeat(self) -> int:
        """A number that changes ten times a second while the process runs."""
        (count,) = _PULSE.unpack_from(self._memory, _PULSE_AT)
        return int(count)

    def waits(self) -> Shown:
        """Which ranks the process waits for, if it is one of several."""
        return Shown.of(memoryview(self._memory)[_WAITS_AT:])


def map_progress(path: Path) -> mmap.mmap:
    """The shared memory of a file that :class:`ProgressView` has made."""
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), _SIZE)


# Whether a worker's processes are healthy. Routers learn it from every message of a session, probes from ``grpc.health``.


FROZEN_SECONDS = 1.0
"""Seconds without a heartbeat after which health checks report a scheduler process as frozen."""


@dataclass(slots=True)
class Liveness:
    """Written by the supervisor, read by sessions and health checks, all on one event loop.

    Attributes:
        frozen: Seconds since the scheduler process's last heartbeat: it is stopped, or hangs with all its threads.
            0 while it lives, however long its steps take.
        step: Seconds for which it has been at its current step; 0 between steps.
        stuck: Whether ``step`` or ``frozen`` is more than ``--watchdog-timeout``.
        lag: Seconds by which the front's own event loop is late.
        silent: ``frozen`` of each rank that runs the model; one without ranks is rank 0.
        resident: Bytes of memory of each rank.
        losses: How often each rank has ended, or was ended, by itself.
    """

    frozen: float = 0.0
    step: float = 0.0
    stuck: bool = False
    lag: LoopLag = field(default_factory=LoopLag)
    silent: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    losses: Counter[int] = field(default_factory=Counter)

    @property
    def well(self) -> bool:
        """Whether new requests make sense."""
        return not self.stuck and self.frozen < FROZEN_SECONDS

    def reset(self) -> None:
        """Forgets all but ``lag`` and ``losses``: there is no scheduler process now."""
        self.frozen = self.step = 0.0
        self.silent, self.resident = [], []
        self.stuck = False
