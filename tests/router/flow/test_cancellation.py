"""Clients that leave, are slow, or run out of time: what they started ends, and nothing of it stays."""

import asyncio
import gc
import socket

import grpc
import pytest

from sapwood.v1 import router_pb2, router_pb2_grpc
from sapwood_common.network.channel import open_channel
from sapwood_router.flow.generation import Generation, Pipeline
from sapwood_router.request.context import RequestContext

LONG = "x" * 20_000


@pytest.fixture
async def slow(make_cluster):
    async with make_cluster(2) as cluster:
        for worker in cluster.workers:
            worker.script.delay = 0.002
        yield cluster


async def over(cluster) -> None:
    await cluster.idle()
    assert {call.outcome for call in cluster.calls()} == {"cancelled"}
    assert all(call.sent_tokens < len(LONG) for call in cluster.calls())


async def test_a_grpc_client_that_cancels_after_some_text(slow) -> None:
    call = slow.stub.Generate(router_pb2.RouterGenerateRequest(text=LONG))
    await call.read()
    call.cancel()
    await over(slow)


async def test_a_grpc_client_that_closes_its_connection(slow) -> None:
    channel = open_channel(f"127.0.0.1:{slow.router.grpc_port}")
    call = channel.unary_stream(
        "/sapwood.v1.Router/Generate",
        request_serializer=router_pb2.RouterGenerateRequest.SerializeToString,
        response_deserializer=router_pb2.RouterGenerateResponse.FromString,
    )(router_pb2.RouterGenerateRequest(text=LONG))
    await call.read()
    await channel.close()
    await over(slow)


async def test_a_grpc_client_that_cancels_before_the_first_token(slow, wait_until) -> None:
    for worker in slow.workers:
        worker.script.gate = asyncio.Event()
    call = slow.stub.Generate(router_pb2.RouterGenerateRequest(text=LONG))
    reading = asyncio.ensure_future(call.read())
    await wait_until(lambda: len(slow.calls()) == 1)
    call.cancel()
    await over(slow)
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_a_client_that_leaves_as_its_worker_is_lost_leaves_no_coroutine(slow, monkeypatch, recwarn) -> None:
    runs: list[Generation] = []
    opened = Pipeline.open

    def remember(pipeline: Pipeline, context: RequestContext) -> Generation:
        runs.append(opened(pipeline, context))
        return runs[-1]

    monkeypatch.setattr(Pipeline, "open", remember)
    call = slow.stub.Generate(router_pb2.RouterGenerateRequest(text=LONG))
    await call.read()
    (busy,) = (worker for worker in slow.router.registry.all() if worker.in_flight)
    (session,) = (task for task in asyncio.all_tasks() if task.get_name() == f"connection to {busy.address}")
    session.cancel()
    while busy.in_flight:  # the turn after that in which the session has failed its streams, and no later
        await asyncio.sleep(0)
    runs[0].close()
    with pytest.raises(asyncio.CancelledError):
        call.cancel()
        await call.read()
    await slow.idle()
    runs.clear()
    gc.collect()
    assert [str(warning.message) for warning in recwarn if "never awaited" in str(warning.message)] == []


async def leave_after(cluster, body: bytes, path: str, wait_for: bytes | None, wait_until) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.router.http_port)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    writer.write(head + body)
    if wait_for is not None:
        await reader.readuntil(wait_for)
    await wait_until(lambda: len(cluster.calls()) >= 1)
    writer.close()


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("prompt", [f'"{LONG}"', f'["{LONG}", "{LONG}y"]'])
async def test_an_http_client_that_leaves(slow, wait_until, stream, prompt) -> None:
    body = f'{{"prompt": {prompt}, "max_tokens": 30000, "stream": {stream}}}'.encode()
    await leave_after(slow, body, "/v1/completions", b"data: " if stream == "true" else None, wait_until)
    await over(slow)


async def test_an_http_client_that_leaves_before_the_first_token(slow, wait_until) -> None:
    for worker in slow.workers:
        worker.script.gate = asyncio.Event()
    body = f'{{"messages": [{{"role": "user", "content": "{LONG}"}}], "stream": true}}'.encode()
    await leave_after(slow, body, "/v1/chat/completions", None, wait_until)
    await over(slow)


async def test_a_client_that_does_not_read_stops_the_worker_not_the_others(make_cluster, wait_until) -> None:
    async with make_cluster(1) as cluster:
        lengths = {"a": 5_000_000, "b": 8_000_000, "o": 50}  # by default gRPC itself buffers some 6 MB a hop
        worker = cluster.workers[0]
        worker.script.tokens = lambda prompt: [ord("~") + 3] * lengths[chr(prompt[1] - 3)]
        worker.script.chunk = 1024
        small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{cluster.router.grpc_port}", options=small_window)
        stream = aiter(router_pb2_grpc.RouterStub(channel).Generate(router_pb2.RouterGenerateRequest(text="a")))
        await anext(stream)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.connect(("127.0.0.1", cluster.router.http_port))
        reader, writer = await asyncio.open_connection(sock=client, limit=1024)
        body = b'{"prompt": "b", "max_tokens": 9000000, "stream": true}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: "
            + str(len(body)).encode()
            + b"\r\n\r\n"
            + body
        )
        await reader.read(100)
        await wait_until(lambda: len(worker.calls) == 2)

        async def stalled(seen) -> None:  # the worker cannot send: flow control reaches back to it
            before = -1
            while before != seen.sent_tokens:
                before = seen.sent_tokens
                await asyncio.sleep(0.2)

        for seen, total in zip(worker.calls, lengths.values(), strict=False):
            await stalled(seen)
            assert seen.sent_tokens < total
            assert seen.outcome == "running"
        assert "".join(r.text for r in await cluster.generate("other")) == "~" * 50
        for _ in range(20):  # and what was held up comes once the client reads on
            assert set((await anext(stream)).text) == {"~"}
        await channel.close()
        writer.close()
        await cluster.idle()


async def test_a_grpc_deadline_reaches_the_worker_and_ends_the_request(slow, expect_error) -> None:
    for seconds in (0.5, 5, 30):  # where the machine is slow, the first may pass before the worker hears of it
        await expect_error(slow.generate(LONG, timeout=seconds), grpc.StatusCode.DEADLINE_EXCEEDED)
        if slow.calls():
            break
    (call,) = slow.calls()
    assert 0 < call.time_remaining <= seconds
    await over(slow)


@pytest.mark.parametrize("hang", ["worker", "tokenizer"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_http_request_over_its_time_is_504(make_cluster, hang, stream) -> None:
    async with make_cluster(1, request_timeout=0.3) as cluster:
        if hang == "worker":
            cluster.workers[0].script.gate = asyncio.Event()
        else:
            cluster.tokenizer.hold = True
        response = await cluster.http.post("/v1/completions", json={"prompt": "abc", "stream": stream})
        assert response.status_code == 504
        assert response.json()["error"]["type"] == "timeout_error"
        await cluster.idle()


async def test_time_that_runs_out_within_a_stream_of_events_is_an_event(make_cluster) -> None:
    for seconds in (0.3, 3, 20):  # where the machine is slow, the first may pass before there is a stream
        async with make_cluster(1, request_timeout=seconds) as cluster:
            cluster.workers[0].script.gate = asyncio.Event()
            cluster.workers[0].script.gate_after = 2
            response = await cluster.http.post("/v1/completions", json={"prompt": "abc", "stream": True})
            await cluster.idle()
        if response.status_code == 200:
            break
    assert response.status_code == 200
    *_, last = response.text.strip().split("\n\n")
    assert '"timeout_error"' in last
    assert "[DONE]" not in response.text
