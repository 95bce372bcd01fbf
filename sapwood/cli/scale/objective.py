"""How many first tokens came in time, by a router's metrics."""

from __future__ import annotations

import math
import re
import time
import urllib.request
from http.client import HTTPException

_BUCKET = re.compile(
    rb'^sapwood_router_time_to_first_token_seconds_bucket\{[^\n]*le="([^"]+)"[^\n]*\}[ ]+([0-9.eE+]+)', re.MULTILINE
)
_MOST_BYTES, _READ_BYTES = 16 * 1024 * 1024, 64 * 1024
_SECONDS = 10.0
"""For the whole page."""


class FirstTokens:
    """Watches the histogram of first tokens on a page of metrics.

    Args:
        url: Of the page.
        late: Seconds within which a first token is in time.
    """

    def __init__(self, url: str, late: float) -> None:
        self._url = url
        self._late = late
        self._before: tuple[float, float] | None = None

    def in_time(self) -> float | None:
        """The share that came in time since the last call; None: there were none, or it is the first call. Blocks.

        Raises:
            OSError: There is no page, or no whole one, or none of metrics.
        """
        try:
            counts = count(self._page(), self._late)
        except (HTTPException, ValueError) as error:
            raise OSError(f"{self._url}: {type(error).__name__}: {error}") from error
        before, self._before = self._before, counts
        if before is None or counts[1] <= before[1]:  # nothing came, or the router began again
            return None
        return max(0.0, counts[0] - before[0]) / (counts[1] - before[1])

    def _page(self) -> bytes:
        page, ends = bytearray(), time.monotonic() + _SECONDS
        with urllib.request.urlopen(self._url, timeout=_SECONDS) as answer:
            while more := answer.read1(_READ_BYTES):
                page += more
                if time.monotonic() > ends or len(page) > _MOST_BYTES:
                    raise TimeoutError(f"{self._url}: the page does not end")
        missing = getattr(answer, "length", None)  # of what its head promises
        if missing:
            raise OSError(f"{self._url}: the page is cut: {missing} bytes are missing")
        return bytes(page)


def count(page: bytes, late: float) -> tuple[float, float]:
    """How many first tokens came within ``late`` seconds (or the histogram's next smaller bound), and how many in all."""
    sums: dict[float, float] = {}
    for bound, value in _BUCKET.findall(page):
        sums[float(bound)] = sums.get(float(bound), 0.0) + float(value)
    bounds = [bound for bound in sums if bound <= late]
    return sums[max(bounds)] if bounds else 0.0, sums.get(math.inf, 0.0)
