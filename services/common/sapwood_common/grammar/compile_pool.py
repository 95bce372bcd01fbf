"""Processes that compile grammars and may be killed while they do.

A grammar is a program that a stranger wrote, so the compiler's own bounds are not relied on. Each compilation has a process to
itself while it runs. At its deadline, or when no caller waits any more, the process is killed; the next job starts a new one
(0.2 s). The operating system bounds its memory. A caller waits for its own job and for those before it in the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from subprocess import PIPE

from sapwood_common.errors import InternalError, InvalidArgumentError, ResourceExhaustedError
from sapwood_common.grammar.source import GrammarSource
from sapwood_common.python_process import python_command, python_environment

# Not asyncio's: under uvloop a pipe to a child that has just started is found closed now and then.
Process = subprocess.Popen[bytes]

_MEMORY_BYTES = 2 << 30


class CompilePool:
    """Compiles sources in at most ``size`` processes, started when first needed. Lives on one event loop.

    Args:
        special_names: Names of the vocabulary's special tokens.
        size: Most compilations at a time.
        max_queued: Most that wait; more are refused.
    """

    def __init__(self, special_names: Sequence[str], size: int = 2, max_queued: int = 256) -> None:
        settings = {"special_names": list(special_names), "memory_bytes": _MEMORY_BYTES}
        self._settings = _frame(settings)
        self._slots = asyncio.Semaphore(size)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="compile-grammar")
        self._max_queued = max_queued
        self._queued = 0
        self._idle: list[Process] = []
        self._busy: set[Process] = set()
        self._closed = False

    async def compile(self, source: GrammarSource) -> str:
        """The compiled text. Cancelling the call kills the compilation.

        Raises:
            InvalidArgumentError: The grammar is at fault; ``field`` is ``grammar.<kind>``.
            ResourceExhaustedError: Too many wait already.
        """
        if self._queued >= self._max_queued:
            raise ResourceExhaustedError("too many grammars wait to be compiled", retry_after=1.0)
        self._queued += 1
        try:
            await self._slots.acquire()
        finally:
            self._queued -= 1
        try:
            return await self._compile(source)
        finally:
            self._slots.release()

    async def close(self) -> None:
        """Ends all processes."""
        self._closed = True
        for process in (*self._idle, *self._busy):
            process.kill()
        for process in self._idle:
            _reap(process)
        self._idle.clear()
        self._threads.shutdown(wait=False)

    async def _compile(self, source: GrammarSource) -> str:
        if self._closed:
            raise InternalError("the compiler is closed")
        process, opening = (self._idle.pop(), b"") if self._idle else (_start(), self._settings)
        self._busy.add(process)
        asking = asyncio.get_running_loop().run_in_executor(self._threads, _ask, process, opening + _question(source))
        answer = None
        try:
            answer = await asyncio.shield(asking)
        finally:
            self._busy.discard(process)
            if answer is not None and not self._closed:
                self._idle.append(process)
            else:
                process.kill()  # which ends the asking
                await asyncio.wait([asking])
                _reap(process)
        field = f"grammar.{source.kind}"
        if answer is None:
            raise InvalidArgumentError("the grammar needs too much memory to compile", field=field)
        if "error" in answer:
            raise InvalidArgumentError(f"the grammar cannot be compiled: {answer['error']}", field=field)
        return answer["lark"]


def _start() -> Process:
    return subprocess.Popen(
        python_command("-m", "sapwood_common.grammar.compile_process"),
        stdin=PIPE,
        stdout=PIPE,
        env=python_environment(),
    )


def _question(source: GrammarSource) -> bytes:
    options = source.options
    return _frame(
        {
            "kind": source.kind,
            "text": source.text,
            "any_whitespace": options.any_whitespace,
            "lenient": options.lenient,
        }
    )


def _ask(process: Process, frames: bytes) -> dict[str, str] | None:
    """The answer of a process, None if it died of the question or was killed."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(frames)
        process.stdin.flush()
    except BrokenPipeError:
        return None
    header = process.stdout.read(4)
    size = int.from_bytes(header, "big")
    payload = process.stdout.read(size)
    if len(header) < 4 or len(payload) < size:
        return None
    answer: dict[str, str] = json.loads(payload)
    return answer


def _frame(content: object) -> bytes:
    payload = json.dumps(content).encode()
    return len(payload).to_bytes(4, "big") + payload


def _reap(process: Process) -> None:
    """Closes the pipes of a killed process, and waits the moment until it is gone."""
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # bytes that were never flushed
            pipe.close()
    process.wait()
