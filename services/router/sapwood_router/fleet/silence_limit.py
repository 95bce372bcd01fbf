"""How long a worker may be silent before it is lost: longer where one of the two processes has lately run late."""

from __future__ import annotations

from sapwood_net.pacing.loop_lag import LoopLag

LAGS = 4.0
"""The limit is its base plus this many times the recent lags of both event loops: the next lag may well be longer."""
MOST = 3.0
"""The limit is at most this many times its base: a lost worker must be noticed on the slowest machine, too."""


class SilenceLimit:
    """The limit for each of a router's workers.

    Args:
        base: The limit in seconds while neither event loop runs late.
        own_lag: The lag of the router's event loop.

    Attributes:
        base: The argument.
    """

    def __init__(self, base: float, own_lag: LoopLag) -> None:
        self.base = base
        self._own_lag = own_lag

    def seconds(self, worker_lag: float) -> float:
        """The limit now for a worker that reports a lag of ``worker_lag`` seconds of its event loop."""
        return min(self.base + LAGS * (worker_lag + self._own_lag.recent), MOST * self.base)
