"""How long a worker may be silent before it is lost: longer where one of the two processes has lately run late."""

from __future__ import annotations

from sapwood_common.pacing.loop_lag import LoopLag

LAGS = 4.0
"""Times both ends' lag of late by which the limit exceeds its base: what was late by so much may well be late by more."""
MOST = 3.0
"""Times its base that the limit is at most: a worker that is gone has to be noticed on the slowest machine."""


class SilenceLimit:
    """The limit for each of a router's workers.

    Args:
        base: Seconds, where nothing runs late.
        own_lag: That of the router's event loop.

    Attributes:
        base: The same.
    """

    def __init__(self, base: float, own_lag: LoopLag) -> None:
        self.base = base
        self._own_lag = own_lag

    def seconds(self, worker_lag: float) -> float:
        """As of now, for a worker whose event loop has been late by ``worker_lag`` seconds, as it says itself."""
        return min(self.base + LAGS * (worker_lag + self._own_lag.recent), MOST * self.base)
