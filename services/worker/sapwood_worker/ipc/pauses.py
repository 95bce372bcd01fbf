"""Pauses before something that ends again and again is started anew."""

from __future__ import annotations

from collections.abc import Callable

LASTING_SECONDS = 120.0
"""What was up for so long did not end because of its start."""
_AT_ONCE = 2
_FIRST_SECONDS = 2.0
_LONGEST_SECONDS = 60.0


class Pauses:
    """How long to wait before a process that ended is started again.

    Not at all after the first two ends in a row, then 2 s, twice as long after each further one, and 60 s at most.

    Args:
        clock: Seconds, monotonic.

    Attributes:
        ends: Ends in a row; the process was not up for ``LASTING_SECONDS`` before any of them but the first.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._up_since: float | None = None
        self.ends = 0

    def is_up(self) -> None:
        """Notes that the process has started."""
        self._up_since = self._clock()

    def has_ended(self) -> None:
        """Notes that the process has ended, or could not start."""
        lasted = self._up_since is not None and self._clock() - self._up_since >= LASTING_SECONDS
        self._up_since = None
        self.ends = 1 if lasted else self.ends + 1

    @property
    def seconds(self) -> float:
        """How long to wait before it is started anew."""
        beyond = self.ends - _AT_ONCE
        return 0.0 if beyond <= 0 else min(_FIRST_SECONDS * 2.0 ** min(beyond - 1, 30), _LONGEST_SECONDS)
