"""Over HTTP a request has a deadline, too: what cannot make it is refused at once, and what passes it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json

import httpx
import openai
import pytest

from sapwood.v1 import router_pb2
from sapwood_net.http2.wire import frames
from sapwood_net.http2.wire.message_reader import prefixed
from sapwood_router.edges.http.exchange import asked_timeout, client_timeout

BODY = {"prompt": "hello", "max_tokens": 5}


@contextlib.asynccontextmanager
async def queued(make_cluster, wait_until):
    """A cluster whose one worker takes a request at a time, with many that wait, some of which were let go lately."""
    async with make_cluster(workers=1, requests_per_worker=1) as cluster:
        script = cluster.workers[0].script
        script.delay, script.chunk, script.gate = 0.02, 8, asyncio.Event()
        waiting = [asyncio.ensure_future(cluster.http.post("/v1/completions", json=BODY)) for _ in range(30)]
        try:
            await wait_until(lambda: cluster.router.status().queued == 29)
            script.gate.set()
            await wait_until(lambda: sum(task.done() for task in waiting) >= 3)
            script.gate = asyncio.Event()
            yield cluster
        finally:
            script.gate.set()
            assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}


async def test_what_would_wait_past_its_deadline_is_refused_and_told_when_to_come_again(
    make_cluster, wait_until
) -> None:
    async with queued(make_cluster, wait_until) as cluster:
        for path, body in (
            ("completions", BODY),
            ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            answer = await cluster.http.post(f"/v1/{path}", json=body, headers={"x-request-timeout": "0.5"})
            assert answer.status_code == 429, answer.text
            assert int(answer.headers["retry-after"]) > 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
        with pytest.raises(openai.RateLimitError):
            headers = {"x-stainless-read-timeout": "0.5"}  # as with timeout=0.5, but it stays to hear the answer
            await cluster.openai.completions.create(model="fake", prompt="hello", extra_headers=headers)


async def test_a_deadline_that_passes_ends_the_request(cluster, wait_until) -> None:
    for worker in cluster.workers:
        worker.script.gate, worker.script.gate_after = asyncio.Event(), 1
    headers = {"x-request-timeout": "0.4"}
    answer = await cluster.http.post("/v1/completions", json=BODY, headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
    async with cluster.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}, headers=headers) as stream:
        lines = [line async for line in stream.aiter_lines() if line]
    assert '"timeout_error"' in lines[-1]
    # OpenAI's client leaves by itself; that it has said when is seen by another one, which does not.
    answer = await cluster.http.post("/v1/completions", json=BODY, headers={"x-stainless-read-timeout": "0.4"})
    assert answer.status_code == 504
    await cluster.idle()


async def test_openais_client_raises_its_own_timeout(cluster) -> None:
    for worker in cluster.workers:
        worker.script.gate, worker.script.gate_after = asyncio.Event(), 1
    client = cluster.openai.with_options(timeout=0.3, max_retries=0)
    asked = [client.completions.create(model="fake", prompt="hello") for _ in range(20)]
    assert {type(error) for error in await asyncio.gather(*asked, return_exceptions=True)} == {openai.APITimeoutError}
    await cluster.idle()


async def test_a_stream_may_take_longer_than_its_client_waits_for_an_event(cluster) -> None:
    for worker in cluster.workers:
        worker.script.delay = 0.1
    body, headers = {**BODY, "stream": True}, {"x-stainless-read-timeout": "0.3"}
    answer = await cluster.http.post("/v1/completions", json=body, headers=headers)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert "error" not in answer.text


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", "inf"])
async def test_what_is_no_time_is_named(cluster, given) -> None:
    answer: httpx.Response = await cluster.http.post("/v1/completions", json=BODY, headers={"x-request-timeout": given})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-timeout")


async def test_openais_client_says_how_long_it_waits(cluster) -> None:
    sent: list[httpx.Request] = []

    async def note(request: httpx.Request) -> None:
        sent.append(request)

    cluster.openai._client.event_hooks["request"] = [note]
    await cluster.openai.completions.create(model="fake", prompt="hello", timeout=77)
    assert client_timeout(dict(sent[0].headers.raw)) == client_timeout({b"x-stainless-read-timeout": b"77"})


def test_headers_are_read() -> None:
    assert asked_timeout({}) == client_timeout({}) == float("inf")
    assert asked_timeout({b"x-request-timeout": b"1.5"}) == 1.5
    assert client_timeout({b"x-stainless-read-timeout": b"600"}) == 600
    assert client_timeout({b"x-stainless-timeout": b"7"}) == 7
    assert client_timeout({b"x-stainless-timeout": b"none"}) == float("inf")


@pytest.mark.parametrize("edge", ["http", "grpc"])
async def test_a_client_that_reads_nothing_does_not_outlive_the_deadline(make_cluster, wait_until, edge: str) -> None:
    async with make_cluster(1, request_timeout=0.5) as cluster:
        cluster.workers[0].script.tokens = lambda prompt: [104] * 200_000
        cluster.workers[0].script.chunk = 50
        port = cluster.router.http_port if edge == "http" else cluster.router.grpc_port
        _reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        if edge == "http":
            body = json.dumps({"prompt": "ab", "max_tokens": 200_000, "stream": True}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
        else:
            fields = {":method": "POST", ":scheme": "http", ":path": "/sapwood.v1.Router/Generate", ":authority": "x"}
            fields |= {"te": "trailers", "content-type": "application/grpc"}
            block = b"".join(frames.literal(name.encode(), value.encode()) for name, value in fields.items())
            asked = router_pb2.RouterGenerateRequest(text="ab", sampling={"max_tokens": 200_000})
            message = prefixed(asked.SerializeToString())
            writer.write(frames.PREFACE + frames.settings(()) + frames.header_frames(1, block, 16384))
            writer.write(frames.frame(frames.DATA, frames.END_STREAM, 1, message))
        await wait_until(cluster.calls)
        await wait_until(lambda: cluster.router.status().running == 0, 20)
        await asyncio.wait_for(cluster.router._front.wait_idle(), 20)
        await wait_until(cluster.router._server._interceptor.idle.is_set, 20)
        await cluster.idle()
        writer.transport.abort()
