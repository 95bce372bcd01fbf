"""A circuit breaker for one store: after failures in a row no call is made for a while, then one probe."""

from __future__ import annotations

from collections.abc import Callable

_FAILURES = 3
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0


class CircuitBreaker:
    """Closed while all goes well; open after three failures in a row; then half open, for one call at a time.

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
