"""One attached store: its calls, their results, and whether to make calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sapwood_worker.core.cache.storage.backend import Executor, StorageBackend, StorageError

NEVER = 1 << 40
"""A number of pages that no request reaches: nothing is fetched."""
CALL_SECONDS = 10.0
"""Seconds after which a call counts as failed, even if it ends later."""


@dataclass(slots=True, eq=False)
class _Call:
    began: float | None = None
    late: bool = False


class Connection:
    """Makes calls to a store in an executor, takes their results, and reports them to the circuit breaker.

    Args:
        backend: The store.
        executor: Where calls run.
        namespace: The prefix of all object names (``record.namespace_of``).
        min_pages: Fewer pages than this are computed faster than fetched; NEVER: nothing is fetched.
        clock: Seconds, monotonic.
        store_id: The store's name, equal for all workers that share it.
    """

    def __init__(
        self,
        backend: StorageBackend,
        executor: Executor,
        namespace: str,
        min_pages: int,
        clock: Callable[[], float],
        store_id: str = "",
    ) -> None:
        self.backend = backend
        self.namespace = namespace
        self.min_pages = min_pages
        self.store_id = store_id
        self.breaker = CircuitBreaker(clock)
        self.failures = 0
        """Calls that failed or took too long."""
        self.last_error = ""
        self._executor = executor
        self._clock = clock
        self._calls: set[_Call] = set()

    @property
    def worthwhile(self) -> bool:
        """Whether anything is ever read."""
        return self.min_pages < NEVER

    @property
    def pending(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    def call(self, job: Callable[[], Any], done: Callable[[Any], None], *, urgent: bool) -> None:
        """Queues ``job``; a later :meth:`poll` calls ``done`` with its result, or with None if it failed."""
        call = _Call()
        self._calls.add(call)

        def timed() -> Any:
            call.began = self._clock()
            return job()

        def ended(result: Any, error: Exception | None) -> None:
            self._calls.remove(call)
            if error is None:
                self.breaker.succeeded()
            elif not call.late:
                self._failed(error)
            done(result)

        self._executor.submit(timed, ended, urgent=urgent)

    def poll(self) -> None:
        """Takes the results of calls; counts calls that take too long as failed."""
        self._executor.poll()
        now = self._clock()
        for call in self._calls:
            if call.began is not None and not call.late and now - call.began > CALL_SECONDS:
                call.late = True
                self._failed(StorageError(f"no answer within {CALL_SECONDS:g} s"))

    def wait(self, seconds: float) -> None:
        """Waits until a call has ended, or the given seconds are over."""
        self._executor.wait(seconds)

    def close(self) -> None:
        """Ends the connection: no call follows. The caller calls :meth:`poll` until no job is pending, then :meth:`release`."""
        self._executor.close()

    def release(self) -> None:
        """Closes the store once no call is pending; the caller does not wait for this."""
        assert not self._calls
        threading.Thread(target=self.backend.close, daemon=True).start()

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        self.last_error = str(error) or type(error).__name__
        self.breaker.failed()


# A circuit breaker for one store: after failures in a row no call is made for a while, then one probe.
_FAILURES = 3
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0


class CircuitBreaker:
    """The breaker is closed while calls succeed, open after three failures in a row, then half open for one call at a time.

    Each time the probe fails too, the pause doubles, from one second up to half a minute.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures = 0
        self._pause = _FIRST_PAUSE
        self._until = 0.0
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether calls are held back; changes nothing."""
        return self._failures >= _FAILURES and (self._probing or self._clock() < self._until)

    def allow(self) -> bool:
        """Whether a call may be made now; the caller then reports :meth:`succeeded` or :meth:`failed`."""
        if self.is_open:
            return False
        self._probing = self._failures >= _FAILURES
        return True

    def succeeded(self) -> None:
        """A call went well."""
        self._failures, self._pause, self._probing = 0, _FIRST_PAUSE, False

    def failed(self) -> None:
        """A call failed or takes too long."""
        self._failures += 1
        self._probing = False
        if self._failures >= _FAILURES:
            self._until = self._clock() + self._pause
            self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
