"""Time that a test moves."""

from __future__ import annotations


class Clock:
    """Stands still but for what a test adds to ``now``, in seconds.

    Args:
        now: What it shows at first.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
