"""How a worker's processes are, as routers are told with every message of a session and probes by ``grpc.health``."""

from __future__ import annotations

from dataclasses import dataclass, field

from sapwood_common.pacing.loop_lag import LoopLag

FROZEN_SECONDS = 1.0
"""Without a sign of life for so long, a scheduler process is taken for frozen by whoever asks for the worker's health."""


@dataclass(slots=True)
class Vitals:
    """Written by the supervisor, read by sessions and health checks, all on one event loop.

    Attributes:
        frozen: Seconds for which the scheduler process has given no sign of life: it is stopped, or hangs with all its threads.
            0 while it lives, however long its steps take.
        step: Seconds for which it has been at its current step; 0 between steps.
        stuck: Whether it has been at that, or frozen, for longer than ``--watchdog-timeout``.
        lag: How late the front's own event loop is.
    """

    frozen: float = 0.0
    step: float = 0.0
    stuck: bool = False
    lag: LoopLag = field(default_factory=LoopLag)

    @property
    def well(self) -> bool:
        """Whether new requests make sense."""
        return not self.stuck and self.frozen < FROZEN_SECONDS

    def reset(self) -> None:
        """There is no scheduler process of which anything could be said."""
        self.frozen = self.step = 0.0
        self.stuck = False
