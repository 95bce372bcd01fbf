"""The streams of one Detokenize call."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from sapwood.v1 import tokenizer_pb2
from sapwood_common.errors import InternalError, InvalidArgumentError, SapwoodError
from sapwood_common.telemetry.logs import is_valid_request_id, request_id_var
from sapwood_text.parsed_stream import ParsedStream, StreamOptions
from sapwood_tokenizer.serve.convert import add_events, to_stream_options, within_options, write_error
from sapwood_tokenizer.serve.open_streams import OpenStreams

logger = logging.getLogger(__name__)

OpenStream = Callable[[StreamOptions], ParsedStream]

_TOKENS_A_STEP = 1024
"""Tokens decoded without a break: a few milliseconds of work."""
_INPUTS_A_STEP = 256


@dataclass(slots=True)
class _Open:
    stream: ParsedStream
    option_bytes: int
    name: str


class DetokenizeCall:
    """Takes inputs, gives outputs, and remembers the streams in between. A failing stream ends alone.

    Args:
        open_stream: Makes a stream; raises InvalidArgumentError where its options name no parser.
        vocab_size: Every token id must be below it.
        open_streams: Counts the streams of all calls.
    """

    def __init__(self, open_stream: OpenStream, vocab_size: int, open_streams: OpenStreams) -> None:
        self._open_stream = open_stream
        self._vocab_size = vocab_size
        self._open_streams = open_streams
        self._streams: dict[int, _Open] = {}

    @property
    def idle(self) -> bool:
        """Whether no stream is open."""
        return not self._streams

    def process(self, request: tokenizer_pb2.DetokenizeRequest) -> Iterator[tokenizer_pb2.DetokenizeResponse]:
        """Takes the inputs of one message in steps of a few milliseconds; yields a response after each.

        A response may have no outputs. An input with very many tokens takes several steps, and may get an output in each.
        """
        waiting: list[tokenizer_pb2.DetokenizeInput] = []
        tokens = 0
        for item in request.inputs:
            count = len(item.token_ids)
            for part in (item,) if count <= _TOKENS_A_STEP else _slices(item):
                waiting.append(part)
                tokens += min(count, _TOKENS_A_STEP)
                if tokens >= _TOKENS_A_STEP or len(waiting) >= _INPUTS_A_STEP:
                    yield self._process_all(waiting)
                    waiting, tokens = [], 0
        if waiting:
            yield self._process_all(waiting)

    def _process_all(self, inputs: Iterable[tokenizer_pb2.DetokenizeInput]) -> tokenizer_pb2.DetokenizeResponse:
        response = tokenizer_pb2.DetokenizeResponse()
        for item in inputs:
            try:
                self._process(item, response)
            except Exception as error:
                opened = self._forget(item.stream_id)
                if not isinstance(error, SapwoodError):
                    _log_fault(error, opened.name if opened is not None else item.options.tool_call_id_seed)
                    error = InternalError("internal error; the service's log has the details")
                output = response.outputs.add(stream_id=item.stream_id, ended=True)
                write_error(error, output.error)
        return response

    def close(self) -> None:
        """Forgets all streams: the call is over."""
        for stream_id in tuple(self._streams):
            self._forget(stream_id)

    def _process(self, item: tokenizer_pb2.DetokenizeInput, response: tokenizer_pb2.DetokenizeResponse) -> None:
        """Takes one input and adds its output, if there is any, to ``response``; if it raises, it has added nothing."""
        stream_id = item.stream_id
        if item.cancel:
            self._forget(stream_id)
            return
        opened = self._streams.get(stream_id)
        if opened is None:
            if not item.HasField("options"):
                return  # these tokens were on their way when their stream ended
            opened = self._open(item)
        elif item.HasField("options"):
            raise InvalidArgumentError("options may only come with a stream's first input", field="options")
        given = item.token_ids
        token_ids = [given[0]] if len(given) == 1 else list(given)  # the first is much the faster
        for token_id in token_ids:
            if token_id >= self._vocab_size:
                raise InvalidArgumentError(
                    f"token id {token_id} is not below the vocabulary size {self._vocab_size}", field="token_ids"
                )
        events, tokens, stop_match = opened.stream.push(token_ids)
        if stop_match is None and item.end:
            rest, tokens, stop_match = opened.stream.finish()
            events, ended = events + rest, True
        else:
            ended = stop_match is not None
        if ended:
            self._forget(stream_id)
        elif not events and not token_ids:
            return
        # Built in place: copying a message into the response would cost more than decoding a token.
        output = response.outputs.add(stream_id=stream_id, tokens_consumed=tokens)
        add_events(output, events)
        if opened.stream.reasoning_tokens:
            output.reasoning_tokens = opened.stream.reasoning_tokens
        if ended:
            output.ended = True
        if stop_match is not None:
            output.stop_match = stop_match

    def _open(self, item: tokenizer_pb2.DetokenizeInput) -> _Open:
        options = to_stream_options(item.options, secrets.token_hex(8))
        option_bytes = item.options.ByteSize()
        self._open_streams.opened(option_bytes)
        try:
            with within_options():
                opened = _Open(self._open_stream(options), option_bytes, item.options.tool_call_id_seed)
        except BaseException:
            self._open_streams.closed(option_bytes)
            raise
        self._streams[item.stream_id] = opened
        return opened

    def _forget(self, stream_id: int) -> _Open | None:
        opened = self._streams.pop(stream_id, None)
        if opened is not None:
            self._open_streams.closed(opened.option_bytes)
        return opened


def _log_fault(error: Exception, name: str) -> None:
    """Logs a fault under the caller's name for the stream, since a call carries streams of many requests."""
    token = request_id_var.set(name if is_valid_request_id(name) else "-")
    try:
        logger.error("a detokenize stream failed", exc_info=error)
    finally:
        request_id_var.reset(token)


def _slices(item: tokenizer_pb2.DetokenizeInput) -> Iterator[tokenizer_pb2.DetokenizeInput]:
    count = len(item.token_ids)
    for at in range(0, count, _TOKENS_A_STEP):
        last = at + _TOKENS_A_STEP >= count
        part = tokenizer_pb2.DetokenizeInput(
            stream_id=item.stream_id,
            token_ids=item.token_ids[at : at + _TOKENS_A_STEP],
            end=item.end and last,
            cancel=item.cancel,
        )
        if at == 0 and item.HasField("options"):
            part.options.CopyFrom(item.options)
        yield part
