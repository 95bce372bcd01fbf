"""Sleep of a worker: which memory it has given back, and that requests are refused until all of it is there again.

States: awake, or asleep with a set of memory. Sleep adds to it, also twice; waking takes from it. Invariant: requests are served
only where nothing sleeps.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterable
from typing import Protocol

from sapwood.v1 import worker_pb2
from sapwood_common.errors import InvalidArgumentError, UnavailableError
from sapwood_worker.ipc.messages import ChangeWeights, Sleep, WakeUp
from sapwood_worker.records.weights import Memory

_MEMORY: dict[int, Memory] = {worker_pb2.MEMORY_WEIGHTS: "weights", worker_pb2.MEMORY_KV_CACHE: "kv_cache"}
_RETRY_SECONDS = 1.0


def to_memory(values: Iterable[worker_pb2.Memory]) -> tuple[Memory, ...]:
    """Which memory a request names, each once; all if it names none. Raises InvalidArgumentError if there is no such thing."""
    found: dict[Memory, None] = {}
    for value in values:
        if value not in _MEMORY:
            raise InvalidArgumentError(f"there is no memory {value}", field="memory")
        found[_MEMORY[value]] = None
    return tuple(found) or tuple(_MEMORY.values())


class SleepEngine(Protocol):
    """The way to the scheduler process."""

    async def change_memory(self, make: Callable[[int], ChangeWeights]) -> int: ...


class Sleeper:
    """The sleep of a worker. Lives on the event loop.

    Args:
        engine: Gives memory back.
    """

    def __init__(self, engine: SleepEngine) -> None:
        self._engine = engine
        self._asleep: dict[Memory, None] = {}
        self._turn = asyncio.Lock()
        self._folder = ""

    @property
    def asleep(self) -> list[worker_pb2.Memory]:
        """What sleeps."""
        return [number for number, name in _MEMORY.items() if name in self._asleep]  # type: ignore[misc]

    def check(self) -> None:
        """Raises UnavailableError while anything sleeps."""
        if self._asleep:
            raise UnavailableError(
                f"this worker sleeps ({', '.join(sorted(self._asleep))}): WakeUp ends it", retry_after=_RETRY_SECONDS
            )

    def started(self) -> None:
        """A scheduler process has started: nothing sleeps."""
        self._asleep.clear()

    async def sleep(self, memory: tuple[Memory, ...], *, abort: bool) -> int:
        """Gives memory back; returns how many bytes.

        Raises:
            UnimplementedError: It cannot be given back.
            ResourceExhaustedError: The weights cannot be kept in a file.
        """
        async with self._turn:
            wanted = tuple(each for each in memory if each not in self._asleep)
            if not wanted:
                return 0
            before = dict(self._asleep)
            self._asleep |= dict.fromkeys(wanted)  # from now on nothing new comes
            try:
                self._folder = self._folder or await asyncio.to_thread(tempfile.mkdtemp, prefix="sapwood-sleep-")
                return await self._engine.change_memory(
                    lambda call: Sleep(call, wanted, self._folder, abort and not before)
                )
            except BaseException:
                self._asleep = before
                raise

    async def wake_up(self, memory: tuple[Memory, ...]) -> None:
        """Takes memory again.

        Raises:
            ResourceExhaustedError: It cannot be had: all that was asked for sleeps on.
        """
        async with self._turn:
            wanted = tuple(each for each in memory if each in self._asleep)
            if not wanted:
                return
            serve = len(wanted) == len(self._asleep)
            await self._engine.change_memory(lambda call: WakeUp(call, wanted, self._folder, serve))
            for each in wanted:
                self._asleep.pop(each, None)
            if not self._asleep:
                folder, self._folder = self._folder, ""
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
