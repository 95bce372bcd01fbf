"""Ends connections whose client does not greet, does not answer, or has had no calls for long."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from sapwood_net.pacing.tarpit import HELD_SECONDS


@dataclass(frozen=True, slots=True)
class Timeouts:
    """A server's time limits for its clients, in seconds.

    Attributes:
        greeting: Until the client's preface and the head of its first frame are here.
        silence: Without a byte from the client before it is pinged, and then until it must have answered.
        idle: Without a call before the client gets GOAWAY. gRPC's clients connect again with their next call.
        flush: For sending what is on its way, once a connection is to close.
        held: For which the connection of a client that broke a rule is held (:class:`Tarpit`).
    """

    greeting: float = 10.0
    silence: float = 20.0
    idle: float = 600.0
    flush: float = 10.0
    held: float = HELD_SECONDS

    @property
    def shortest(self) -> float:
        """The shortest of them."""
        return min(self.greeting, self.silence, self.idle, self.flush)


class Due(Enum):
    """What is to be done about a connection."""

    NOTHING = auto()
    PING = auto()
    RETIRE = auto()
    """Tell the client to open no more calls, and close after those that it has."""
    GIVE_UP = auto()


class Lifetime:
    """The lifetime of one connection, which is checked now and then: what happened between two checks counts from the later one.

    Args:
        timeouts: How long each state may last.

    Attributes:
        heard: To be set whenever the client has sent something.
        retired: Whether RETIRE has been due.
    """

    __slots__ = (
        "_busy_at",
        "_closed_at",
        "_heard_at",
        "_last_stream",
        "_made_at",
        "_pinged_at",
        "_timeouts",
        "heard",
        "retired",
    )

    def __init__(self, timeouts: Timeouts) -> None:
        self.heard = True
        self.retired = False
        self._timeouts = timeouts
        self._made_at: float | None = None
        self._closed_at: float | None = None
        self._pinged_at: float | None = None
        self._heard_at = self._busy_at = 0.0
        self._last_stream = -1

    def check(self, now: float, *, greeted: bool, busy: bool, last_stream: int, closing: bool) -> Due:
        """What is due.

        Args:
            now: Seconds, by a monotonic clock.
            greeted: Whether the client has said that it speaks HTTP/2.
            busy: Whether it has calls now.
            last_stream: The last stream that it has opened, as calls may have begun and ended since the last check.
            closing: Whether the connection closes once the client has read what was written.
        """
        times = self._timeouts
        if closing:
            self._closed_at = now if self._closed_at is None else self._closed_at
            return Due.GIVE_UP if now - self._closed_at >= times.flush else Due.NOTHING
        if self.heard:
            self.heard = False
            self._heard_at = now
            self._pinged_at = None
        if busy or last_stream != self._last_stream:
            self._last_stream = last_stream
            self._busy_at = now
        if not greeted:
            self._made_at = now if self._made_at is None else self._made_at
            return Due.GIVE_UP if now - self._made_at >= times.greeting else Due.NOTHING
        if self._pinged_at is not None:
            return Due.GIVE_UP if now - self._pinged_at >= times.silence else Due.NOTHING
        idle = now - self._busy_at - times.idle
        if self.retired and idle >= times.silence:  # it sends other frames, but does not answer
            return Due.GIVE_UP
        if not self.retired and idle >= 0:
            self.retired = True
            self._pinged_at = now
            return Due.RETIRE
        if now - self._heard_at >= times.silence:
            self._pinged_at = now
            return Due.PING
        return Due.NOTHING
