"""Several processes that serve on one port, kept running.

They are forked from a process that has loaded the model and then only waits: so a vocabulary is in memory once (except pages that
are written to), and a process that dies is replaced in a moment. The kernel spreads connections over the processes that listen
(SO_REUSEPORT); all calls of one connection go to one process.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from types import FrameType

from sapwood_common.errors import ConfigError
from sapwood_net.sockets.listen import why_not
from sapwood_net.sockets.unix_socket import is_unix

logger = logging.getLogger(__name__)

Serve = Callable[[int, Callable[[], None]], int]
"""Runs one process: takes its number and a function to call once it serves, returns the exit code."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
"""Seconds before a process that died is replaced; the pause doubles each time it soon dies again."""
_SOON = 60.0

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def reserve_port(host: str, port: int) -> socket.socket:
    """A socket that holds a port for processes that will listen on it; it gets no connections itself.

    Args:
        host: Address to listen on.
        port: 0 takes a free one.

    Raises:
        ConfigError: The address cannot be listened on, or another process listens there.
    """
    if is_unix(host):
        raise ConfigError(f"--processes: {host}:{port} is a Unix socket, on which one process listens")
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:  # SO_REUSEPORT would hide another program's use
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
        reserved = socket.socket(family)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((address, port))
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {why_not(error, host)}") from error
    return reserved


@dataclass(slots=True)
class _Slot:
    process: ForkProcess | None = None
    ready: Connection | None = None
    """The pipe on which the process says that it serves; None once it has."""
    started: float = 0.0
    start_at: float = 0.0
    pause: float = _SHORTEST_PAUSE


class ProcessGroup:
    """Runs processes until a signal. Must be used in the main thread of a process without other threads.

    Args:
        count: The number of processes.
        serve: Runs in each process; SIGTERM must end it.
        on_serving: Called once, when all processes serve for the first time.
    """

    def __init__(self, count: int, serve: Serve, on_serving: Callable[[], None]) -> None:
        self._serve = serve
        self._on_serving = on_serving
        self._slots = [_Slot() for _ in range(count)]
        self._not_yet = set(range(count))
        self._stopping = False
        self._code = 0

    def run(self) -> int:
        """Runs until all processes have ended; returns 0 after a signal, else the exit code of the first that failed to start."""
        with _signals_as_bytes(signal.SIGTERM, signal.SIGINT) as signals:
            for number in range(len(self._slots)):
                self._start(number)
            while any(slot.process is not None for slot in self._slots) or not self._stopping:
                self._wait_once(signals)
        return self._code

    def _wait_once(self, signals: socket.socket) -> None:
        waited: list[socket.socket | Connection | int] = [signals]
        for slot in self._slots:
            if slot.process is not None:
                waited.append(slot.process.sentinel)
            if slot.ready is not None:
                waited.append(slot.ready)
        happened = wait(waited, timeout=self._seconds_to_next_start())
        if signals in happened:
            signals.recv(64)
            self._stop()
        for number, slot in enumerate(self._slots):
            if slot.ready in happened:
                self._note_ready(number, slot)
            if slot.process is not None and slot.process.sentinel in happened:
                self._note_death(number, slot, slot.process)
            if slot.process is None and not self._stopping and time.monotonic() >= slot.start_at:
                self._start(number)

    def _seconds_to_next_start(self) -> float | None:
        if self._stopping:
            return None
        starts = [slot.start_at for slot in self._slots if slot.process is None]
        return max(0.0, min(starts) - time.monotonic()) if starts else None

    def _start(self, number: int) -> None:
        slot = self._slots[number]
        slot.ready, sender = get_context("fork").Pipe(duplex=False)
        slot.process = get_context("fork").Process(target=_run, args=(self._serve, number, sender, os.getpid()))
        slot.started = time.monotonic()
        slot.process.start()
        sender.close()

    def _note_ready(self, number: int, slot: _Slot) -> None:
        assert slot.ready is not None
        try:
            slot.ready.recv()
        except EOFError:
            return  # the process has just died, which the caller will notice
        finally:
            slot.ready.close()
            slot.ready = None
        if number in self._not_yet:
            self._not_yet.discard(number)
            if not self._not_yet:
                self._on_serving()
        else:
            logger.info("process %d serves again", number)

    def _note_death(self, number: int, slot: _Slot, process: ForkProcess) -> None:
        process.join()
        code, slot.process = process.exitcode or 0, None
        if slot.ready is not None:
            slot.ready.close()
            slot.ready = None
        if self._stopping:
            return
        if self._not_yet:  # it never served, and neither would another
            logger.error("process %d could not start", number)
            self._code = self._code or (code if code > 0 else 1)
            self._stop()
            return
        now = time.monotonic()
        slot.pause = _SHORTEST_PAUSE if now - slot.started > _SOON else min(_LONGEST_PAUSE, slot.pause * 2)
        slot.start_at = now + slot.pause
        reason = signal.Signals(-code).name if code < 0 else f"code {code}"
        logger.error("process %d ended with %s; another starts in %.1f s", number, reason, slot.pause)

    def _stop(self) -> None:
        self._stopping = True
        for slot in self._slots:
            if slot.process is not None:
                slot.process.terminate()


@contextmanager
def _signals_as_bytes(*numbers: signal.Signals) -> Iterator[socket.socket]:
    """A socket that can be read whenever one of the signals has come."""
    reading, writing = socket.socketpair()
    for end in (reading, writing):
        end.setblocking(False)

    def nothing(number: int, frame: FrameType | None) -> None:
        """Leaves the signal to who reads the socket, where Python writes a byte for it."""

    before = {number: signal.signal(number, nothing) for number in numbers}
    fd = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        reading.close()
        writing.close()


def _run(serve: Serve, number: int, ready: Connection, parent: int) -> None:
    signal.set_wakeup_fd(-1)
    for received in (signal.SIGTERM, signal.SIGINT):
        signal.signal(received, signal.default_int_handler if received == signal.SIGINT else signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent died before the call
        sys.exit(1)

    def on_serving() -> None:
        ready.send(True)
        ready.close()

    sys.exit(serve(number, on_serving))
