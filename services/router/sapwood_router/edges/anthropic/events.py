"""The events of a streamed message: each of its blocks is opened, filled and closed before the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sapwood_router.edges.anthropic.types import SIGNATURE, MessageResponse
from sapwood_router.edges.http.sse import event
from sapwood_router.edges.sending import with_resumptions
from sapwood_router.request.context import Delta, Finish


class MessageEvents:
    """Implements :class:`Events` of one message.

    Args:
        begun: Makes the message as it is before its first block.
        ended: Makes the message, without its content, as it is after its last one.
    """

    def __init__(self, begun: Callable[[], MessageResponse], ended: Callable[[Finish, bool], MessageResponse]) -> None:
        self._begun = begun
        self._ended = ended
        self._index = -1
        self._open: str | int | None = None
        """Which kind of block is open: text, thinking, or the call with this index."""
        self._called = False

    def begin(self) -> bytes:
        return event("message_start", message=self._begun()) + event("ping")

    def more(self, delta: Delta) -> bytes:
        output, written = delta.output, b""
        if output.reasoning:
            written += self._change("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            written += self._delta({"type": "thinking_delta", "thinking": output.reasoning})
        later = []
        for call in output.tool_calls:
            if call.index == self._open:  # the rest of a call comes before the text after it
                written += self._delta({"type": "input_json_delta", "partial_json": call.arguments})
            else:
                later.append(call)
        if output.text:
            written += self._change("text", {"type": "text", "text": ""})
            written += self._delta({"type": "text_delta", "text": output.text})
        for call in later:
            self._called = True
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            written += self._change(call.index, block)
            if call.arguments:
                written += self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        return written

    def end(self, finish: Finish, resumptions: int) -> Iterable[bytes]:
        message = self._ended(finish, self._called)
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        last = event("message_delta", delta=delta, usage=message.usage) + event("message_stop")
        return (self._close() + with_resumptions(last, resumptions),)

    def _change(self, kind: str | int, block: dict[str, Any]) -> bytes:
        if kind == self._open:
            return b""
        closed = self._close()
        self._open = kind
        self._index += 1
        return closed + event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": SIGNATURE}) if self._open == "thinking" else b""
        self._open = None
        return signed + event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event("content_block_delta", index=self._index, delta=delta)
