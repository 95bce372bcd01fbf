"""The interface of a store for the third tier, and the threads in which its calls run."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class StorageError(Exception):
    """A call to the store failed; the store may be down, full or unreachable. The pages are computed again."""


class StorageBackend(Protocol):
    """A store of objects by name. Called from several threads at once; every call may block and may fail.

    Objects are whole host records (``host_pool.py``). What a store returns is never trusted: the reader checks every byte.
    """

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Registers the memory that all buffers of :meth:`get` and :meth:`put` will lie in; called once, before them.

        Raises:
            StorageError: The engine does not take it.
        """
        ...

    def exists(self, names: Sequence[str]) -> int:
        """How many of the names have objects, up to the first missing one. Changes nothing.

        Raises:
            StorageError: The store does not answer.
        """
        ...

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """Reads objects into buffers of their size.

        Mutates the buffers; a buffer whose answer is false is undefined afterwards.

        Returns:
            For each name, whether an object of the buffer's size was read.

        Raises:
            StorageError: The store does not answer; all buffers are undefined.
        """
        ...

    def put(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """Writes objects; an existing object of the buffer's size stays as it is. An object is visible to everybody once this
        call returns, or once another call that puts the same object at the same time returns.

        Returns:
            For each object, whether it exists now.

        Raises:
            StorageError: The store does not answer.
        """
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Removes objects, as far as they exist and the store allows it.

        Raises:
            StorageError: The store does not answer.
        """
        ...

    def clear(self, namespace: str) -> None:
        """Removes all objects whose name begins with ``namespace/``.

        Raises:
            StorageError: The store does not answer or cannot do it.
        """
        ...

    def close(self) -> None:
        """Closes the store; no call follows. Never fails."""
        ...


# Where the third tier's calls run, so that the scheduler never waits for a store.


Job = Callable[[], Any]
Done = Callable[[Any, Exception | None], None]
"""Called with the job's result, or with the error it ended with."""


class Executor(Protocol):
    """Runs jobs elsewhere, and calls back with their results in the caller's thread."""

    def submit(self, job: Job, done: Done, *, urgent: bool) -> None:
        """Queues ``job``, urgent jobs first; a later :meth:`poll` calls ``done``. Never waits."""
        ...

    def poll(self) -> None:
        """Calls ``done`` of every job that has ended, in the caller's thread. Never waits."""
        ...

    def wait(self, seconds: float) -> None:
        """Waits until a job has ended since the last :meth:`poll`, or the given seconds are over."""
        ...

    def close(self) -> None:
        """Ends the executor: no job follows. Jobs not started yet end with an error; the caller continues to call
        :meth:`poll`."""
        ...


class ThreadExecutor:
    """Implements :class:`Executor` with daemon threads: a thread that hangs in a store does not keep the process from exiting.

    Args:
        threads: How many.
    """

    def __init__(self, threads: int = 4) -> None:
        self._jobs: queue.PriorityQueue[tuple[int, int, Job | None, Done | None]] = queue.PriorityQueue()
        self._ended: deque[tuple[Done, Any, Exception | None]] = deque()
        self._wake = threading.Event()
        self._order = itertools.count()
        self._threads = threads
        self._closed = False
        for number in range(threads):
            threading.Thread(target=self._work, name=f"storage-{number}", daemon=True).start()

    def submit(self, job: Job, done: Done, *, urgent: bool) -> None:
        self._jobs.put((0 if urgent else 1, next(self._order), job, done))

    def poll(self) -> None:
        self._wake.clear()
        while self._ended:
            done, result, error = self._ended.popleft()
            done(result, error)

    def wait(self, seconds: float) -> None:
        self._wake.wait(seconds)

    def close(self) -> None:
        self._closed = True
        for _ in range(self._threads):
            self._jobs.put((2, next(self._order), None, None))

    def _work(self) -> None:
        while True:
            _, _, job, done = self._jobs.get()
            if job is None or done is None:
                return
            result: Any = None
            error: Exception | None = None
            try:
                if self._closed:
                    raise StorageError("the store was detached")
                result = job()
            except Exception as failure:
                error = failure
            self._ended.append((done, result, error))
            self._wake.set()
