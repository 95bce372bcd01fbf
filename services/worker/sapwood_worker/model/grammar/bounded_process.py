"""Calls a function in a process that is killed at its deadline, and whose memory is bounded: for libraries that bound neither.

``python -m sapwood_worker.model.grammar.bounded_process module:function`` is the process. Frames on its standard input and
output: 4 bytes length, big-endian, then the bytes. The function takes the first frame, the settings, and returns what answers
the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from subprocess import PIPE
from typing import IO

from sapwood_common.python_process import python_command, python_environment

Process = subprocess.Popen[bytes]
Answer = Callable[[bytes], bytes]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_START_SECONDS = 120.0


class TimeUpError(Exception):
    """The call took too long; its process was killed."""


class ProcessDiedError(Exception):
    """The process died of the call: mostly of its memory's bound, or of the depth of its stack."""


class BoundedProcesses:
    """A process for each call that is under way, kept for the next. Thread-safe.

    Args:
        target: ``module:function``.
        settings: Its argument.
        timeout: Most seconds of a call. The start of a process, which imports libraries, is not counted.
        memory_bytes: Most bytes that a process may take after it has started.
    """

    def __init__(self, target: str, settings: bytes, timeout: float, memory_bytes: int = 2 << 30) -> None:
        self._target = target
        self._settings = memory_bytes.to_bytes(8, "big") + settings
        self._timeout = timeout
        self._lock = threading.Lock()
        self._idle: list[Process] = []
        self._busy: set[Process] = set()
        self._closed = False

    @property
    def num_busy(self) -> int:
        """Calls that are under way."""
        return len(self._busy)

    def call(self, question: bytes) -> bytes:
        """The function's answer.

        Raises:
            TimeUpError: It took too long.
            ProcessDiedError: Its process died of it.
        """
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None:
            process = self._start()
        with self._lock:
            self._busy.add(process)
        try:
            answer = _exchange(process, question, self._timeout)
        except BaseException:
            with self._lock:
                self._busy.discard(process)
            _end(process)
            raise
        with self._lock:
            self._busy.discard(process)
            if not self._closed:
                self._idle.append(process)
                return answer
        _end(process)
        return answer

    def warm(self) -> None:
        """Starts a process for the first call."""
        process = self._start()
        with self._lock:
            self._idle.append(process)

    def close(self) -> None:
        """Ends the processes, and with them the calls that are under way."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for process in self._busy:
                process.kill()
        for process in idle:
            _end(process)

    def _start(self) -> Process:
        process = subprocess.Popen(
            python_command("-m", __name__, self._target), stdin=PIPE, stdout=PIPE, env=python_environment()
        )
        try:
            _exchange(process, self._settings, _START_SECONDS)
        except BaseException:
            _end(process)
            raise
        return process


def _exchange(process: Process, question: bytes, timeout: float) -> bytes:
    assert process.stdin is not None and process.stdout is not None
    late = threading.Event()

    def kill() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(timeout, kill)
    timer.start()
    try:
        _write(process.stdin, question)
        answer = _read(process.stdout)
    except BrokenPipeError:
        answer = None
    finally:
        timer.cancel()
    if answer is None:
        raise TimeUpError if late.is_set() else ProcessDiedError
    return answer


def _end(process: Process) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # bytes that were never flushed
            pipe.close()
    process.wait()


def _write(sink: IO[bytes], payload: bytes) -> None:
    sink.write(len(payload).to_bytes(4, "big") + payload)
    sink.flush()


def _read(source: IO[bytes]) -> bytes | None:
    header = source.read(4)
    size = int.from_bytes(header, "big")
    payload = source.read(size) if len(header) == 4 else b""
    return payload if len(header) == 4 and len(payload) == size else None


def main() -> int:
    """Answers until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent, which then closes the input
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not stand among the frames
    settings = _read(sys.stdin.buffer)
    if settings is None:
        return 0
    module, _, name = sys.argv[1].partition(":")
    answer: Answer = vars(importlib.import_module(module))[name](settings[8:])
    most = _memory_now() + int.from_bytes(settings[:8], "big")
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _write(sink, b"")
    while (question := _read(sys.stdin.buffer)) is not None:
        _write(sink, answer(question))
    return 0


def _memory_now() -> int:
    """Bytes of address space that this process has mapped."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux, where the bound on the address space is not enforced either
        return 0


if __name__ == "__main__":
    sys.exit(main())
