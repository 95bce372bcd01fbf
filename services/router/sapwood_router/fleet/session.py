"""The router's end of the ``Session`` call to a worker: requests go out together, a step's outputs come in together.

A response's outputs are handed to their requests without a task switch each.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

from sapwood.v1 import worker_pb2
from sapwood_common.errors import SapwoodError
from sapwood_common.network.channel import Dialer
from sapwood_net.http2.client.duplex_call import CallEndedError, DuplexCall
from sapwood_net.pacing.silence import Silence
from sapwood_router.fleet.circuit_breaker import WorkerLeftError, WorkerLostError
from sapwood_router.fleet.convert import WorkerOutput, worker_output_of
from sapwood_router.transport.held_tickets import HeldTickets
from sapwood_router.transport.shared_call import BYTES_A_TOKEN, OPEN_TIMEOUT, TOKENS_A_MESSAGE, SharedCall, stream_error

logger = logging.getLogger(__name__)

_METHOD = "/sapwood.v1.Worker/Session"
MOST_TOKENS = 4 * 1024 * 1024
"""The most tokens of one request: at 5 bytes each they fit into a message. One too large would end the session for all."""
_CHECK_INTERVAL = 0.1
_SUBMITS_FIELD = worker_pb2.SessionRequest.SUBMITS_FIELD_NUMBER << 3 | 2
"""The tag of the field ``submits``; each entry's length and bytes follow it."""

WorkerRequest: TypeAlias = worker_pb2.WorkerGenerateRequest | worker_pb2.WorkerEmbedRequest
"""The message that opens a stream."""


class StreamSink(Protocol):
    """Takes a request's output. The session's reader calls it, so it must not wait and must not raise."""

    def output(self, token_ids: Sequence[int], more: WorkerOutput | None = None) -> None:
        """New tokens, and what else the worker says with them; nothing follows a finish."""
        ...

    def vectors(self, part: worker_pb2.WorkerEmbedResponse) -> None:
        """The next embeddings; nothing follows those with ``prompt_tokens``."""
        ...

    def failed(self, error: SapwoodError) -> None:
        """The request failed; nothing follows. With a WorkerLostError nobody knows how far the worker got."""
        ...


class WorkerStream:
    """One request on a session. Its opener closes it; after its end that does nothing."""

    __slots__ = ("_session", "stream_id")

    def __init__(self, session: WorkerSession, stream_id: int) -> None:
        self._session = session
        self.stream_id = stream_id

    def close(self) -> None:
        """Ends the request on the worker; its sink hears no more."""
        self._session.abort(self.stream_id)

    def pause(self) -> None:
        """No more output until :meth:`resume`; the worker keeps it."""
        self._session.set_paused(self.stream_id, True)

    def resume(self) -> None:
        """Output may come again."""
        self._session.set_paused(self.stream_id, False)


class WorkerSession(SharedCall):
    """Opens streams, and carries them over one call while :meth:`run` runs. A lost call takes its streams with it: they fail.

    Args:
        address: The worker's.
        dialer: Connects to it.
        heartbeat_ms: Asked for as the most time between messages.
        on_response: Gets each message before its outputs are handed on, and whether it is the call's first.
        on_lost: Gets the reason when the call is lost or cannot be opened; returns the seconds until the next try.
        on_tokens: Gets the number of tokens that were handed on of each message.
        limit: How many seconds it may be without a message before it is lost, at this moment.
        clock: Seconds, monotonic.

    Attributes:
        planned: Whether the call's end is: the worker announced it, or the router is to end it.
        tickets: Those that the worker gave over this call.
    """

    def __init__(
        self,
        address: str,
        dialer: Dialer,
        heartbeat_ms: int,
        on_response: Callable[[worker_pb2.SessionResponse, bool], None],
        on_lost: Callable[[str], float],
        on_tokens: Callable[[int], None],
        limit: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(address, _METHOD, dialer)
        self.planned = False
        self._heartbeat_ms = heartbeat_ms
        self._on_response = on_response
        self._on_lost = on_lost
        self._on_tokens = on_tokens
        self._limit = limit
        self._clock = clock
        self._silence = Silence(_CHECK_INTERVAL, clock)
        self._ids = itertools.count(1)
        self._sinks: dict[int, StreamSink] = {}
        # How many tokens each stream has got, once it has any.
        self._taken: dict[int, int] = {}
        self._submits: dict[int, tuple[WorkerRequest, int, Sequence[bytes]]] = {}
        """Requests that are yet to be sent, each with its timeout in milliseconds and more of it; by stream id."""
        self._aborts: list[int] = []
        self._pauses: dict[int, bool] = {}
        self._announcements: deque[worker_pb2.HandoffAnnouncement] = deque()
        self.tickets = HeldTickets(address, self._schedule)
        self._problem: str | None = None
        """Why this side gave the call up; None: it did not."""

    @property
    def load(self) -> int:
        """Streams open."""
        return len(self._sinks)

    def open(
        self, request: WorkerRequest, timeout: float, sink: StreamSink, more: Sequence[bytes] = ()
    ) -> WorkerStream:
        """Sends a request.

        Args:
            request: The request.
            timeout: Seconds until the worker gives it up.
            sink: Takes the answer, never before this returns.
            more: The rest of the request, each part a ``SessionSubmit`` as bytes: to copy it into one takes too long.
        """
        stream_id = next(self._ids)
        self._sinks[stream_id] = sink
        self._submits[stream_id] = request, max(1, min(int(timeout * 1000), 2**32 - 1)), more
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

    def announce(self, pages: worker_pb2.HandoffAnnouncement) -> None:
        """Tells of pages that the worker may read ahead of a request. It may be lost: then they are read later."""
        if self._stands:
            self._announcements.append(pages)
            self._schedule()

    def set_paused(self, stream_id: int, paused: bool) -> None:
        """Has the worker keep a stream's output, or send it again."""
        if stream_id in self._sinks:
            self._pauses[stream_id] = paused
            self._schedule()

    def abandon(self, problem: str) -> None:
        """The worker is of no use: the call ends, and every stream fails."""
        self._problem = self._problem or problem
        super().abandon(problem)

    def _opened(self, call: DuplexCall) -> bytes:
        self._problem, self.planned = None, False
        self._silence = Silence(_CHECK_INTERVAL, self._clock)
        self._watch(call)
        return worker_pb2.SessionRequest(heartbeat_ms=self._heartbeat_ms, packed_tokens=True).SerializeToString()

    def _lost(self, end: CallEndedError) -> float:
        problem, self._problem = self._problem or str(end), None
        pause = self._on_lost(problem)
        self._fail_all(problem)
        return pause

    def _stopped(self) -> None:
        self.planned = True
        self._fail_all("the router closed it")

    def _patience(self) -> float:
        return max(OPEN_TIMEOUT, self._limit())

    def _watch(self, call: DuplexCall) -> None:
        if call.ended:
            return
        silent = self._silence.check()
        if silent < (self._limit() if self._stands else self._patience()):
            asyncio.get_running_loop().call_later(_CHECK_INTERVAL, self._watch, call)
        else:
            self.abandon(f"nothing heard for {silent:.1f} s" if self._stands else "it does not answer")

    def _take(self, message: bytes) -> Iterator[None]:
        response = worker_pb2.SessionResponse.FromString(message)
        self._silence.heard()
        first, self._stands = not self._stands, True
        self._on_response(response, first)
        handed_on = 0
        if response.token_streams:
            sinks, taken, streams = self._sinks, self._taken, response.token_streams[:]
            positions = response.positions[:] or [-1] * len(streams)  # older workers say none
            for stream_id, token_id, position in zip(streams, response.tokens[:], positions, strict=True):
                sink = sinks.get(stream_id)
                if sink is not None:
                    had = taken.get(stream_id, 0)
                    if position != had and position >= 0:
                        self._out_of_turn(stream_id, position)
                        continue
                    handed_on += 1
                    taken[stream_id] = had + 1
                    sink.output((token_id,))
        for number, output in enumerate(response.outputs):
            if number:
                yield
            sink = self._sinks.get(output.stream_id)
            if sink is not None:
                handed_on += self._deliver(output, sink)
            elif output.response.HasField("ticket"):  # it was closed here while this was on its way
                self.tickets.hold(output.response.ticket).release()
        if handed_on:
            self._on_tokens(handed_on)

    def _deliver(self, output: worker_pb2.SessionOutput, sink: StreamSink) -> int:
        """Hands an output on; returns how many tokens are in it."""
        if output.HasField("response"):
            parsed = worker_output_of(output.response)
            received = self._taken.get(output.stream_id, 0)
            if parsed.position is not None and parsed.position != received:
                self._out_of_turn(output.stream_id, parsed.position)
                return 0
            received = self._taken[output.stream_id] = received + len(parsed.token_ids)
            if parsed.total is not None and parsed.total != received:
                self._out_of_turn(output.stream_id, parsed.total)
                return 0
            if output.response.HasField("ticket"):
                parsed.ticket = self.tickets.hold(output.response.ticket)
            elif output.response.HasField("announced"):
                parsed.announced = self.tickets.hold(output.response.announced)
            if parsed.finish is not None or parsed.ticket is not None:
                self._drop(output.stream_id)
            sink.output(parsed.token_ids, parsed)
            return len(parsed.token_ids)
        if output.HasField("embeddings"):
            if output.embeddings.prompt_tokens:
                self._drop(output.stream_id)
            sink.vectors(output.embeddings)
        else:
            self._fail(output.stream_id, stream_error(output.error))
        return 0

    def _fail(self, stream_id: int, error: SapwoodError) -> None:
        sink = self._drop(stream_id)
        if sink is not None:
            sink.failed(error)

    def _out_of_turn(self, stream_id: int, position: int) -> None:
        """Something of a stream was lost or came twice: it fails as with its worker, and continues from what is right."""
        received = self._taken.get(stream_id, 0)
        problem = f"worker {self._address} said what follows {position} tokens of a request after {received} had come"
        logger.warning("%s", problem)
        self._aborts.append(stream_id)
        self._schedule()
        self._fail(stream_id, WorkerLostError(problem, retry_after=1.0))

    def _fail_all(self, problem: str) -> None:
        """Requests in flight are lost with the call, and so are messages that were to be sent on it."""
        self._submits.clear()
        self._aborts.clear()
        self._pauses.clear()
        self._announcements.clear()
        self.tickets.clear()
        kind, how = (WorkerLeftError, "is gone") if self.planned else (WorkerLostError, "was lost")
        for stream_id in tuple(self._sinks):
            self._fail(stream_id, kind(f"worker {self._address} {how}: {problem}", retry_after=1.0))

    def _drop(self, stream_id: int) -> StreamSink | None:
        sink = self._sinks.pop(stream_id, None)
        self._taken.pop(stream_id, None)
        if self._finishing:
            self._end_if_finished()
        return sink

    def _next_message(self) -> bytes | None:
        if not (self._submits or self._aborts or self._pauses or self._announcements or self.tickets.due):
            return None
        message = worker_pb2.SessionRequest()
        if self.tickets.due:
            self.tickets.put_into(message)
        if self._aborts:
            message.aborts.extend(self._aborts)
            self._aborts = []
        if self._pauses:
            message.pauses.extend(stream_id for stream_id, paused in self._pauses.items() if paused)
            message.resumes.extend(stream_id for stream_id, paused in self._pauses.items() if not paused)
            self._pauses = {}
        budget = TOKENS_A_MESSAGE
        while self._announcements and budget > 0:
            pages = self._announcements.popleft()
            message.announced_handoffs.append(pages)
            budget -= len(pages.token_ids) + pages.ticket.ByteSize() // BYTES_A_TOKEN
        while self._submits and budget > 0:
            stream_id = next(iter(self._submits))
            request, milliseconds, more = self._submits.pop(stream_id)
            if isinstance(request, worker_pb2.WorkerEmbedRequest):
                message.submits.add(stream_id=stream_id, embed=request, timeout_ms=milliseconds)
                budget -= sum(len(item.ids) for item in request.inputs)
            else:
                if more:  # fields of a message may come in any number of parts
                    submit = worker_pb2.SessionSubmit(stream_id=stream_id, request=request, timeout_ms=milliseconds)
                    return b"".join((message.SerializeToString(), *_in_parts((submit.SerializeToString(), *more))))
                message.submits.add(stream_id=stream_id, request=request, timeout_ms=milliseconds)
                budget -= len(request.token_ids) + len(request.grammar.compiled) // BYTES_A_TOKEN
        return message.SerializeToString()


def _in_parts(parts: Sequence[bytes]) -> Sequence[bytes]:
    """``submits`` of a ``SessionRequest``, one more, in its parts."""
    size, head = sum(map(len, parts)), bytearray((_SUBMITS_FIELD,))
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return (bytes(head), *parts)
