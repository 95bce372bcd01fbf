"""Notices that a peer with a heartbeat has fallen silent, and does not mistake a stall of its own for that.

A stopped or overloaded router finds its timers due before it has read what lay in its sockets all the while. So silence only
counts for as long as the router itself was awake: a check that comes late adds no more than it would have in time.
"""

from __future__ import annotations

from collections.abc import Callable


class SilenceDetector:
    """Counts the seconds in which a peer was not heard though it could have been.

    Args:
        limit: Seconds of silence that are a loss.
        interval: Seconds between calls of :meth:`check`.
        clock: Seconds, monotonic.
    """

    def __init__(self, limit: float, interval: float, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._most_a_check = 2 * interval
        self._clock = clock
        self._silent = 0.0
        self._checked = clock()

    def heard(self) -> None:
        """The peer sent something."""
        self._silent = 0.0
        self._checked = self._clock()

    def check(self) -> bool:
        """Whether the peer is lost. To be called every ``interval`` seconds."""
        now = self._clock()
        self._silent += min(now - self._checked, self._most_a_check)
        self._checked = now
        return self._silent >= self._limit
