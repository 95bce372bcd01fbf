"""The HTTP port over a cluster: several requests at once, connections that close, late bodies, clients that leave."""

import asyncio
import json

import pytest

BODY = {"model": "fake", "prompt": "abcdef", "max_tokens": 4}


def request(*, headers: str = "", **fields) -> bytes:
    body = json.dumps({**BODY, **fields}).encode()
    return (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode()
        + body
    )


async def connect(cluster) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", cluster.router.http_port)


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body, chunked or not."""
    head = await reader.readuntil(b"\r\n\r\n")
    if b"chunked" not in head:
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        return head, await reader.readexactly(length)
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return head, body


def text_of(events: bytes) -> str:
    lines = [line[6:] for line in events.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"])


async def test_requests_sent_at_once_are_answered_in_turn(cluster) -> None:
    reader, writer = await connect(cluster)
    writer.write(request() + request(stream=True) + request(prompt="x", max_tokens=-1) + request())
    async with asyncio.timeout(60):
        first, streamed, refused, last = [await answer(reader) for _ in range(4)]
    whole = json.loads(first[1])["choices"][0]["text"]
    assert whole
    assert text_of(streamed[1]) == whole
    assert b" 400 " in refused[0]
    assert json.loads(last[1])["choices"][0]["text"] == whole
    writer.close()


async def test_of_requests_that_come_at_once_the_most_important_begins_first(cluster) -> None:
    count = 64
    streams = [await connect(cluster) for _ in range(count)]
    async with asyncio.timeout(120):
        for reader, writer in streams:  # by then it has accepted them
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await answer(reader)
        for number, (_, writer) in enumerate(streams):
            priority = "x-priority: 7\r\n" if number == count - 1 else ""
            writer.write(request(headers=f"x-request-id: r{number}\r\n{priority}"))
        assert all([b" 200 " in (await answer(reader))[0] for reader, _ in streams])
    begun = [each for each in cluster.tokenizer.request_ids if each.startswith("r")]
    # It is written last, and what the router reads before it comes is begun before it.
    assert begun.index(f"r{count - 1}") < count * 3 // 4
    for _, writer in streams:
        writer.close()


async def test_a_connection_that_is_to_close_closes_after_the_whole_answer(cluster) -> None:
    for stream in (False, True):
        reader, writer = await connect(cluster)
        writer.write(request(headers="connection: close\r\n", stream=stream))
        async with asyncio.timeout(60):
            head, body = await answer(reader)
            assert await reader.read() == b""
        assert b"connection: close" in head
        assert (text_of(body) if stream else json.loads(body)["choices"][0]["text"]) != ""
        writer.close()


async def test_a_body_that_comes_in_pieces_or_after_an_invitation_is_read(cluster) -> None:
    reader, writer = await connect(cluster)
    whole = request(headers="expect: 100-continue\r\n")
    head, body = whole.split(b"\r\n\r\n", 1)
    writer.write(head + b"\r\n\r\n")
    async with asyncio.timeout(60):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        for index in range(len(body)):
            writer.write(body[index : index + 1])
            await writer.drain()
        assert b" 200 " in (await answer(reader))[0]
    writer.close()


async def test_a_client_that_leaves_before_its_answer_ends_the_request(cluster, wait_until) -> None:
    for worker in cluster.workers:
        worker.script.delay = 0.05
    for stream in (False, True):
        _reader, writer = await connect(cluster)
        writer.write(request(prompt="abcdefghijklmnop", max_tokens=None, stream=stream))
        await wait_until(lambda: any(call.outcome == "running" for call in cluster.calls()))
        writer.transport.abort()
        await cluster.idle()
    assert {call.outcome for call in cluster.calls()} == {"cancelled"}


@pytest.mark.parametrize("part", ["line", "header", "headers", "trailer"])
async def test_heads_and_trailers_without_an_end_are_not_kept(cluster, part) -> None:
    reader, writer = await connect(cluster)
    line = b"GET /" if part == "line" else b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    more = {"header": b"x-a: ", "trailer": b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx-a: "}
    writer.write(line + more.get(part, b""))
    piece = b"x-a: b\r\n" * 2048 if part == "headers" else b"a" * 16384
    answering = asyncio.ensure_future(reader.readuntil(b"\r\n\r\n"))
    async with asyncio.timeout(60):
        while not answering.done():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
    assert (await answering).startswith(b"HTTP/1.1 400 " if part == "trailer" else b"HTTP/1.1 431 ")
    writer.close()
    await cluster.idle()


async def test_a_long_head_and_a_large_body_in_small_pieces_are_taken(cluster) -> None:
    reader, writer = await connect(cluster)
    sent = request(headers="x-a: " + "a" * 60_000 + "\r\n", user="b" * 300_000)
    async with asyncio.timeout(60):
        for _ in range(2):
            for start in range(0, len(sent), 1000):
                writer.write(sent[start : start + 1000])
                await writer.drain()
            assert b" 200 " in (await answer(reader))[0]
    writer.close()
