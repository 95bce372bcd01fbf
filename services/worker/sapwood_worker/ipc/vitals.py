"""Whether a worker's processes are well: routers are told with every message of a session, probes by ``grpc.health``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sapwood_net.pacing.loop_lag import LoopLag

FROZEN_SECONDS = 1.0
"""Seconds without a sign of life after which health checks take a scheduler process for frozen."""


@dataclass(slots=True)
class Vitals:
    """Written by the supervisor, read by sessions and health checks, all on one event loop.

    Attributes:
        frozen: Seconds for which the scheduler process has given no sign of life: it is stopped, or hangs with all its threads.
            0 while it lives, however long its steps take.
        step: Seconds for which it has been at its current step; 0 between steps.
        stuck: Whether ``step`` or ``frozen`` is more than ``--watchdog-timeout``.
        lag: Seconds by which the front's own event loop is late.
        silent: ``frozen`` of each rank that runs the model; one without ranks is rank 0.
        resident: Bytes of memory of each rank.
        losses: How often each rank has ended, or was ended, by itself.
    """

    frozen: float = 0.0
    step: float = 0.0
    stuck: bool = False
    lag: LoopLag = field(default_factory=LoopLag)
    silent: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    losses: Counter[int] = field(default_factory=Counter)

    @property
    def well(self) -> bool:
        """Whether new requests make sense."""
        return not self.stuck and self.frozen < FROZEN_SECONDS

    def reset(self) -> None:
        """Forgets all but ``lag`` and ``losses``: there is no scheduler process now."""
        self.frozen = self.step = 0.0
        self.silent, self.resident = [], []
        self.stuck = False
