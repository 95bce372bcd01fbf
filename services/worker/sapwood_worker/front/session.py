"""One ``Session`` call: many requests over it, all outputs of a scheduler step in one message, and a heartbeat.

A message costs about as much CPU as a token's whole way through the worker's front, so outputs are collected: the engine
hands over a step's outputs in one go, each marks its stream, and the next message carries all that are marked. While a
message is being written more are marked, and their tokens merge; what is kept for a slow reader is at most its requests'
own tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

from sapwood.v1 import worker_pb2
from sapwood_common.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    SapwoodError,
    UnavailableError,
)
from sapwood_common.status import code_number, row_of
from sapwood_net.pacing.afterwards import Afterwards
from sapwood_net.pacing.heavy_work import A_FEW
from sapwood_worker.front.convert import to_announced, to_load_report
from sapwood_worker.front.engine import Engine, SchedulerLostError
from sapwood_worker.front.session_streams import (
    ENOUGH_BYTES,
    Embed,
    EmbeddingStream,
    GenerationStream,
    SessionStream,
    Start,
)

logger = logging.getLogger(__name__)

DEFAULT_HEARTBEAT_MS, LEAST_HEARTBEAT_MS = 200, 10
_LOAD_INTERVAL = 0.05
_MANY = 1024
"""Stream ids of a message that are looked at in a turn of the event loop."""

ItemT = TypeVar("ItemT")


class Session:
    """Runs one call. Owned by the call's handler: it awaits :meth:`responses` and calls :meth:`close` in the end.

    Args:
        start: Starts a generation.
        embed: Embeds.
        engine: Its load is reported.
        info: Returns what goes with the first response, and again with the next after :meth:`info_changed`.
        epoch: Returns which start of the scheduler runs now, None if none does; the session ends when that changes.
        draining: Set when the worker is about to stop.
        on_idle: Called whenever the last open stream ends.
    """

    def __init__(
        self,
        start: Start,
        embed: Embed,
        engine: Engine,
        info: Callable[[], worker_pb2.GetModelInfoResponse],
        epoch: Callable[[], int | None],
        draining: asyncio.Event,
        on_idle: Callable[[], None],
    ) -> None:
        self._start = start
        self._embed = embed
        self._engine = engine
        self._info = info
        self._tells_info = False
        self._epoch = epoch
        self._draining = draining
        self._on_idle = on_idle
        self._streams: dict[int, SessionStream] = {}
        self._dirty: dict[int, None] = {}
        self._wake = asyncio.Event()
        self._problem: Exception | None = None
        self._over = False
        self._afterwards = Afterwards()
        """Ends the streams that the call left open, a few at a time: each is a message to the scheduler."""
        self._load_version = -1
        self._load_sent = 0.0
        self._packs_tokens = False

    @property
    def idle(self) -> bool:
        """Whether no stream is open."""
        return not self._streams

    async def responses(
        self, requests: AsyncIterator[worker_pb2.SessionRequest]
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        """The messages to send, until the client ends the call or the worker has drained.

        Raises:
            InvalidArgumentError: A message makes no sense.
            UnavailableError: The model is not loaded.
            SchedulerLostError: The scheduler has ended, and the streams that it had end with the call.
        """
        loop = asyncio.get_running_loop()
        first = await anext(aiter(requests), None)
        if first is None:
            return
        heartbeat = _heartbeat(first)
        self._packs_tokens = first.packed_tokens
        reader = asyncio.ensure_future(self._read(first, requests))
        drain = asyncio.ensure_future(self._until_draining())
        try:
            response = worker_pb2.SessionResponse(info=self._info())
            epoch = response.info.epoch
            while True:
                self._fill(response)
                yield response
                if self._problem is not None:
                    raise self._problem
                if self._epoch() != epoch and not self._dirty:
                    raise SchedulerLostError("the worker's scheduler stopped", retry_after=1.0)
                if self._over or (self._draining.is_set() and not self._streams):
                    return
                timer = loop.call_later(heartbeat, self._wake.set)
                await self._wake.wait()
                timer.cancel()
                self._wake.clear()
                response = worker_pb2.SessionResponse()
        finally:
            reader.cancel()
            drain.cancel()
            self.close()

    def close(self) -> None:
        """Ends every stream, in this turn of the event loop or soon after. May be called again."""
        left = tuple(self._streams)
        for stream_id in left[A_FEW:]:
            self._afterwards.add(self._streams.pop(stream_id).close)
        for stream_id in left[:A_FEW]:
            self._drop(stream_id)

    def info_changed(self) -> None:
        """Has the next message tell it."""
        self._tells_info = True
        self._wake.set()

    async def _read(self, first: worker_pb2.SessionRequest, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        try:
            await self._take(first)
            async for request in requests:
                await self._take(request)
        except SapwoodError as error:
            self._problem = error
        self._over = True
        self._wake.set()

    async def _until_draining(self) -> None:
        await self._draining.wait()
        self._wake.set()

    async def _take(self, request: worker_pb2.SessionRequest) -> None:
        """Does what a message asks for, a part of it a turn: one may hold thousands of requests and millions of ids."""
        for announcement in request.announced_handoffs:  # first: the request for which they are read may be here, too
            if (pages := to_announced(announcement, self._engine.roles)) is not None:
                self._engine.announce(pages)
        async for submit in _in_turns(request.submits, A_FEW):
            self._submit(submit)
        if request.renew_handoffs or request.release_handoffs:
            self._engine.keep_handoffs(request.renew_handoffs, request.release_handoffs)
        async for stream_id in _in_turns(request.aborts, _MANY):
            if stream_id in self._streams:
                self._drop(stream_id)
        async for stream_id in _in_turns(request.pauses, _MANY):
            if (stream := self._streams.get(stream_id)) is not None:
                stream.paused = True
        async for stream_id in _in_turns(request.resumes, _MANY):
            if (stream := self._streams.get(stream_id)) is not None:
                stream.paused = False
                self._mark(stream_id)

    def _submit(self, submit: worker_pb2.SessionSubmit) -> None:
        stream_id = submit.stream_id
        if stream_id in self._streams:
            raise InvalidArgumentError(f"stream {stream_id} is open already", field="submits.stream_id")
        stream: SessionStream
        if submit.HasField("embed"):
            stream = EmbeddingStream(submit.embed, self._embed)
        else:
            stream = GenerationStream(submit.request, self._start)
        self._streams[stream_id] = stream
        if self._draining.is_set():
            self._fail(stream_id, UnavailableError("this worker is shutting down", retry_after=1.0))
            return
        loop = asyncio.get_running_loop()
        seconds = submit.timeout_ms / 1000 if submit.HasField("timeout_ms") else None
        if seconds is not None:
            late = DeadlineExceededError("the deadline passed")
            stream.timer = loop.call_later(seconds, self._fail, stream_id, late)
        stream.starting = loop.create_task(self._begin(stream_id, stream, seconds), context=stream.context)

    async def _begin(self, stream_id: int, stream: SessionStream, seconds: float | None) -> None:
        try:
            await stream.begin(seconds, lambda: self._mark(stream_id))
        except SapwoodError as error:
            self._fail(stream_id, error)
        except Exception as error:
            logger.error("a request of a session failed", exc_info=error)
            self._fail(stream_id, InternalError("internal error; the worker's log has the details"))

    def _fail(self, stream_id: int, error: SapwoodError) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.error = error
            stream.paused = False
            self._mark(stream_id)

    def _mark(self, stream_id: int) -> None:
        self._dirty[stream_id] = None
        self._wake.set()

    def _fill(self, response: worker_pb2.SessionResponse) -> None:
        dirty, self._dirty = self._dirty, {}
        filled = 0
        for stream_id in dirty:
            if filled > ENOUGH_BYTES:
                self._mark(stream_id)
            elif (stream := self._streams.get(stream_id)) is not None and not stream.paused:
                filled += self._add_output(response, stream_id, stream)
        if self._tells_info and self._epoch() is not None:
            self._tells_info = False
            response.info.CopyFrom(self._info())
        now = asyncio.get_running_loop().time()
        if self._engine.load_version != self._load_version and now - self._load_sent >= _LOAD_INTERVAL:
            self._load_version = self._engine.load_version
            self._load_sent = now
            response.load.CopyFrom(to_load_report(self._engine.load, self._engine.kv_events))
        vitals = self._engine.vitals
        response.draining = self._draining.is_set() or vitals.stuck
        response.frozen_ms = int(vitals.frozen * 1000)
        response.step_ms = int(vitals.step * 1000)
        response.loop_lag_ms = int(vitals.lag.recent * 1000)

    def _add_output(self, response: worker_pb2.SessionResponse, stream_id: int, stream: SessionStream) -> int:
        """Puts what a stream has into a message; returns its size as it counts beside others'."""
        size, error = 0, stream.error
        if error is None:
            try:
                size = stream.write(response, stream_id, packs_tokens=self._packs_tokens)
            except SapwoodError as failure:
                error = failure
        if isinstance(error, SchedulerLostError):
            self._drop(
                stream_id
            )  # lost with the call that ends now, not refused: the router goes on with it, here or elsewhere
        elif error is not None:
            stream.context.run(logger.info, "request ends %s: %s", row_of(error).grpc.name, error.message)
            response.outputs.add(stream_id=stream_id, error=_to_error(error))
            self._drop(stream_id)
            size = ENOUGH_BYTES // A_FEW  # it is short, but to log it takes longer than many tokens
        elif stream.ended:
            self._drop(stream_id)
        elif stream.has_more:
            self._mark(stream_id)
        return size

    def _drop(self, stream_id: int) -> None:
        self._streams.pop(stream_id).close()
        if not self._streams:
            self._on_idle()
            if self._draining.is_set():
                self._wake.set()


async def _in_turns(items: Iterable[ItemT], count: int) -> AsyncIterator[ItemT]:
    """The items, so many in a turn of the event loop."""
    for number, item in enumerate(items, 1):
        yield item
        if number % count == 0:
            await asyncio.sleep(0)


def _heartbeat(first: worker_pb2.SessionRequest) -> float:
    milliseconds = first.heartbeat_ms if first.HasField("heartbeat_ms") else DEFAULT_HEARTBEAT_MS
    if milliseconds < LEAST_HEARTBEAT_MS:
        raise InvalidArgumentError(
            f"heartbeat_ms is {milliseconds}; it must be at least {LEAST_HEARTBEAT_MS}", field="heartbeat_ms"
        )
    return milliseconds / 1000


def _to_error(error: SapwoodError) -> worker_pb2.GenerationError:
    return worker_pb2.GenerationError(
        code=code_number(error),
        message=error.message,
        field=error.field or "",
        retry_after_ms=None if error.retry_after is None else round(error.retry_after * 1000),
    )
