"""A store for tests, in memory, that does what stores do on a bad day; and an executor whose calls end late and in any order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood_worker.core.cache.storage.backend import Done, Job, StorageError


class FakeStorage:
    """Implements :class:`~sapwood_worker.core.cache.storage.backend.StorageBackend` over a dictionary.

    Args:
        objects: The objects; several stores over one dictionary share them.
        chance: Decides what goes wrong; None: nothing does.
        fault_rate: Share of calls, and of objects read or written, with which something goes wrong: the call fails, the object is
            lost, cut short, changed in a byte, or another one.

    Attributes:
        down: While set every call fails.
    """

    def __init__(self, objects: dict[str, bytes], chance: random.Random | None = None, fault_rate: float = 0.0) -> None:
        self.objects = objects
        self.down = False
        self._chance = chance
        self._fault_rate = fault_rate

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Needs nothing: objects are bytes of Python's."""

    def exists(self, names: Sequence[str]) -> int:
        self._answer()
        return next((count for count, name in enumerate(names) if name not in self.objects), len(names))

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        self._answer()
        return [self._read(name, buffer) for name, buffer in zip(names, buffers, strict=True)]

    def put(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        self._answer()
        for name, buffer in zip(names, buffers, strict=True):
            if not self._fault():
                self.objects.setdefault(name, bytes(buffer))
        return [name in self.objects for name in names]

    def remove(self, names: Sequence[str]) -> None:
        self._answer()
        for name in names:
            self.objects.pop(name, None)

    def clear(self, namespace: str) -> None:
        self._answer()
        for name in [name for name in self.objects if name.startswith(namespace + "/")]:
            del self.objects[name]

    def close(self) -> None:
        """Closes nothing: the objects stay for who looks at them."""

    def _read(self, name: str, buffer: memoryview) -> bool:
        content = bytearray(self.objects.get(name, b""))
        if self._chance is not None and content and self._fault():
            kind = self._chance.randrange(4)
            if kind == 0:
                return False
            if kind == 1:
                content = content[: self._chance.randrange(len(content))]
            elif kind == 2:
                content[self._chance.randrange(len(content))] ^= 1 << self._chance.randrange(8)
            else:
                content = bytearray(self.objects[self._chance.choice(sorted(self.objects))])
        buffer[: len(content)] = content[: len(buffer)]
        return bool(content)

    def _answer(self) -> None:
        if self.down or self._fault():
            raise StorageError("the store is down")

    def _fault(self) -> bool:
        return self._chance is not None and self._chance.random() < self._fault_rate


class FakeExecutor:
    """Implements :class:`~sapwood_worker.core.cache.storage.backend.Executor` in the caller's thread.

    Args:
        chance: Decides which jobs begin and end at a poll, in which order; None: all of them, in order.
    """

    def __init__(self, chance: random.Random | None = None) -> None:
        self._chance = chance
        self._waiting: list[tuple[Job, Done]] = []
        self._ended: list[tuple[Done, Any, Exception | None]] = []
        self._closed = False

    def submit(self, job: Job, done: Done, *, urgent: bool) -> None:
        self._waiting.insert(0 if urgent else len(self._waiting), (job, done))

    def poll(self) -> None:
        chance = self._chance
        if chance is not None:
            chance.shuffle(self._waiting)
        count = len(self._waiting) if chance is None else chance.randint(0, len(self._waiting))
        running, self._waiting = self._waiting[:count], self._waiting[count:]
        for job, done in running:
            try:
                if self._closed:
                    raise StorageError("the store was detached")
                self._ended.append((done, job(), None))
            except Exception as error:
                self._ended.append((done, None, error))
        if chance is not None:
            chance.shuffle(self._ended)
        count = len(self._ended) if chance is None else chance.randint(0, len(self._ended))
        ended, self._ended = self._ended[:count], self._ended[count:]
        for done, result, failure in ended:
            done(result, failure)

    def wait(self, seconds: float) -> None:
        """Returns at once: jobs run in :meth:`poll`."""

    def close(self) -> None:
        self._closed = True
