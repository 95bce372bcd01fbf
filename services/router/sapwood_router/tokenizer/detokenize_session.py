"""One Detokenize call to a replica of the tokenizer, shared by many requests.

One call, not one a request, because messages are what costs CPU: whatever the requests have ready goes out together. A lost call
is opened again, and each stream open at the time is replayed on it from its tokens; the output that its client has already is
dropped as it comes again. A restart of the tokenizer is a pause. Where there are several replicas, another one's session takes
the streams over; see ``detokenize_pool``.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator

from sapwood.v1 import tokenizer_pb2
from sapwood_common.errors import UnavailableError
from sapwood_common.http2.client.duplex_call import CallEndedError, DuplexCall
from sapwood_router.request.field_names import detokenizer_error
from sapwood_router.request.output import OutputOptions
from sapwood_router.tokenizer.convert import output_of, to_options
from sapwood_router.tokenizer.detokenize_stream import DetokenizeStream
from sapwood_router.tokenizer.replica import TokenizerReplica
from sapwood_router.transport.shared_call import BYTES_A_TOKEN, RETRY_INTERVAL, SharedCall
from sapwood_router.transport.stream_error import stream_error

logger = logging.getLogger(__name__)

_METHOD = "/sapwood.v1.Tokenizer/Detokenize"
_SETTLED_AFTER = 0.5
_GATHERING = 0.002
"""Seconds to the next message after one with inputs of ``_MANY`` streams. So many streams are on several workers, whose steps
end at different times: a short wait puts their tokens into one message."""
_MANY = 8
_TOKENS_A_MESSAGE = 16 * 1024
"""A message with so many tokens takes no more: to make it takes a millisecond."""


class DetokenizeSession(SharedCall):
    """Opens streams, and carries them over one call while :meth:`run` runs.

    Args:
        replica: Where the call goes.
        grace: Seconds that streams wait for a replica that is gone and does not say that it starts before they fail UNAVAILABLE.
        on_lost: Called with this session when its call is lost, and again, with False, for each attempt to open it anew that
            fails.
    """

    def __init__(
        self, replica: TokenizerReplica, grace: float, on_lost: Callable[[DetokenizeSession, bool], None]
    ) -> None:
        super().__init__(replica.address, _METHOD, replica.dialer)
        self._replica = replica
        self._grace = grace
        self._on_lost = on_lost
        self._ids = itertools.count(1)
        self._streams: dict[int, DetokenizeStream] = {}
        self._dirty: dict[int, DetokenizeStream] = {}
        self._cancelled: list[int] = []
        self._sent = 0.0
        self._last_inputs = 0
        self._lost_since: float | None = None

    @property
    def up(self) -> bool:
        """Whether the call stands and the replica is well."""
        return self._stands and self.passes and self._replica.problem is None

    @property
    def load(self) -> int:
        """Streams open."""
        return len(self._streams)

    def open(self, options: OutputOptions, *, whole: bool) -> DetokenizeStream:
        """A new stream, read in one piece at its end if ``whole``. The caller reads it to its end or closes it."""
        stream = DetokenizeStream(next(self._ids), options, self._on_dirty, self._on_close, whole=whole)
        self._streams[stream.stream_id] = stream
        return stream

    def hand_over(self) -> list[DetokenizeStream]:
        """All streams, which are no longer this session's."""
        streams = list(self._streams.values())
        self._streams.clear()
        self._dirty.clear()
        self._end_if_finished()
        return streams

    def adopt(self, stream: DetokenizeStream) -> None:
        """Takes over a stream whose own session was lost: it is replayed here."""
        stream.attach(next(self._ids), self._on_dirty, self._on_close)
        stream.rewind()
        self._streams[stream.stream_id] = stream
        self._on_dirty(stream)

    def _lost(self, end: CallEndedError) -> float:
        now = asyncio.get_running_loop().time()
        first = self._lost_since is None
        if self._lost_since is None:
            self._lost_since = now
            logger.info("the detokenizer call was lost with %d streams open: %s", len(self._streams), end)
        self._on_lost(self, first)
        if now - max(self._lost_since, self._replica.heard) >= self._grace:
            self._fail_all("the tokenizer is not available")
        self._cancelled.clear()
        for stream in self._streams.values():
            stream.rewind()
        self._dirty = dict(self._streams)
        return RETRY_INTERVAL

    def _opened(self, call: DuplexCall) -> bytes:
        asyncio.get_running_loop().call_later(_SETTLED_AFTER, self._settle, call)
        return b""

    def _stopped(self) -> None:
        self._fail_all("this router stops")

    def _take(self, message: bytes) -> Iterator[None]:
        self._lost_since = None
        self._stands = True
        for number, output in enumerate(tokenizer_pb2.DetokenizeResponse.FromString(message).outputs):
            if number:
                yield
            self._deliver(output)

    def _settle(self, call: DuplexCall) -> None:
        # With nothing to detokenize no answer will say that the call stands.
        if not call.ended:
            self._lost_since = None
            self._stands = True

    def _gather(self) -> None:
        """Sends what there is at the end of this turn of the event loop, or ``_GATHERING`` later while many streams send."""
        if self._flushing:
            return
        busy = self._last_inputs >= _MANY and asyncio.get_running_loop().time() - self._sent < _GATHERING
        self._schedule(_GATHERING if busy else 0.0)

    def _next_message(self) -> bytes | None:
        if not self._dirty and not self._cancelled:
            return None
        request = tokenizer_pb2.DetokenizeRequest()
        for stream_id in self._cancelled:
            request.inputs.add(stream_id=stream_id, cancel=True)
        self._cancelled.clear()
        budget = _TOKENS_A_MESSAGE
        while self._dirty and budget > 0:
            _, stream = self._dirty.popitem()
            budget -= self._add_input(request, stream, budget)
        self._last_inputs, self._sent = len(request.inputs), asyncio.get_running_loop().time()
        return request.SerializeToString()

    def _add_input(self, request: tokenizer_pb2.DetokenizeRequest, stream: DetokenizeStream, budget: int) -> int:
        upto = min(len(stream.token_ids), stream.written + budget)
        cost = upto - stream.written
        complete = upto == len(stream.token_ids)
        end = stream.end_pushed and complete and not stream.end_written
        item = request.inputs.add(
            stream_id=stream.stream_id, token_ids=stream.token_ids[stream.written : upto], end=end
        )
        if not stream.opened:
            stream.opened = True
            options = to_options(stream.options)
            item.options.CopyFrom(options)
            cost += options.ByteSize() // BYTES_A_TOKEN
        stream.end_written = stream.end_written or end
        stream.wrote(upto)
        if not complete:
            self._dirty[stream.stream_id] = stream
        return cost

    def _deliver(self, output: tokenizer_pb2.DetokenizeOutput) -> None:
        stream = self._streams.get(output.stream_id)
        if stream is None:
            return  # closed here while this was on its way
        if output.HasField("error"):
            stream.opened = False
            stream.fail(detokenizer_error(stream_error(output.error)))
            return
        if output.ended:
            self._streams.pop(output.stream_id)
            self._dirty.pop(output.stream_id, None)
            self._end_if_finished()
        stream.deliver(
            output_of(output),
            output.tokens_consumed,
            reasoning_tokens=output.reasoning_tokens,
            ended=output.ended,
            stop_match=output.stop_match if output.HasField("stop_match") else None,
        )

    def _on_dirty(self, stream: DetokenizeStream) -> None:
        self._dirty[stream.stream_id] = stream
        self._gather()

    def _on_close(self, stream: DetokenizeStream) -> None:
        self._streams.pop(stream.stream_id, None)
        self._dirty.pop(stream.stream_id, None)
        if stream.opened:
            self._cancelled.append(stream.stream_id)
            self._gather()
        self._end_if_finished()

    def _fail_all(self, problem: str) -> None:
        for stream in tuple(self._streams.values()):
            stream.fail(UnavailableError(problem, retry_after=1.0))
