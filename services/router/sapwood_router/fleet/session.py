"""The router's end of one ``Session`` call to a worker: requests go out together, a step's outputs come in together.

A response's outputs are handed to their requests without a task switch each.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Protocol, TypeAlias

from sapwood.v1 import worker_pb2
from sapwood_common.errors import SapwoodError
from sapwood_common.http2.client.duplex_call import DuplexCall
from sapwood_common.pacing.silence import Silence
from sapwood_router.fleet.convert import worker_output_of
from sapwood_router.fleet.outcome import WorkerLeftError, WorkerLostError
from sapwood_router.fleet.output import WorkerOutput
from sapwood_router.transport.shared_call import SharedCall
from sapwood_router.transport.stream_error import stream_error

TOKENS_A_MESSAGE = 256 * 1024
"""Beyond these a message takes no further request: far from what a worker takes, also where each brings a grammar."""
MOST_TOKENS = 8 * 1024 * 1024
"""Of one request: with 5 bytes each they fit into a message. One that is too large would end the session of all requests."""
_BYTES_A_TOKEN = 4
"""What a grammar is counted as, beside tokens."""
_CHECK_INTERVAL = 0.1

WorkerRequest: TypeAlias = worker_pb2.WorkerGenerateRequest | worker_pb2.WorkerEmbedRequest
"""What a stream begins with."""


class StreamSink(Protocol):
    """Takes what comes of a request. Called from the session's reader: it must not wait, and not raise."""

    def token(self, token_id: int) -> None:
        """One new token, with nothing else to be said: a shorter way for what comes most often."""
        ...

    def output(self, output: WorkerOutput) -> None:
        """New tokens; nothing follows the one with a finish."""
        ...

    def vectors(self, part: worker_pb2.WorkerEmbedResponse) -> None:
        """The next embeddings; nothing follows those with ``prompt_tokens``."""
        ...

    def failed(self, error: SapwoodError) -> None:
        """Nothing follows. WorkerLostError: nobody knows how far the worker got."""
        ...


class WorkerStream:
    """One request on a session. Whoever opened it closes it; after its end that does nothing."""

    __slots__ = ("_session", "stream_id")

    def __init__(self, session: WorkerSession, stream_id: int) -> None:
        self._session = session
        self.stream_id = stream_id

    def close(self) -> None:
        """Ends the request on the worker; its sink hears no more."""
        self._session.abort(self.stream_id)

    def pause(self) -> None:
        """No more output until :meth:`resume`; the worker keeps it."""
        self._session.pause(self.stream_id)

    def resume(self) -> None:
        """Output may come again."""
        self._session.resume(self.stream_id)


class WorkerSession(SharedCall):
    """Life cycle: construct with an open call whose first response was read, :meth:`carry` until it is lost.

    Args:
        address: The worker's, for messages.
        call: The call.
        on_response: Gets each message before its outputs are handed on.
        on_tokens: Gets the number of tokens that were handed on of each message.
        limit: How many seconds it may be without a message before it is lost, as of now.
        clock: Seconds, monotonic.

    Attributes:
        planned: Whether its end is: the worker announced it, or the router is to end it.
    """

    def __init__(
        self,
        address: str,
        call: DuplexCall,
        on_response: Callable[[worker_pb2.SessionResponse], None],
        on_tokens: Callable[[int], None],
        limit: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(call)
        self.planned = False
        self._address = address
        self._on_response = on_response
        self._on_tokens = on_tokens
        self._silence = Silence(_CHECK_INTERVAL, clock)
        self._limit = limit
        self._ids = itertools.count(1)
        self._sinks: dict[int, StreamSink] = {}
        self._submits: dict[int, tuple[WorkerRequest, int]] = {}
        """What is to be sent, and the milliseconds it has."""
        self._aborts: list[int] = []
        self._pauses: dict[int, bool] = {}
        self._problem: str | None = None

    def open(self, request: WorkerRequest, timeout: float, sink: StreamSink) -> WorkerStream:
        """Sends a request.

        Args:
            request: The request.
            timeout: Seconds until the worker gives it up.
            sink: Takes the answer, never before this returns.
        """
        stream_id = next(self._ids)
        self._sinks[stream_id] = sink
        if self._problem is not None:
            asyncio.get_running_loop().call_soon(self._fail, stream_id, self._lost())
        else:
            milliseconds = max(1, min(int(timeout * 1000), 2**32 - 1))
            self._submits[stream_id] = request, milliseconds
            self._schedule()
        return WorkerStream(self, stream_id)

    def abort(self, stream_id: int) -> None:
        """Ends a stream's request on the worker; does nothing if it has ended."""
        if self._drop(stream_id) is None:
            return
        self._pauses.pop(stream_id, None)
        if self._submits.pop(stream_id, None) is None:
            self._aborts.append(stream_id)
            self._schedule()

    def pause(self, stream_id: int) -> None:
        """Has the worker keep a stream's output until :meth:`resume`."""
        self._set_paused(stream_id, True)

    def resume(self, stream_id: int) -> None:
        """Has the worker send a stream's output again."""
        self._set_paused(stream_id, False)

    def give_up(self, problem: str) -> None:
        """The worker is of no use: the call ends, and every stream fails."""
        self._problem = self._problem or problem
        self.abandon(problem)

    async def carry(self) -> str:
        """Runs the call until it is lost; returns how. Every stream then open fails."""
        watcher = asyncio.ensure_future(self._watch())
        assert self._call is not None, "it is carried once"
        try:
            ended = await self._carry(self._call)
            self._problem = self._problem or str(ended)
        finally:
            if self._problem is None:
                self._problem, self.planned = "the router closed it", True
            watcher.cancel()
            for stream_id in tuple(self._sinks):
                self._fail(stream_id, self._lost())
        return self._problem

    def _take(self, message: bytes) -> None:
        response = worker_pb2.SessionResponse.FromString(message)
        self._silence.heard()
        self._on_response(response)
        handed_on = 0
        if response.token_streams:
            sinks = self._sinks
            for stream_id, token_id in zip(response.token_streams[:], response.tokens[:], strict=True):
                sink = sinks.get(stream_id)
                if sink is not None:
                    handed_on += 1
                    sink.token(token_id)
        for output in response.outputs:
            answer = output.response
            token_ids = answer.token_ids[:]
            sink = self._sinks.get(output.stream_id)
            if sink is None:
                continue  # closed here while this was on its way
            handed_on += len(token_ids)
            self._deliver(output, sink)
        if handed_on:
            self._on_tokens(handed_on)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_INTERVAL)
            silent = self._silence.check()
            if silent >= self._limit():
                break
        self.give_up(f"nothing heard for {silent:.1f} s")

    def _deliver(self, output: worker_pb2.SessionOutput, sink: StreamSink) -> None:
        if output.HasField("error"):
            self._fail(output.stream_id, stream_error(output.error))
            return
        if output.HasField("embeddings"):
            if output.embeddings.prompt_tokens:
                self._drop(output.stream_id)
            sink.vectors(output.embeddings)
            return
        parsed = worker_output_of(output.response)
        if parsed.finish is not None:
            self._drop(output.stream_id)
        sink.output(parsed)

    def _fail(self, stream_id: int, error: SapwoodError) -> None:
        sink = self._drop(stream_id)
        if sink is not None:
            sink.failed(error)

    def _drop(self, stream_id: int) -> StreamSink | None:
        return self._sinks.pop(stream_id, None)

    def _lost(self) -> WorkerLostError:
        if self.planned:
            return WorkerLeftError(f"worker {self._address} is gone: {self._problem}", retry_after=1.0)
        return WorkerLostError(f"worker {self._address} was lost: {self._problem}", retry_after=1.0)

    def _set_paused(self, stream_id: int, paused: bool) -> None:
        if stream_id in self._sinks and self._problem is None:
            self._pauses[stream_id] = paused
            self._schedule()

    def _next_message(self) -> bytes | None:
        if not (self._submits or self._aborts or self._pauses):
            return None
        message = worker_pb2.SessionRequest()
        if self._aborts:
            message.aborts.extend(self._aborts)
            self._aborts = []
        if self._pauses:
            message.pauses.extend(stream_id for stream_id, paused in self._pauses.items() if paused)
            message.resumes.extend(stream_id for stream_id, paused in self._pauses.items() if not paused)
            self._pauses = {}
        budget = TOKENS_A_MESSAGE
        while self._submits and budget > 0:
            stream_id = next(iter(self._submits))
            request, milliseconds = self._submits.pop(stream_id)
            if isinstance(request, worker_pb2.WorkerEmbedRequest):
                message.submits.add(stream_id=stream_id, embed=request, timeout_ms=milliseconds)
                budget -= sum(len(item.ids) for item in request.inputs)
            else:
                message.submits.add(stream_id=stream_id, request=request, timeout_ms=milliseconds)
                budget -= len(request.token_ids) + len(request.grammar.compiled) // _BYTES_A_TOKEN
        return message.SerializeToString()
