"""How long a client waits for its answer, as the headers of its request say."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sapwood_common.errors import InvalidArgumentError

TIMEOUT_KEY = "x-request-timeout"
"""Seconds from the request's arrival to the last of its answer."""
_TIMEOUT_HEADER = TIMEOUT_KEY.encode()
_CLIENT_HEADERS = (b"x-stainless-read-timeout", b"x-stainless-timeout")
"""What OpenAI's own clients say, in Python and in JavaScript: seconds until they leave if nothing has come."""
CLIENT_SLACK = 1.0
"""Seconds beyond these: the client leaves first, and its program sees the client's own error for that and no 504."""


def asked_timeout(headers: Mapping[bytes, bytes]) -> float:
    """Seconds that the request may take; infinite if it does not say.

    Raises:
        InvalidArgumentError: What it says is no time.
    """
    given = headers.get(_TIMEOUT_HEADER)
    if not given:
        return math.inf
    seconds = _seconds(given)
    if seconds is None:
        raise InvalidArgumentError(
            f"{TIMEOUT_KEY} must be a number of seconds above 0, got {given[:20].decode('latin-1')!r}",
            field=TIMEOUT_KEY,
        )
    return seconds


def client_timeout(headers: Mapping[bytes, bytes]) -> float:
    """Seconds after which OpenAI's client leaves if it has read nothing; infinite for others.

    For an answer in one piece that is all the time there is; of a stream it says nothing but when the first event is due.
    """
    for name in _CLIENT_HEADERS:
        if given := headers.get(name):
            return _seconds(given) or math.inf  # not a client's user's to mend
    return math.inf


def _seconds(given: bytes) -> float | None:
    try:
        seconds = float(given)
    except ValueError:
        return None
    return seconds if 0 < seconds < math.inf else None
