"""Remembers which streams a client has opened and how they ended, to tell a late frame from a wrong one (RFC 9113, 5.1)."""

from __future__ import annotations

_MOST_CUT_OFF = 1024


class StreamIds:
    """The ids of one connection. Memory is bounded; each method takes O(1) time.

    Attributes:
        last: The highest id that the client has opened; 0 before the first.
    """

    __slots__ = ("_cut_off", "_forgotten", "_skipped", "last")

    def __init__(self) -> None:
        self.last = 0
        self._skipped = range(0)
        """The range of ids that the client skipped last."""
        self._cut_off: dict[int, None] = {}
        """Streams that ended here while the client could still send: its frames may have left before it knew. Oldest first."""
        self._forgotten = 0
        """The highest id that was dropped from ``_cut_off`` for want of room."""

    def open(self, stream: int) -> None:
        """The client opens a stream, with an id above ``last``."""
        if stream - self.last > 2:
            self._skipped = range((self.last + 1) | 1, stream, 2)
        self.last = stream

    def cut_off(self, stream: int) -> None:
        """A stream has ended here before the client ended its side."""
        self._cut_off[stream] = None
        if len(self._cut_off) > _MOST_CUT_OFF:
            oldest = next(iter(self._cut_off))
            del self._cut_off[oldest]
            self._forgotten = max(self._forgotten, oldest)

    def is_idle(self, stream: int) -> bool:
        """Whether there has never been such a stream. Clients' are odd; the server opens none; 0 is none."""
        return stream > self.last or stream % 2 == 0

    def is_skipped(self, stream: int) -> bool:
        """Whether the client passed the id over, and so may not use it any more."""
        return stream in self._skipped

    def may_be_late(self, stream: int) -> bool:
        """Whether a frame of a stream that is over may have left before the client knew that it was."""
        return stream in self._cut_off or stream <= self._forgotten
