"""Calls of the endpoint picker as no gateway should make them: none keeps a place, none ends without a status."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from sapwood.v1 import gateway_pb2 as pb
from sapwood_common.network.channel import open_channel
from sapwood_common.tenants.api_keys import hash_key, make_key
from sapwood_net.pacing.body_memory import BodyMemory
from sapwood_router.edges.gateway.endpoint_picker import SERVICE
from sapwood_testing.router.fake_vllm import FakeVllm

BODY = b'{"model": "m", "prompt": "go:", "max_tokens": 3}'


class Front:
    """A router with one server, and calls of its picker, on the admin port if there is one."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.channel = cluster.channel

    @property
    def in_flight(self) -> int:
        return sum(each.in_flight for each in self.cluster.router.registry.all())

    def call(self) -> Any:
        return self.channel.stream_stream(
            f"/{SERVICE}/Process", pb.GatewayRequest.SerializeToString, pb.GatewayResponse.FromString
        )()

    async def say(self, *messages: pb.GatewayRequest) -> tuple[list[pb.GatewayResponse], grpc.StatusCode]:
        """All responses to some messages, and how the call ended."""
        call = self.call()
        with contextlib.suppress(grpc.aio.AioRpcError):  # it has ended: its answer is read all the same
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


@pytest.mark.parametrize("second", ["headers", "trailers"])
async def test_a_request_begins_once_however_empty_its_headers_are(make_front: Any, second: str) -> None:
    """The place that the first of two empty heads got was never given back."""
    empty = pb.GatewayRequest(request_headers=pb.GatewayHeaders(end_of_stream=True))
    trailers = pb.GatewayRequest(request_trailers=pb.GatewayTrailers())
    async with make_front() as front:
        for _ in range(3):
            responses, _ = await front.say(*[empty if second == "headers" else trailers] * 3)
            statuses = [each.immediate_response.status.code for each in responses]
            assert statuses == ([0, 400] if second == "headers" else [400])
        await front.cluster.idle()


async def test_trailers_without_headers_get_no_endpoint_where_keys_are_asked_for(
    make_front: Any, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice {hash_key(make_key())}\n")
    async with (
        make_front(api_keys=keys, admin_port=0) as front,
        open_channel(f"127.0.0.1:{front.cluster.router.admin_port}") as front.channel,
    ):
        for part in (pb.GatewayRequest(request_trailers=pb.GatewayTrailers()), body()):
            [answer], _ = await front.say(part)
            assert answer.immediate_response.status.code in (400, 401)
        await front.cluster.idle()


@pytest.mark.parametrize(
    "many",
    [
        [("x" + "a" * 70_000, b"a")],
        [("x-a", b"a" * 70_000)],
        [(f"x-{number}", b"") for number in range(300)],
        [("x-request-id", b"r" * 4_000_000)],
    ],
    ids=["name", "value", "many", "megabytes"],
)
async def test_headers_have_a_bound_as_those_of_http(make_front: Any, many: list[tuple[str, bytes]]) -> None:
    async with make_front() as front:
        [answer], code = await front.say(headers((":method", b"POST"), *many))
        assert code is grpc.StatusCode.OK
        assert answer.immediate_response.status.code == 431


def hinted(value: pb.GatewayValue) -> pb.GatewayRequest:
    metadata = {"envoy.lb.subset_hint": pb.GatewayStruct(fields={"x-gateway-destination-endpoint-subset": value})}
    return pb.GatewayRequest(
        request_headers=pb.GatewayHeaders(), metadata_context=pb.GatewayMetadata(filter_metadata=metadata)
    )


async def test_headers_and_subsets_of_silent_calls_count_as_held(
    make_front: Any, wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call could hold 16 MB of them, which no bound knew."""
    made: list[BodyMemory] = []

    def make(*terms: Any) -> BodyMemory:
        made.append(BodyMemory(*terms))
        return made[-1]

    monkeypatch.setattr("sapwood_router.app.BodyMemory", make)
    async with make_front(max_body_bytes=f"{2 << 20},memory={4 << 20}", request_timeout=30.0) as front:
        [memory] = made
        listed = pb.GatewayValue(
            string_value=",".join(f"10.0.{number // 250}.{number % 250}:80" for number in range(3000))
        )
        calls = []
        for number in range(200):
            call = front.call()
            calls.append(call)
            await call.write(headers(("x-long", b"a" * 60_000)) if number % 2 else hinted(listed))
        await wait_until(lambda: len(memory._sizes) > 1)
        await asyncio.sleep(0.5)
        assert memory.held <= memory.most
        assert {await call.code() for call in calls if call.done()} <= {grpc.StatusCode.RESOURCE_EXHAUSTED}
        first = next(call for call in calls if not call.done())  # it is told with its next message
        await first.write(body())
        answer = await first.read()
        assert answer.immediate_response.status.code == 503
        assert b"more is held" in answer.immediate_response.body
        for call in calls:
            call.cancel()
        await wait_until(lambda: not memory.held)


async def test_a_subset_of_a_million_endpoints_is_refused_before_it_is_cut(make_front: Any) -> None:
    async with make_front() as front:
        [answer], code = await front.say(hinted(pb.GatewayValue(string_value="," * 4_000_000)))
        assert code is grpc.StatusCode.OK
        assert answer.immediate_response.status.code == 400


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
