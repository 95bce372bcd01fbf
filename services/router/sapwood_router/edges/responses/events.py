"""The events of a streamed response. Each item is announced, filled and finished before the next; all events are numbered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from sapwood_common.errors import SapwoodError
from sapwood_router.edges.http.errors import OpenAIDialect
from sapwood_router.edges.http.json_list import JsonList
from sapwood_router.edges.http.sse import event
from sapwood_router.edges.responses.items import ItemMaker, reasoning_part, text_part
from sapwood_router.edges.responses.logprobs import TextLogprobs
from sapwood_router.edges.sending import with_resumptions
from sapwood_router.request.context import Delta, Finish
from sapwood_router.request.output import ToolCallDelta

_KINDS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
_PARTS: dict[str, Callable[..., dict[str, Any]]] = {"message": text_part, "reasoning": reasoning_part}


class _OpenItem:
    """The item that is being written; ``call`` is the index of the call that it is."""

    def __init__(self, kind: str, item_id: str, call: ToolCallDelta | None) -> None:
        self.kind = kind
        self.item_id = item_id
        self.call = call
        self.pieces: list[str] = []
        self.logprobs = JsonList()


class ResponseEvents:
    """Implements :class:`Events` of one response.

    Args:
        items: Makes items.
        begun: Makes the response as it is before its first item.
        ended: Makes it as it is at its end, of its items: its status, and all of it in JSON.
        failed: Makes it as it is where it fails.
        logprobs: Reads each delta before this object does; None: log probabilities are not wanted.
    """

    def __init__(
        self,
        items: ItemMaker,
        begun: Callable[[], dict[str, Any]],
        ended: Callable[[Finish, list[dict[str, Any]]], tuple[str, msgspec.Raw]],
        failed: Callable[[SapwoodError], dict[str, Any]],
        logprobs: TextLogprobs | None = None,
    ) -> None:
        self._logprobs = logprobs
        self._items = items
        self._begun = begun
        self._ended = ended
        self._failed = failed
        self._number = 0
        self._done: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None

    def begin(self) -> bytes:
        response = self._begun()
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def more(self, delta: Delta) -> bytes:
        output, written = delta.output, b""
        if output.reasoning:
            written += self._text("reasoning", output.reasoning)
        later = []
        for call in output.tool_calls:
            if self._open is not None and self._open.call is not None and self._open.call.index == call.index:
                written += self._arguments(call)  # the rest of a call comes before the text after it
            else:
                later.append(call)
        if output.text:
            written += self._text("message", output.text)
        for call in later:
            written += self._close() + self._begin("function_call", call) + self._arguments(call)
        return written

    def end(self, finish: Finish, resumptions: int) -> Iterator[bytes]:
        if not self._done and self._open is None:  # an answer of nothing is a message of nothing
            yield self._begin("message", None)
        yield from self._finish("completed" if finish.reason.value == "stop" else "incomplete")
        status, response = self._ended(finish, self._done)
        yield with_resumptions(self._event(f"response.{status}", response=response), resumptions)

    def fail(self, error: SapwoodError) -> bytes:
        """What ends a stream that fails."""
        return self._event("response.failed", response=self._failed(error))

    def whole_item(self, index: int, item: dict[str, Any]) -> bytes:
        """What tells of an item that is made in one piece."""
        return b"".join(self._event(kind, **fields) for kind, fields in events_of(index, item))

    def last(self, status: str, response: object) -> bytes:
        """What ends a stream of such items."""
        return self._event(f"response.{status}", response=response)

    def _text(self, kind: str, text: str) -> bytes:
        written = b""
        if self._open is None or self._open.kind != kind:
            written = self._close() + self._begin(kind, None)
        assert self._open is not None
        self._open.pieces.append(text)
        more: dict[str, Any] = {}
        if kind == "message":
            more["logprobs"] = [] if self._logprobs is None else self._logprobs.take()
            if self._logprobs is not None:
                self._open.logprobs.join(more["logprobs"])
        return written + self._event(f"{_KINDS[kind]}.delta", **self._at_part(), delta=text, **more)

    def _arguments(self, call: ToolCallDelta) -> bytes:
        assert self._open is not None
        if not call.arguments:
            return b""
        self._open.pieces.append(call.arguments)
        return self._event("response.function_call_arguments.delta", **self._at(), delta=call.arguments)

    def _begin(self, kind: str, call: ToolCallDelta | None) -> bytes:
        item = self._item(kind, call, None, "in_progress", ())
        self._open = _OpenItem(kind, item["id"], call)
        written = self._event("response.output_item.added", output_index=len(self._done), item=item)
        if kind in _PARTS:
            written += self._event("response.content_part.added", **self._at_part(), part=_PARTS[kind](""))
        return written

    def _close(self) -> bytes:
        """Finishes the open item, if there is one: others follow."""
        return b"".join(self._finish("completed"))

    def _finish(self, status: str) -> Iterator[bytes]:
        """Finishes the open item, if there is one."""
        done = self._open
        if done is None:
            return
        logprobs = done.logprobs.take()  # written once: with many alternatives they are megabytes
        text = "".join(done.pieces)
        if done.kind in _PARTS:
            more: dict[str, Any] = {"logprobs": logprobs} if done.kind == "message" else {}
            yield self._event(f"{_KINDS[done.kind]}.done", **self._at_part(), text=text, **more)
            part = _PARTS[done.kind](text, **more)
            yield self._event("response.content_part.done", **self._at_part(), part=part)
        else:
            assert done.call is not None
            name = done.call.name
            yield self._event("response.function_call_arguments.done", **self._at(), name=name, arguments=text)
        item = self._item(done.kind, done.call, text, status, logprobs)
        yield self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        self._open = None

    def _item(
        self, kind: str, call: ToolCallDelta | None, text: str | None, status: str, logprobs: object
    ) -> dict[str, Any]:
        index = len(self._done)
        if call is not None:
            return self._items.call(index, call.id, call.name, text or "", status)
        if kind == "message":
            return self._items.message(index, text, status, logprobs)
        return self._items.reasoning(index, text, status)

    def _at(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open.item_id, "output_index": len(self._done)}

    def _at_part(self) -> dict[str, Any]:
        return {**self._at(), "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._number
        self._number += 1
        return event(kind, sequence_number=number, **fields)


class StreamDialect(OpenAIDialect):
    """Errors in OpenAI's format, within a stream.

    Args:
        events: The stream's.
    """

    def __init__(self, events: ResponseEvents) -> None:
        self._events = events

    def event(self, error: SapwoodError, request_id: str) -> bytes:
        return self._events.fail(error)


def events_of(index: int, item: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The events that tell of a whole item: their kinds and fields."""
    at = {"item_id": item["id"], "output_index": index}
    added = {**item, "status": "in_progress"} if "status" in item else item
    steps: list[tuple[str, dict[str, Any]]] = []
    match item["type"]:
        case "message" | "reasoning" as kind:
            name = "output_text" if kind == "message" else "reasoning_text"
            (part,) = item["content"]
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            added = {**added, "content": []}
            steps = [
                ("response.content_part.added", {**at, "content_index": 0, "part": {**part, "text": ""}}),
                (f"response.{name}.delta", {**at, "content_index": 0, "delta": part["text"], **more}),
                (f"response.{name}.done", {**at, "content_index": 0, "text": part["text"], **more}),
                ("response.content_part.done", {**at, "content_index": 0, "part": part}),
            ]
        case "function_call":
            steps = [
                ("response.function_call_arguments.delta", {**at, "delta": item["arguments"]}),
                (
                    "response.function_call_arguments.done",
                    {**at, "name": item["name"], "arguments": item["arguments"]},
                ),
            ]
        case "mcp_call":
            steps = [
                ("response.mcp_call.in_progress", at),
                ("response.mcp_call_arguments.delta", {**at, "delta": item["arguments"]}),
                ("response.mcp_call_arguments.done", {**at, "arguments": item["arguments"]}),
                (f"response.mcp_call.{item['status']}", at),
            ]
        case "mcp_list_tools":
            steps = [("response.mcp_list_tools.in_progress", at), ("response.mcp_list_tools.completed", at)]
    return [
        ("response.output_item.added", {"output_index": index, "item": added}),
        *steps,
        ("response.output_item.done", {"output_index": index, "item": item}),
    ]
