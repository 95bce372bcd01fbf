"""Keeps a session with one worker open. A worker is healthy while its session stands and its heartbeats come.

When the connection breaks or falls silent, the worker is down at once, and the router tries to open a new session until it
succeeds. Each try has a connection of its own: an old one that is stuck in TCP's retransmissions would keep the worker away long
after it is back.

When a worker's scheduler process stands still, the worker continues sending heartbeats, which say so. It counts as down after
half of the time that a silent worker on an idle machine gets, since the heartbeat takes a part of that time. Its streams stay a
while longer, because moving them costs more than sending a new request elsewhere. Then its session ends, and in the next one
the router waits until the heartbeats say that the process lives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sapwood.v1 import worker_pb2
from sapwood_common.network.channel import Dialer
from sapwood_net.pacing.loop_lag import LoopLag
from sapwood_router.fleet.convert import load_of, served_model_of, worker_loras_of
from sapwood_router.fleet.loras import WorkerLora
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.served_model import ServedModel
from sapwood_router.fleet.session import WorkerSession
from sapwood_router.fleet.worker import Worker
from sapwood_router.transport.shared_call import RETRY_INTERVAL

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


logger = logging.getLogger(__name__)

_MOST_RETRY_INTERVAL = 0.5
_DRAINING = "it is draining"
_FROZEN = "its scheduler process gives no sign of life"


class WorkerConnection:
    """Keeps one worker's entry in the registry true.

    Args:
        worker: The worker; its ``session`` is set while there is one.
        registry: Where it is marked up and down.
        heartbeat_ms: Asked for as the most time between messages.
        limit: How long it may be silent before it is lost.
        on_loss: Called when a session was lost that the worker had not announced to end.
        on_drain: Called when the worker says that it takes nothing new.
        clock: Seconds, monotonic.
        dialer: Connects to it.
    """

    def __init__(
        self,
        worker: Worker,
        registry: Registry,
        heartbeat_ms: int,
        limit: SilenceLimit,
        on_loss: Callable[[Worker], None],
        on_drain: Callable[[Worker], None],
        clock: Callable[[], float],
        dialer: Dialer,
    ) -> None:
        self._worker = worker
        self._registry = registry
        self._limit = limit
        self._served: ServedModel | None = None
        self._loras: list[WorkerLora] = []
        self._was_up = False
        """Whether the worker was up at any time during this session."""
        self._on_loss = on_loss
        self._on_drain = on_drain
        self._clock = clock
        self._wait = RETRY_INTERVAL
        self._tried = clock()
        """When the latest try began."""
        self._session = WorkerSession(
            *(
                worker.address,
                dialer,
                heartbeat_ms,
                self._heard,
                self._lost,
                worker.generated.add,
                self._limit_now,
                clock,
            )
        )

    async def run(self) -> None:
        """Connects, again after each loss, for ever; cancel it to stop."""
        try:
            await self._session.run()
        finally:
            self._worker.session = None

    def _lost(self, problem: str) -> float:
        worker, now = self._worker, self._clock()
        if worker.available:
            logger.warning("worker %s is down: %s", worker.address, problem)
        if worker.session is not None:
            worker.session = None
            if worker.problem != _DRAINING:
                worker.breaker.fault()
                self._on_loss(worker)
        self._registry.mark_down(worker, problem)
        if now - self._tried > _MOST_RETRY_INTERVAL:
            self._wait = RETRY_INTERVAL
        pause, self._wait = self._wait, min(2 * self._wait, _MOST_RETRY_INTERVAL)
        self._tried = now + pause
        return pause

    def _heard(self, response: worker_pb2.SessionResponse, first: bool) -> None:
        worker, session = self._worker, self._session
        if first:
            worker.session = session
            self._was_up = False
            self._loras = []
        if response.HasField("info"):
            self._served = served_model_of(response.info)
            if worker.available and not first:  # its role has changed
                self._registry.mark_up(worker, self._served)
        if response.HasField("load"):
            worker.report(load_of(response.load))
        if response.HasField("loras") and self._served is not None:
            self._loras = worker_loras_of(response.loras)
            if worker.available:
                self._registry.loras.report(worker.address, self._served.model, self._loras)
        worker.loop_lag = response.loop_lag_ms / 1000
        worker.step_seconds = response.step_ms / 1000
        frozen = response.frozen_ms / 1000
        problem = _DRAINING if response.draining else None
        # Whatever the lags: the worker does not count how long its process waits for a CPU.
        if frozen >= self._limit.base / 2:
            problem = _FROZEN
            if self._was_up and frozen >= 2 * self._limit.base:
                session.abandon(f"{_FROZEN} for {frozen:.1f} s")
        session.planned = problem == _DRAINING
        if problem is None:
            if not worker.available:
                self._up()
        elif worker.available:
            logger.log(logging.INFO if session.planned else logging.WARNING, "worker %s: %s", worker.address, problem)
            if session.planned:
                self._on_drain(worker)
            self._registry.mark_down(worker, problem)
        else:
            worker.problem = problem

    def _limit_now(self) -> float:
        return self._limit.seconds(self._worker.loop_lag)

    def _up(self) -> None:
        worker, served = self._worker, self._served
        assert served is not None
        logger.info("worker %s is up: model %s, epoch %d", worker.address, served.model, served.epoch)
        if self._loras:
            self._registry.loras.report(worker.address, served.model, self._loras)
        self._registry.mark_up(worker, served)
        self._was_up = True
