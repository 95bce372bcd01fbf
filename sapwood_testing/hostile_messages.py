"""Messages whose fields hold what nobody means, made of their descriptors, and calls of any method with them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

EVIL = "x\x1b[31m\n12:00:00.000 INFO router [-] forged\r\u2028\x85\u202e\x00"
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (0, 1, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_INT64: (0, 1, -1, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, -1, 99, 2**31 - 1),
}
_OTHERS: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_FLOAT: (0.0, -1.0, 1e38, float("nan"), float("inf"), -float("inf"), 1e-45),
    FieldDescriptor.CPPTYPE_DOUBLE: (0.0, -1.0, 1e308, float("nan"), float("inf"), -float("inf"), 5e-324),
    FieldDescriptor.CPPTYPE_STRING: ("", "x", EVIL, "9" * 5000, "{", "[" * 3000, "\ufffe", "((a+)+)+$" * 50),
}
VALUES: dict[int, tuple[Any, ...]] = _INTEGERS | _OTHERS
DEEPEST = 4


def _values_of(field: FieldDescriptor) -> tuple[Any, ...]:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return (b"", b"\0", b"\xff" * 5000, b"{")
    return VALUES[field.cpp_type]


def _fill(message: Message, field: FieldDescriptor, value: Any) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, held = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        if held.message_type is None:
            getattr(message, field.name)[_values_of(key)[1]] = value
    elif field.is_repeated:
        getattr(message, field.name).extend([value] * 3)
    else:
        setattr(message, field.name, value)


def every_value(kind: Descriptor, depth: int = 0) -> Iterator[Message]:
    """Messages with one field that is set, at each depth, to each of the values."""
    made = GetMessageClass(kind)
    for field in kind.fields:
        if field.message_type is None:
            for value in _values_of(field):
                message = made()
                _fill(message, field, value)
                yield message
        elif field.message_type.GetOptions().map_entry:
            held = field.message_type.fields_by_name["value"]
            for value in _values_of(held) if held.message_type is None else ():
                message = made()
                _fill(message, field, value)
                yield message
        elif depth < DEEPEST:
            for inner in every_value(field.message_type, depth + 1):
                message = made()
                place = getattr(message, field.name)
                (place.add() if field.is_repeated else place).MergeFrom(inner)
                if not field.is_repeated:
                    place.SetInParent()
                yield message


def any_values(kind: Descriptor, draw: random.Random, depth: int = 0) -> Message:
    """A message with some of its fields, each with some value."""
    message = GetMessageClass(kind)()
    for field in kind.fields:
        if draw.random() < 0.6:
            continue
        if field.message_type is None:
            _fill(message, field, draw.choice(_values_of(field)))
        elif field.message_type.GetOptions().map_entry:
            held = field.message_type.fields_by_name["value"]
            if held.message_type is None:
                _fill(message, field, draw.choice(_values_of(held)))
        elif depth < DEEPEST:
            inner = any_values(field.message_type, draw, depth + 1)
            place = getattr(message, field.name)
            (place.add() if field.is_repeated else place).MergeFrom(inner)
    return message


NO_FAULT = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED}
"""Statuses that say that the service is at fault."""

_OWN_ERROR = "Internal error from Core"
"""The client library's own, where a call ends while it still writes."""


def hostile_messages(method: MethodDescriptor, good: Message | None = None) -> list[Message]:
    """Messages for a method, the same each time.

    Args:
        method: The method.
        good: What a message with one strange field is otherwise, in addition to nothing.
    """
    kind, draw = method.input_type, random.Random(5)
    messages = [*every_value(kind)]
    if good is not None:
        for each in tuple(messages):
            whole = GetMessageClass(kind)()
            whole.CopyFrom(good)
            whole.MergeFrom(each)
            messages.append(whole)
    return messages + [any_values(kind, draw) for _ in range(500 if len(messages) > 20 else 20)]


async def faults(
    stub: Any, method: MethodDescriptor, messages: list[Message], rest: Mapping[str, Any] = {}, most: int = 64
) -> list[tuple[str, str]]:
    """Calls a method with each message, four calls at a time.

    Args:
        stub: The service's.
        method: The method.
        messages: What it is called with. A method with a stream of requests gets three of them in a call.
        rest: Further arguments of each call.
        most: Responses after which a stream of them is cancelled.

    Returns:
        Messages whose answer says that the service is at fault, and the answer.
    """
    wrong: list[tuple[str, str]] = []

    async def ask(part: list[Message]) -> None:
        try:
            call = getattr(stub, method.name)(
                _stream(part) if method.client_streaming else part[0], **{"timeout": 30, **rest}
            )
            if not method.server_streaming:
                await call
                return
            count = 0
            async for _ in call:
                count += 1
                if count == most:
                    call.cancel()
                    return
        except grpc.aio.AioRpcError as error:
            if error.code() in NO_FAULT and error.details() != _OWN_ERROR:
                wrong.append((str(part)[:1000], f"{error.code().name}: {error.details()}"))

    async def ask_all(parts: list[list[Message]]) -> None:
        for part in parts:
            await ask(part)

    size = 3 if method.client_streaming else 1
    parts = [messages[start : start + size] for start in range(0, len(messages), size)]
    await asyncio.gather(*(ask_all(parts[start::4]) for start in range(4)))
    return wrong


async def _stream(messages: list[Message]) -> Any:
    for message in messages:
        yield message
