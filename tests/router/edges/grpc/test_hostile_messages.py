"""Messages of every method, whose fields hold what nobody means: no answer says that the router is at fault."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from sapwood.v1 import router_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

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
METHODS = {each.name: each for each in router_pb2.DESCRIPTOR.services_by_name["Router"].methods}
DEEPEST = 4


def values_of(field: FieldDescriptor) -> tuple[Any, ...]:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return (b"", b"\0", b"\xff" * 5000, b"{")
    return VALUES[field.cpp_type]


def fill(message: Message, field: FieldDescriptor, value: Any) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, held = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        if held.message_type is None:
            getattr(message, field.name)[values_of(key)[1]] = value
    elif field.is_repeated:
        getattr(message, field.name).extend([value] * 3)
    else:
        setattr(message, field.name, value)


def every_value(kind: Descriptor, depth: int = 0) -> Iterator[Message]:
    """Messages with one field that is set, at each depth, to each of the values."""
    made = GetMessageClass(kind)
    for field in kind.fields:
        if field.message_type is None:
            for value in values_of(field):
                message = made()
                fill(message, field, value)
                yield message
        elif field.message_type.GetOptions().map_entry:
            held = field.message_type.fields_by_name["value"]
            for value in values_of(held) if held.message_type is None else ():
                message = made()
                fill(message, field, value)
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
            fill(message, field, draw.choice(values_of(field)))
        elif field.message_type.GetOptions().map_entry:
            held = field.message_type.fields_by_name["value"]
            if held.message_type is None:
                fill(message, field, draw.choice(values_of(held)))
        elif depth < DEEPEST:
            inner = any_values(field.message_type, draw, depth + 1)
            place = getattr(message, field.name)
            (place.add() if field.is_repeated else place).MergeFrom(inner)
    return message


GOOD: dict[str, Message] = {
    "Generate": router_pb2.RouterGenerateRequest(text="a"),
    "Score": router_pb2.RouterScoreRequest(text="a", continuations=[router_pb2.Continuation(text="b")]),
    "Embed": router_pb2.RouterEmbedRequest(),
    "Classify": router_pb2.ClassifyRequest(),
}
"""What a message with one strange field is otherwise; of other methods nothing."""
NO_FAULT = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED}


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"PauseRequests", "ResumeRequests", "RegisterWorker"}))
async def test_no_message_is_the_routers_fault(cluster: Any, name: str) -> None:
    for worker in cluster.workers:
        worker.script.tokens = lambda prompt: [104, 105]
    method = METHODS[name]
    draw = random.Random(5)
    messages = [*every_value(method.input_type)]
    if name in GOOD:
        with_rest = []
        for each in messages:
            whole = GetMessageClass(method.input_type)()
            whole.CopyFrom(GOOD[name])
            whole.MergeFrom(each)
            with_rest.append(whole)
        messages += with_rest
    messages += [any_values(method.input_type, draw) for _ in range(500 if len(messages) > 20 else 20)]
    wrong: list[tuple[str, str]] = []

    async def ask(part: list[Message]) -> None:
        for message in part:
            try:
                call = getattr(cluster.stub, name)(message, timeout=30)
                if method.server_streaming:
                    async for _ in call:
                        pass
                else:
                    await call
            except grpc.aio.AioRpcError as error:
                if error.code() in NO_FAULT:
                    wrong.append((str(message)[:1000], f"{error.code().name}: {error.details()}"))

    await asyncio.gather(*(ask(messages[start::4]) for start in range(4)))
    print(name, len(messages), "messages")
    assert not wrong, wrong[:3]
    await cluster.idle()
