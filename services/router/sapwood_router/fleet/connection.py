"""Keeps a session with one worker open: that, and its heartbeat, is what the worker's health means here.

A worker whose session stands can take requests. One whose connection breaks or falls silent is down at once, and its session
is opened anew, on a connection of its own (one that is stuck in TCP's retransmissions would keep a worker away for long after
it is back), until that works.

A worker whose scheduler process stands still goes on sending heartbeats, which say so. It is down as soon as it would be had it
fallen silent itself; its streams stay for a while longer, as moving them costs more than choosing another worker for a new
request. Then its session ends, and with the next one the router waits until the heartbeats say that the process lives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sapwood.v1 import worker_pb2
from sapwood_common.http2.client.duplex_call import CallEndedError, DuplexCall
from sapwood_common.network.channel import Dialer
from sapwood_router.fleet.convert import load_of, served_model_of
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.served_model import ServedModel
from sapwood_router.fleet.session import WorkerSession
from sapwood_router.fleet.silence_limit import SilenceLimit
from sapwood_router.fleet.worker import Worker
from sapwood_router.transport.duplex_dial import open_call

logger = logging.getLogger(__name__)

_METHOD = "/sapwood.v1.Worker/Session"
_RETRY_INTERVAL = 0.1
_MOST_RETRY_INTERVAL = 0.5
_OPEN_TIMEOUT = 2.0
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
        dialer: Opens channels.
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
        self._dialer = dialer
        self._worker = worker
        self._registry = registry
        self._heartbeat_ms = heartbeat_ms
        self._limit = limit
        self._served: ServedModel | None = None
        self._was_up = False
        """Whether this session's worker could take requests at some time."""
        self._on_loss = on_loss
        self._on_drain = on_drain
        self._clock = clock

    async def run(self) -> None:
        """Connects, again after each loss, for ever; cancel it to stop."""
        wait = _RETRY_INTERVAL
        while True:
            begun = self._clock()
            try:
                problem = await self._carry_one_session()
            except Exception as error:
                # A fault of ours costs a session, not the worker for as long as the router lives.
                logger.exception("the session with worker %s failed", self._worker.address)
                problem = f"{type(error).__name__}: {error}"
            if self._worker.available:
                logger.warning("worker %s is down: %s", self._worker.address, problem)
            self._registry.mark_down(self._worker, problem)
            if self._clock() - begun > _MOST_RETRY_INTERVAL:
                wait = _RETRY_INTERVAL
            await asyncio.sleep(wait)
            wait = min(2 * wait, _MOST_RETRY_INTERVAL)

    async def _carry_one_session(self) -> str:
        worker = self._worker
        try:
            call, first = await self._open()
        except CallEndedError as error:
            return str(error)
        except TimeoutError:
            return "it does not answer"
        session = worker.session = WorkerSession(
            *(worker.address, call, self._heard, worker.generated.add, self._limit_now, self._clock)
        )
        self._served, self._was_up = served_model_of(first.info), False
        self._heard(first)
        try:
            problem = await session.carry()
        finally:
            worker.session = None
        if worker.problem != _DRAINING:
            worker.breaker.fault()
            self._on_loss(worker)
        return problem

    async def _open(self) -> tuple[DuplexCall, worker_pb2.SessionResponse]:
        timeout = max(_OPEN_TIMEOUT, self._limit_now())
        call = await open_call(self._worker.address, _METHOD, self._dialer, timeout)
        try:
            opening = worker_pb2.SessionRequest(heartbeat_ms=self._heartbeat_ms, packed_tokens=True)
            call.write(opening.SerializeToString())
            async with asyncio.timeout(timeout):
                return call, worker_pb2.SessionResponse.FromString(await call.read())
        except BaseException:
            call.close()
            raise

    def _heard(self, response: worker_pb2.SessionResponse) -> None:
        worker, session = self._worker, self._worker.session
        assert session is not None
        if response.HasField("load"):
            worker.report(load_of(response.load))
        worker.loop_lag = response.loop_lag_ms / 1000
        worker.step_seconds = response.step_ms / 1000
        frozen = response.frozen_ms / 1000
        problem = _DRAINING if response.draining else None
        if frozen and frozen >= (limit := self._limit_now()):
            problem = _FROZEN
            if self._was_up and frozen >= limit + self._limit.base:
                session.give_up(f"{_FROZEN} for {frozen:.1f} s")
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
        self._registry.mark_up(worker, served)
        self._was_up = True
