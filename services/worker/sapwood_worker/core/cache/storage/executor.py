"""Where the third tier's calls run, so that the scheduler never waits for a store."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from sapwood_worker.core.cache.storage.backend import StorageError

Job = Callable[[], Any]
Done = Callable[[Any, Exception | None], None]
"""Called with the job's result, or with the error it ended with."""


class Executor(Protocol):
    """Runs jobs elsewhere, and calls back with their results in the caller's thread."""

    def submit(self, job: Job, done: Done, *, urgent: bool) -> None:
        """Has ``job`` run, urgent ones first; ``done`` is called in a later :meth:`poll`. Never waits."""
        ...

    def poll(self) -> None:
        """Calls ``done`` of every job that has ended, in the caller's thread. Never waits."""
        ...

    def wait(self, seconds: float) -> None:
        """Returns when a job has ended since the last :meth:`poll`, or after so many seconds."""
        ...

    def close(self) -> None:
        """Ends it: no job follows. Jobs not started yet end with an error; the caller goes on with :meth:`poll`."""
        ...


class ThreadExecutor:
    """Implements :class:`Executor` with daemon threads: one that hangs in a store does not keep the process from exiting.

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
