"""Calls of the endpoint picker as no gateway should make them: none keeps a place, none ends without a status."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from sapwood.v1 import gateway_pb2 as pb
from sapwood_router.edges.gateway.endpoint_picker import SERVICE
from sapwood_testing.router.fake_vllm import FakeVllm

BODY = b'{"model": "m", "prompt": "go:", "max_tokens": 3}'


class Front:
    """A router with one server, and calls of its picker."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster

    @property
    def in_flight(self) -> int:
        return sum(each.in_flight for each in self.cluster.router.registry.all())

    def call(self) -> Any:
        return self.cluster.channel.stream_stream(
            f"/{SERVICE}/Process", pb.GatewayRequest.SerializeToString, pb.GatewayResponse.FromString
        )()

    async def say(self, *messages: pb.GatewayRequest) -> tuple[list[pb.GatewayResponse], grpc.StatusCode]:
        """All responses to some messages, and how the call ended."""
        call = self.call()
        for message in messages:
            await call.write(message)
        await call.done_writing()
        found = [response async for response in call]
        return found, await call.code()


@pytest.fixture
def make_front(make_cluster: Any) -> Callable[..., Any]:
    @contextlib.asynccontextmanager
    async def make(**settings: Any) -> AsyncIterator[Front]:
        server = FakeVllm()
        await server.start()
        try:
            async with make_cluster(workers=0, backends=(f"url={server.url}",), **settings) as cluster:
                yield Front(cluster)
        finally:
            await server.stop()

    return make


def headers(*more: tuple[str, bytes], answer: bool = False) -> pb.GatewayRequest:
    fields = pb.GatewayHeaderMap(headers=[pb.GatewayHeader(key=name, raw_value=value) for name, value in more])
    part = pb.GatewayHeaders(headers=fields)
    return pb.GatewayRequest(response_headers=part) if answer else pb.GatewayRequest(request_headers=part)


def body(content: bytes = BODY, *, ends: bool = True) -> pb.GatewayRequest:
    return pb.GatewayRequest(request_body=pb.GatewayBody(body=content, end_of_stream=ends))


POST = headers((":method", b"POST"), ("content-type", b"application/json"))


@pytest.mark.parametrize("messages", [[], [POST], [POST, body(ends=False)]], ids=["nothing", "headers", "half a body"])
async def test_a_call_that_falls_silent_before_the_pick_gets_504_at_its_deadline(
    make_front: Any, messages: list[Any]
) -> None:
    async with make_front(request_timeout=0.3) as front:
        call = front.call()
        for message in messages:
            await call.write(message)
        [answer] = [response async for response in call]
        assert answer.immediate_response.status.code == 504
        assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("asked", [b"", b"0.3"], ids=["the router's timeout", "the request's timeout"])
async def test_a_call_that_falls_silent_after_the_pick_gives_its_place_back_at_the_deadline(
    make_front: Any, asked: bytes
) -> None:
    async with make_front(request_timeout=60 if asked else 0.3) as front:
        call = front.call()
        await call.write(headers((":method", b"POST"), *((("x-request-timeout", asked),) if asked else ())))
        await call.write(body())
        first = await call.read()
        assert first.request_headers.response.header_mutation.set_headers
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await front.cluster.idle()


async def test_a_call_that_reads_nothing_gives_its_place_back_at_the_deadline(make_front: Any, wait_until: Any) -> None:
    async with make_front(request_timeout=3.0) as front:
        call = front.call()
        long = BODY[:-1] + b" " * 4_000_000 + b"}"
        await call.write(POST)
        pieces = range(0, len(long), 60_000)
        for start in pieces:
            await call.write(body(long[start : start + 60_000], ends=start == pieces[-1]))
        await wait_until(lambda: front.in_flight == 1)
        await front.cluster.idle()
        call.cancel()


@pytest.mark.parametrize("status", [b"9" * 5000, b"\xc2\xb2", b"-1", b"", b"2_0"], ids=repr)
async def test_an_answer_whose_status_is_none_counts_as_a_failure(make_front: Any, status: bytes) -> None:
    async with make_front() as front:
        responses, code = await front.say(POST, body(), headers((":status", status), answer=True))
        assert code is grpc.StatusCode.OK
        assert [response.WhichOneof("part") for response in responses] == [
            *("request_headers", "request_body", "response_headers")
        ]
        await front.cluster.idle()


@pytest.mark.parametrize("name", ["x-tenant", "x-session-id", "x-request-id", "x-anything"])
@pytest.mark.parametrize("value", [b"a\r\nb: c", b"a\0b", b"\x1b[31m"], ids=repr)
async def test_header_values_with_control_characters_are_refused_by_name(
    make_front: Any, name: str, value: bytes
) -> None:
    async with make_front() as front:
        [answer], code = await front.say(headers((":method", b"POST"), (name, value)))
        assert code is grpc.StatusCode.OK
        assert answer.immediate_response.status.code == 400
        assert name.encode() in answer.immediate_response.body


async def test_a_body_in_thousands_of_pieces_is_one_body(make_front: Any) -> None:
    async with make_front() as front:
        pieces = [BODY[index : index + 1] for index in range(len(BODY))]
        messages = [each for piece in pieces for each in (body(piece, ends=False), *[body(b"", ends=False)] * 50)]
        responses, code = await front.say(POST, *messages, body(b""))
        assert code is grpc.StatusCode.OK
        assert (
            b"".join(response.request_body.response.body_mutation.streamed_response.body for response in responses)
            == BODY
        )
        await front.cluster.idle()


async def test_hundreds_of_silent_calls_keep_nobody_from_a_place(make_front: Any, wait_until: Any) -> None:
    async with make_front(request_timeout=1.0, requests_per_worker=4, queue_size="0") as front:
        silent = [front.call() for _ in range(200)]
        for call in silent:
            await call.write(POST)
            with contextlib.suppress(grpc.aio.AioRpcError):  # it was refused
                await call.write(body())
        await wait_until(lambda: front.in_flight == 4)
        await front.cluster.idle()
        responses, _ = await front.say(POST, body())
        assert responses[0].WhichOneof("part") == "request_headers"
        for call in silent:
            call.cancel()
        await asyncio.sleep(0)
