"""One ``Session`` call: many requests over it, all outputs of a scheduler step in one message, and a heartbeat.

A message costs about as much CPU as a token's whole way through the worker's front, so outputs are collected: the engine
hands over a step's outputs in one go, each marks its stream, and the next message carries all that are marked. While a
message is being written more are marked, and their tokens merge; what is kept for a slow reader is at most its requests'
own tokens.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

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
from sapwood_net.pacing.afterwards import Afterwards
from sapwood_net.pacing.heavy_work import A_FEW
from sapwood_worker.front.convert import is_one_token, to_announced, to_load_report, to_lora_report, to_response
from sapwood_worker.front.engine import Engine, Generation, SchedulerLostError
from sapwood_worker.front.loras import Loras

logger = logging.getLogger(__name__)


# The requests of a session. Each can be begun, can write the new part of its answer into a message, and can be closed.


ENOUGH_BYTES = 8 * 1024 * 1024
"""Once a message has this many bytes of log probabilities, further streams wait for the next message."""
_MOST_BYTES = MAX_MESSAGE_BYTES - 2 * ENOUGH_BYTES
"""Most bytes of one output's log probabilities. A message that is too large would end the session, and every stream with it."""
_PART_BYTES = 256 * 1024
_PART_WEIGHT = 8
"""How many bytes of log probabilities a byte of a vector counts as: vectors can wait, other requests' tokens cannot."""

Start = Callable[[worker_pb2.WorkerGenerateRequest, float | None], Awaitable[Generation]]
"""Checks a request and submits it; gets the seconds to its deadline, None if it has none."""
Embed = Callable[[worker_pb2.WorkerEmbedRequest, float | None], Awaitable[tuple[npt.NDArray[np.float32], int]]]
"""Embeds a request's inputs; returns the vectors and the number of tokens that were embedded."""


class SessionStream(ABC):
    """One request of a session. Its log lines are written in ``context``, which holds its request and trace ids.

    Args:
        request_id: For logs; may be anything.
        traceparent: The trace context it belongs to; may be empty.

    Attributes:
        starting: Runs :meth:`begin`.
        error: Why it failed.
        timer: Ends it at its deadline.
        paused: Whether its output waits for the client to read.
    """

    def __init__(self, request_id: str, traceparent: str) -> None:
        self.context = contextvars.copy_context()
        if is_valid_request_id(request_id):
            self.context.run(request_id_var.set, request_id)
        if traceparent:
            self.context.run(traceparent_var.set, traceparent)
        self.starting: asyncio.Task[None] | None = None
        self.error: SapwoodError | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.paused = False

    @abstractmethod
    async def begin(self, seconds: float | None, ready: Callable[[], None]) -> None:
        """Checks and submits the request.

        Args:
            seconds: To its deadline; None: it has none.
            ready: Called whenever there is output; never after :meth:`close`.

        Raises:
            SapwoodError: It is refused, or failed.
        """

    @abstractmethod
    def write(self, response: worker_pb2.SessionResponse, stream_id: int, *, packs_tokens: bool) -> int:
        """Puts the new part of the answer, if there is any, into a message; returns the bytes that it counts as.

        Raises:
            SapwoodError: It failed.
        """

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether all of the answer was written."""

    @property
    def has_more(self) -> bool:
        """Whether there is more to write than the last :meth:`write` took."""
        return False

    def close(self) -> None:
        """Ends it, wherever it is."""
        if self.timer is not None:
            self.timer.cancel()
        if self.starting is not None:
            self.starting.cancel()


class GenerationStream(SessionStream):
    """A generation.

    Args:
        request: Its request.
        start: Starts it.
    """

    def __init__(self, request: worker_pb2.WorkerGenerateRequest, start: Start) -> None:
        super().__init__(request.request_id, request.traceparent)
        self._request: worker_pb2.WorkerGenerateRequest | None = request
        self._start = start
        self._generation: Generation | None = None

    async def begin(self, seconds: float | None, ready: Callable[[], None]) -> None:
        request, self._request = self._request, None  # its prompt may be long, and is not needed twice
        assert request is not None, "a stream begins once"
        self._generation = await self._start(request, seconds)
        self._generation.listen(ready)

    def write(self, response: worker_pb2.SessionResponse, stream_id: int, *, packs_tokens: bool) -> int:
        size = 0
        while self._generation is not None and (output := self._generation.take()) is not None:
            if packs_tokens and is_one_token(output) and self._generation.knows_weights(output):
                response.token_streams.append(stream_id)
                response.tokens.append(output.token_ids[0])
                response.positions.append(output.completion_tokens - 1)
            else:
                version = self._generation.weight_version(output)
                message = to_response(output, self._generation.lora_digest, version)
                size += _measured(message)
                response.outputs.add(stream_id=stream_id, response=message)
        return size

    @property
    def ended(self) -> bool:
        return self._generation is not None and self._generation.ended

    def close(self) -> None:
        super().close()
        if self._generation is not None:
            self._generation.close()


class EmbeddingStream(SessionStream):
    """An embedding request. Its vectors go out in parts, so that other requests' tokens need not wait for all of them.

    Args:
        request: The request.
        embed: Embeds.
    """

    def __init__(self, request: worker_pb2.WorkerEmbedRequest, embed: Embed) -> None:
        super().__init__(request.request_id, request.traceparent)
        self._request: worker_pb2.WorkerEmbedRequest | None = request
        self._embed = embed
        self._parts: deque[npt.NDArray[np.float32]] = deque()
        self._prompt_tokens = 0

    async def begin(self, seconds: float | None, ready: Callable[[], None]) -> None:
        request, self._request = self._request, None
        assert request is not None, "a stream begins once"
        vectors, self._prompt_tokens = await self._embed(request, seconds)
        rows = max(1, _PART_BYTES // max(1, vectors[0].nbytes))
        self._parts.extend(vectors[start : start + rows] for start in range(0, len(vectors), rows))
        ready()

    def write(self, response: worker_pb2.SessionResponse, stream_id: int, *, packs_tokens: bool) -> int:
        if not self._parts:
            return 0
        part = self._parts.popleft()
        output = response.outputs.add(stream_id=stream_id)
        for vector in part:
            output.embeddings.embeddings.add(values=vector.tolist())
        if not self._parts:
            output.embeddings.prompt_tokens = self._prompt_tokens
        return part.nbytes * _PART_WEIGHT

    @property
    def ended(self) -> bool:
        return self._prompt_tokens > 0 and not self._parts

    @property
    def has_more(self) -> bool:
        return bool(self._parts)


def _measured(output: worker_pb2.WorkerGenerateResponse) -> int:
    """The bytes of an output's log probabilities."""
    if not (output.logprobs or output.prompt_logprobs):
        return 0
    size = output.ByteSize()
    if size > _MOST_BYTES:
        # The request is at fault: on another worker it would be computed again and fail again.
        raise InvalidArgumentError(
            f"log probabilities of {size} bytes: more than a message may have",
            field="sampling.prompt_logprobs" if output.prompt_logprobs else "sampling.logprobs",
        )
    return size


DEFAULT_HEARTBEAT_MS, LEAST_HEARTBEAT_MS = 200, 10
_LOAD_INTERVAL = 0.05
_LORA_INTERVAL, _SLOT_INTERVAL = 0.1, 0.5
"""Seconds between two reports on adapters, for what is loaded, and for what the device's slots hold."""
_MANY = 1024
"""Stream ids of a message that are looked at in a turn of the event loop."""

ItemT = TypeVar("ItemT")


class LoraNews:
    """Says when a peer is to hear of the adapters again: at once when it has heard nothing yet or what is loaded has changed, and
    for a change of their slots not too often.

    Args:
        loras: The adapters.
    """

    def __init__(self, loras: Loras) -> None:
        self._loras = loras
        self._version = -1
        self._slots: tuple[tuple[int, ...], int] = ((), 0)
        self._told = 0.0

    @property
    def due(self) -> float | None:
        """Seconds until a report is due, 0 if one is now; None: nothing has changed."""
        if not self._loras.slots:
            return None
        if self._loras.report_version != self._version:
            interval = _LORA_INTERVAL
        elif self._held() != self._slots:
            interval = _SLOT_INTERVAL
        else:
            return None
        return max(0.0, self._told + interval - time.monotonic())

    def report(self) -> worker_pb2.LoraReport | None:
        """The report that is due; None: there is none."""
        if self.due != 0:
            return None
        self._version, self._slots, self._told = self._loras.report_version, self._held(), time.monotonic()
        return to_lora_report(self._loras)

    def _held(self) -> tuple[tuple[int, ...], int]:
        """What the device's slots hold, and how many of them no running request uses."""
        loads = self._loras.loads()
        return ((), 0) if loads is None else (loads.slots, loads.unused)


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
        loras: The adapters, which are reported.
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
        loras: Loras,
    ) -> None:
        self._loras = loras
        self._lora_news = LoraNews(loras)
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
        """Carries out a message in parts, one part in each turn of the event loop: a message may hold thousands of requests and
        millions of ids."""
        for announcement in request.announced_handoffs:  # first: the request for which they are read may be here, too
            if (pages := to_announced(announcement, self._engine.roles, self._loras)) is not None:
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
            stream.timer = loop.call_later(seconds, self._expire, stream_id)
        stream.starting = loop.create_task(self._begin(stream_id, stream, seconds), context=stream.context)

    async def _begin(self, stream_id: int, stream: SessionStream, seconds: float | None) -> None:
        try:
            await stream.begin(seconds, lambda: self._mark(stream_id))
        except SapwoodError as error:
            self._fail(stream_id, error)
        except Exception as error:
            logger.error("a request of a session failed", exc_info=error)
            self._fail(stream_id, InternalError("internal error; the worker's log has the details"))

    def _expire(self, stream_id: int) -> None:
        self._fail(stream_id, DeadlineExceededError("the deadline passed"))

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
        if (report := self._lora_news.report()) is not None:
            response.loras.CopyFrom(report)
        liveness = self._engine.liveness
        response.draining = self._draining.is_set() or liveness.stuck
        response.frozen_ms = int(liveness.frozen * 1000)
        response.step_ms = int(liveness.step * 1000)
        response.loop_lag_ms = int(liveness.lag.recent * 1000)

    def _add_output(self, response: worker_pb2.SessionResponse, stream_id: int, stream: SessionStream) -> int:
        """Puts a stream's outputs into a message; returns the size that counts towards the message's limit."""
        size, error = 0, stream.error
        if error is None:
            try:
                size = stream.write(response, stream_id, packs_tokens=self._packs_tokens)
            except SapwoodError as failure:
                error = failure
        if isinstance(error, SchedulerLostError):
            self._drop(
                stream_id
            )  # lost with the call that ends now, not refused: the router continues the request, here or elsewhere
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
    """Yields the items, at most ``count`` in a turn of the event loop."""
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
