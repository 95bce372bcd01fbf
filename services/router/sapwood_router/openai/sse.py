"""Server-sent events of OpenAI's API. All that stays the same over a stream is encoded once; a delta costs one join."""

from __future__ import annotations

import msgspec

from sapwood_router.openai.types import UsageObject
from sapwood_router.output import Output, ToolCallDelta

DONE = b"data: [DONE]\n\n"

NULL = b"null"

_encode = msgspec.json.encode


class CompletionChunks:
    """The events of a streamed completion.

    Args:
        answer_id: ``id`` of all chunks.
        created: Unix time in seconds.
        model: The model's name.
        include_usage: Whether a last chunk carries the usage (then the others say ``"usage":null``).
    """

    _OBJECT = "text_completion"
    _BEFORE_TEXT = b',"text":'
    _AFTER_TEXT = b',"logprobs":'

    def __init__(self, answer_id: str, created: int, model: str, include_usage: bool) -> None:
        fixed = _encode({"id": answer_id, "object": self._OBJECT, "created": created, "model": model})
        self._head = b"data: " + fixed[:-1] + b',"choices":['
        self._tail = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._include_usage = include_usage

    def opening(self, index: int) -> bytes:
        """What precedes a choice's first text."""
        return b""

    def output(self, index: int, output: Output, logprobs: bytes = NULL) -> bytes:
        """New output of a choice, with its ``logprobs`` in JSON; nothing if it is empty."""
        return self._chunk(index, output.text, NULL, logprobs) if output.text or logprobs is not NULL else b""

    def finish(self, index: int, output: Output, reason: str, logprobs: bytes = NULL) -> bytes:
        """The last output of a choice and why it ended."""
        return self._chunk(index, output.text, _encode(reason), logprobs)

    def closing(self, usage: UsageObject) -> bytes:
        """The end of the stream, with the usage if it was asked for."""
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n" + DONE

    def _chunk(self, index: int, text: str, reason: bytes, logprobs: bytes) -> bytes:
        return b"".join(
            (
                self._head,
                b'{"index":',
                str(index).encode(),
                self._BEFORE_TEXT,
                _encode(text),
                self._AFTER_TEXT,
                logprobs,
                b',"finish_reason":',
                reason,
                self._tail,
            )
        )


class ChatChunks(CompletionChunks):
    """The events of a streamed chat completion."""

    _OBJECT = "chat.completion.chunk"
    _BEFORE_TEXT = b',"delta":{"content":'
    _AFTER_TEXT = b'},"logprobs":'

    def opening(self, index: int) -> bytes:
        """The first chunk says who speaks."""
        return self._delta(index, b'{"role":"assistant","content":""}', NULL)

    def output(self, index: int, output: Output, logprobs: bytes = NULL) -> bytes:
        """A chunk for each kind of what is new: reasoning, text, then calls; the first has the ``logprobs``."""
        if not output.reasoning and not output.tool_calls:
            return super().output(index, output, logprobs)
        events = b""
        if output.reasoning:
            events = self._delta(index, b'{"reasoning_content":' + _encode(output.reasoning) + b"}", NULL, logprobs)
            logprobs = NULL
        events += super().output(index, output, logprobs)
        for call in output.tool_calls:
            events += self._call(index, call)
        return events

    def finish(self, index: int, output: Output, reason: str, logprobs: bytes = NULL) -> bytes:
        """The last output, then a chunk with an empty delta and the reason, as OpenAI sends them."""
        return self.output(index, output, logprobs) + self._delta(index, b"{}", _encode(reason))

    def _call(self, index: int, call: ToolCallDelta) -> bytes:
        """One call a chunk; its id and name come alone, as OpenAI sends them."""
        events = b""
        if call.name:
            function = {"name": call.name, "arguments": ""}
            events = self._part_of_call(
                index, {"index": call.index, "id": call.id, "type": "function", "function": function}
            )
        if call.arguments:
            events += self._part_of_call(index, {"index": call.index, "function": {"arguments": call.arguments}})
        return events

    def _part_of_call(self, index: int, part: dict[str, object]) -> bytes:
        return self._delta(index, _encode({"tool_calls": [part]}), NULL)

    def _delta(self, index: int, delta: bytes, reason: bytes, logprobs: bytes = NULL) -> bytes:
        return b"".join(
            (
                self._head,
                b'{"index":',
                str(index).encode(),
                b',"delta":',
                delta,
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                reason,
                self._tail,
            )
        )
