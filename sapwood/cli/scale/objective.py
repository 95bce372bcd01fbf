"""How many first tokens came in time, by a router's metrics."""

from __future__ import annotations

import math
import re
import urllib.request

_BUCKET = re.compile(
    rb'^sapwood_router_time_to_first_token_seconds_bucket\{[^\n]*le="([^"]+)"[^\n]*\}[ ]+([0-9.eE+]+)', re.MULTILINE
)
_MOST_BYTES = 16 * 1024 * 1024


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
            OSError: There is no page.
        """
        with urllib.request.urlopen(self._url, timeout=10) as answer:
            counts = count(answer.read(_MOST_BYTES), self._late)
        before, self._before = self._before, counts
        if before is None or counts[1] <= before[1]:  # nothing came, or the router began again
            return None
        return max(0.0, counts[0] - before[0]) / (counts[1] - before[1])


def count(page: bytes, late: float) -> tuple[float, float]:
    """How many first tokens came within ``late`` seconds (or the histogram's next smaller bound), and how many in all."""
    sums: dict[float, float] = {}
    for bound, value in _BUCKET.findall(page):
        sums[float(bound)] = sums.get(float(bound), 0.0) + float(value)
    bounds = [bound for bound in sums if bound <= late]
    return sums[max(bounds)] if bounds else 0.0, sums.get(math.inf, 0.0)
