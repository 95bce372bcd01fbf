"""Limits frames that cost the server time and bring the client nothing (RFC 9113, 10.5), by rate and by burst.

Each call, and each byte of DATA that is sent, earns the client a few such frames, so that clients that only call never come near
a limit. Beyond a limit the connection ends with ``ENHANCE_YOUR_CALM`` and a text that names the rule.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from h2.errors import ErrorCodes

from sapwood_net.http2.wire.frames import ConnectionFailedError


@dataclass(frozen=True, slots=True)
class Rule:
    """The limit of one kind of frames.

    Attributes:
        name: The frames' name, in plural.
        per_second: Frames a second, besides those that were earned.
        burst: Frames at once.
    """

    name: str
    per_second: int
    burst: int


PING, SETTINGS, WINDOW_UPDATE, RESET, FAULT, REFUSED, CRUMB, OTHER, OVERLOAD = range(9)
"""Indices of ``RULES``."""

RULES = (
    Rule("PING frames beyond what was sent", 100, 1000),
    Rule("SETTINGS frames", 20, 200),
    Rule("WINDOW_UPDATE frames beyond what was sent", 200, 2000),
    Rule("resets of streams that were not answered", 200, 2000),
    Rule("streams that broke the protocol or a limit", 100, 500),
    Rule("calls that were refused", 100, 500),
    Rule("DATA frames without content", 200, 2000),
    Rule("frames of no use", 100, 1000),
    Rule("calls that held more than there was room for", 20, 100),
)
"""
- PING and WINDOW_UPDATE: two bytes of DATA that were sent earn one more, each stream two more.
- Resets: each header block that was sent earns one more; a call that is answered has one or two.
- Streams that broke the protocol or a limit are those that the server reset: too many at a time, too many header fields, ...
- Refused calls: without a key, of no method that there is, ...
- DATA without content: fewer than 64 bytes that complete no message. Each stream earns two more.
- Frames of no use: PRIORITY, acknowledgements, frames of streams that are over, of unknown types; each counts for one more
  for each KB. Each stream earns two more.
- Calls that held more than there was room for: each was the largest of the connection that held the most, and learnt when to
  come again.
"""


class FrameRates:
    """Counts the frames of one connection.

    Args:
        clock: Seconds, monotonic.
        stranger: Whether the client has to show a key and has not yet: of no kind of frames it has more at once than in a second.
    """

    __slots__ = ("_clock", "_earned", "_filled", "_left", "_stranger")

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, stranger: bool = False) -> None:
        self._clock = clock
        self._stranger = stranger
        self._left = [rule.per_second if stranger else rule.burst for rule in RULES]
        self._filled = [clock()] * len(RULES)
        self._earned = [0] * len(RULES)

    def know(self) -> None:
        """The client has shown a key."""
        if self._stranger:
            self._stranger = False
            self._left = [left + rule.burst - rule.per_second for left, rule in zip(self._left, RULES, strict=True)]

    def take(self, kind: int, earned: int = 0, count: int = 1) -> None:
        """Counts a frame.

        Args:
            kind: The index of its rule.
            earned: All frames of this kind that the connection has ever earned.
            count: How many frames it counts for.

        Raises:
            ConnectionFailedError: The client has sent too many.
        """
        left = self._left[kind] - count
        if left < 0:  # only then are the clock and what was earned looked at
            rule, now = RULES[kind], self._clock()
            grown = int((now - self._filled[kind]) * rule.per_second) + earned - self._earned[kind]
            left = min(rule.per_second if self._stranger else rule.burst, grown) - count
            if left < 0:
                raise ConnectionFailedError(
                    ErrorCodes.ENHANCE_YOUR_CALM, f"more than {rule.per_second} {rule.name} a second"
                )
            self._filled[kind], self._earned[kind] = now, earned
        self._left[kind] = left
