"""The head of an answer."""

from __future__ import annotations

import http
import re
import time
from collections.abc import Callable
from email.utils import formatdate

from sapwood_router.edges.http1.head import Headers

_PHRASES = {status.value: status.phrase for status in http.HTTPStatus} | {
    499: "Client Closed Request",
    529: "Overloaded",
}
"""What the status is in words; the last two are no standard's: a request that was cancelled, and Anthropic's for an overload."""

_PLAIN = re.compile(rb"[ -~]{0,4096}")
_MOST_OF_VALUE = 4096


def _fit(value: bytes) -> bytes:
    """A value that is safe in a header: any end of line is removed."""
    return re.sub(rb"[^ -~]", b"?", value[:_MOST_OF_VALUE])


class ResponseHeads:
    """Makes them: what is the same for all of a second is made once.

    Args:
        clock: Unix time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._second = 0
        self._begins: dict[int, bytes] = {}
        """Line and date of this second, by status."""

    def make(self, status: int, headers: Headers, framing: bytes) -> bytes:
        """The whole head.

        Args:
            status: HTTP status.
            headers: Names well formed, and none of those that say how long the body is or what becomes of the
                connection. Values are made well formed.
            framing: Those, as they are sent, each with its end of line.
        """
        second = int(self._clock())
        if second != self._second:
            self._second = second
            self._begins.clear()
        begin = self._begins.get(status)
        if begin is None:
            line = f"HTTP/1.1 {status} {_PHRASES[status]}\r\ndate: {formatdate(second, usegmt=True)}\r\n"
            begin = self._begins[status] = line.encode("ascii")
        parts = [begin]
        for name, value in headers:
            parts += (name, b": ", value if _PLAIN.fullmatch(value) else _fit(value), b"\r\n")
        parts += (framing, b"\r\n")
        return b"".join(parts)
