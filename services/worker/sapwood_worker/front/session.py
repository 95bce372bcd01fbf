"""One ``Session`` call: many generations over it, all outputs of a scheduler step in one message, and a heartbeat.

A message costs about as much CPU as a token's whole way through the worker's front, so outputs are collected: the engine
hands over a step's outputs in one go, each marks its stream, and the next message carries all that are marked. While a
message is being written more are marked, and their tokens merge; what is kept for a slow reader is at most its requests'
own tokens.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from sapwood.v1 import worker_pb2
from sapwood_common.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    SapwoodError,
    UnavailableError,
)
from sapwood_common.network.channel import MAX_MESSAGE_BYTES
from sapwood_common.status import code_number, row_of
from sapwood_common.telemetry.logs import is_valid_request_id, request_id_var, traceparent_var
from sapwood_worker.front.convert import is_one_token, to_load_report, to_response
from sapwood_worker.front.engine import Engine
from sapwood_worker.front.generation import Generation

logger = logging.getLogger(__name__)

DEFAULT_HEARTBEAT_MS, LEAST_HEARTBEAT_MS = 200, 10
_LOAD_INTERVAL = 0.05
_ENOUGH_BYTES = 8 * 1024 * 1024
"""Bytes of log probabilities after which a message takes no further stream's; the next message does."""
_MOST_BYTES = MAX_MESSAGE_BYTES - 2 * _ENOUGH_BYTES
"""Bytes of one output's log probabilities. A message that is too large would end the session, and every stream with it."""

Start = Callable[[worker_pb2.WorkerGenerateRequest, float | None], Awaitable[Generation]]
"""Checks a request and submits it; gets the seconds to its deadline, None if it has none."""


class _Stream:
    """A stream of this session; ``generation`` is None while its request is being checked.

    Its log lines are written in ``context``, which holds its request and trace ids.
    """

    __slots__ = ("context", "error", "generation", "paused", "starting", "timer")

    def __init__(self, request: worker_pb2.WorkerGenerateRequest) -> None:
        self.context = contextvars.copy_context()
        if is_valid_request_id(request.request_id):
            self.context.run(request_id_var.set, request.request_id)
        if request.traceparent:
            self.context.run(traceparent_var.set, request.traceparent)
        self.generation: Generation | None = None
        self.starting: asyncio.Task[None] | None = None
        self.error: SapwoodError | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.paused = False


class Session:
    """Runs one call. Owned by the call's handler: it awaits :meth:`responses` and calls :meth:`close` in the end.

    Args:
        start: Starts a generation.
        engine: Its load is reported.
        info: Goes with the first response.
        epoch: Returns which start of the scheduler runs now, None if none does; the session ends when that changes.
        draining: Set when the worker is about to stop.
        on_idle: Called whenever the last open stream ends.
    """

    def __init__(
        self,
        start: Start,
        engine: Engine,
        info: worker_pb2.GetModelInfoResponse,
        epoch: Callable[[], int | None],
        draining: asyncio.Event,
        on_idle: Callable[[], None],
    ) -> None:
        self._start = start
        self._engine = engine
        self._info = info
        self._epoch = epoch
        self._draining = draining
        self._on_idle = on_idle
        self._streams: dict[int, _Stream] = {}
        self._dirty: dict[int, None] = {}
        self._filled = 0
        """Bytes of log probabilities in the message that is being built."""
        self._wake = asyncio.Event()
        self._problem: Exception | None = None
        self._over = False
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
            UnavailableError: The scheduler has ended; every stream was told so before.
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
            response = worker_pb2.SessionResponse(info=self._info)
            while True:
                self._fill(response)
                yield response
                if self._problem is not None:
                    raise self._problem
                if self._epoch() != self._info.epoch and not self._dirty:
                    raise UnavailableError("the worker's scheduler stopped", retry_after=1.0)
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
        """Ends every stream. May be called again."""
        for stream_id in tuple(self._streams):
            self._drop(stream_id)

    async def _read(self, first: worker_pb2.SessionRequest, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        try:
            self._take(first)
            async for request in requests:
                self._take(request)
        except SapwoodError as error:
            self._problem = error
        self._over = True
        self._wake.set()

    async def _until_draining(self) -> None:
        await self._draining.wait()
        self._wake.set()

    def _take(self, request: worker_pb2.SessionRequest) -> None:
        for submit in request.submits:
            self._submit(submit)
        for stream_id in request.aborts:
            if stream_id in self._streams:
                self._drop(stream_id)
        for stream_id in request.pauses:
            if (stream := self._streams.get(stream_id)) is not None:
                stream.paused = True
        for stream_id in request.resumes:
            if (stream := self._streams.get(stream_id)) is not None:
                stream.paused = False
                self._mark(stream_id)

    def _submit(self, submit: worker_pb2.SessionSubmit) -> None:
        stream_id = submit.stream_id
        if stream_id in self._streams:
            raise InvalidArgumentError(f"stream {stream_id} is open already", field="submits.stream_id")
        stream = self._streams[stream_id] = _Stream(submit.request)
        if self._draining.is_set():
            self._fail(stream_id, UnavailableError("this worker is shutting down", retry_after=1.0))
            return
        loop = asyncio.get_running_loop()
        seconds = submit.timeout_ms / 1000 if submit.HasField("timeout_ms") else None
        if seconds is not None:
            late = DeadlineExceededError("the deadline passed")
            stream.timer = loop.call_later(seconds, self._fail, stream_id, late)
        begin = self._begin(stream_id, stream, submit.request, seconds)
        stream.starting = loop.create_task(begin, context=stream.context)

    async def _begin(
        self, stream_id: int, stream: _Stream, request: worker_pb2.WorkerGenerateRequest, seconds: float | None
    ) -> None:
        try:
            generation = await self._start(request, seconds)
        except SapwoodError as error:
            self._fail(stream_id, error)
            return
        except Exception as error:
            logger.error("a generation could not begin", exc_info=error)
            self._fail(stream_id, InternalError("internal error; the worker's log has the details"))
            return
        if self._streams.get(stream_id) is not stream or stream.error is not None:
            generation.close()
            return
        stream.generation = generation
        generation.listen(lambda: self._mark(stream_id))

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
        self._filled = 0
        for stream_id in dirty:
            if self._filled > _ENOUGH_BYTES:
                self._mark(stream_id)
            elif (stream := self._streams.get(stream_id)) is not None and not stream.paused:
                self._add_output(response, stream_id, stream)
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

    def _add_output(self, response: worker_pb2.SessionResponse, stream_id: int, stream: _Stream) -> None:
        error = stream.error
        if error is None and stream.generation is not None:
            try:
                while (output := stream.generation.take()) is not None:
                    if self._packs_tokens and is_one_token(output):
                        response.token_streams.append(stream_id)
                        response.tokens.append(output.token_ids[0])
                    else:
                        response.outputs.add(stream_id=stream_id, response=self._measured(to_response(output)))
            except SapwoodError as failure:
                error = failure
            else:
                if stream.generation.ended:
                    self._drop(stream_id)
                return
        if error is not None:
            stream.context.run(logger.info, "generation ends %s: %s", row_of(error).grpc.name, error.message)
            response.outputs.add(stream_id=stream_id, error=_to_error(error))
            self._drop(stream_id)

    def _measured(self, output: worker_pb2.WorkerGenerateResponse) -> worker_pb2.WorkerGenerateResponse:
        if output.logprobs or output.prompt_logprobs:
            size = output.ByteSize()
            if size > _MOST_BYTES:
                # The request is at fault: on another worker it would be computed again and fail again.
                raise InvalidArgumentError(
                    f"log probabilities of {size} bytes: more than a message may have",
                    field="sampling.prompt_logprobs" if output.prompt_logprobs else "sampling.logprobs",
                )
            self._filled += size
        return output

    def _drop(self, stream_id: int) -> None:
        stream = self._streams.pop(stream_id)
        if stream.timer is not None:
            stream.timer.cancel()
        if stream.generation is not None:
            stream.generation.close()
        elif stream.starting is not None and stream.error is None:
            stream.starting.cancel()
        if not self._streams:
            self._on_idle()
            if self._draining.is_set():
                self._wake.set()


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
