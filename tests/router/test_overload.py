"""More than the router can take, against its real process: what it holds stays bounded, and each request gets its due status."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
from pathlib import Path

import grpc
import httpx
import pytest

from sapwood.v1 import router_pb2, router_pb2_grpc
from sapwood_testing.router.fake_tokenizer import FakeTokenizer
from sapwood_testing.router.fake_worker import FakeWorker

pytestmark = pytest.mark.slow

MB = 1_000_000


class Router:
    def __init__(self, pid: int, grpc_port: int, http_port: int) -> None:
        self._pid = pid
        self.grpc_port = grpc_port
        self.http_port = http_port
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=120, trust_env=False)

    def resident(self) -> int:
        """Bytes."""
        return int(Path(f"/proc/{self._pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self._pid}/fd").iterdir()))


@contextlib.asynccontextmanager
async def serving(workers: int, *flags: str):
    """A router process in front of fake services in this one."""
    tokenizer, fakes = FakeTokenizer(), [FakeWorker() for _ in range(workers)]
    for service in (tokenizer, *fakes):
        await service.start()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sapwood_router", "--port", "0", "--http-port", "0", "--log-level", "info"),
        *("--tokenizer", tokenizer.address, "--workers", *(fake.address for fake in fakes), *flags),
        # The fakes share this process with thousands of clients.
        *("--worker-silence", "60", "--tokenizer-grace", "60", "--queue-wait", "300"),
        stderr=asyncio.subprocess.PIPE,
    )
    ports: dict[str, int] = {}
    try:
        async with asyncio.timeout(60):
            while len(ports) < 2:
                line = (await process.stderr.readline()).decode()
                assert line, "it ended"
                if found := re.search(r"(gRPC|HTTP) listening on \S+:(\d+)", line):
                    ports[found[1]] = int(found[2])
        drain = asyncio.ensure_future(process.stderr.read())
        router = Router(process.pid, ports["gRPC"], ports["HTTP"])
        async with router.http:
            async with asyncio.timeout(60):
                while (await router.http.get("/health")).status_code != 200:
                    await asyncio.sleep(0.05)
            yield router, fakes
        process.kill()
        await drain
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        for service in (*fakes, tokenizer):
            await service.kill()


async def until(condition) -> None:
    async with asyncio.timeout(200):
        while not condition():
            await asyncio.sleep(0.05)


async def complete(router: Router, text: str) -> None:
    """Somebody else's request is served meanwhile."""
    response = await router.http.post("/v1/completions", json={"prompt": text, "max_tokens": 100})
    assert response.json()["choices"][0]["text"] == text


async def test_five_thousand_idle_streams_cost_little_and_leave_nothing_behind() -> None:
    count = 5000
    async with serving(2, "--requests-per-worker", str(count)) as (router, fakes):
        gates = [asyncio.Event() for _ in fakes]
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(f"127.0.0.1:{router.grpc_port}", options=options) for _ in range(50)]
        stubs = [router_pb2_grpc.RouterStub(channel) for channel in channels]
        before = router.resident()
        peaks = []
        for streams in (count, count // 5):
            for fake, gate in zip(fakes, gates, strict=True):
                gate.clear()
                fake.script.gate, fake.script.gate_after = gate, 1
            calls = []
            for start in range(0, streams, 250):
                some = [
                    stubs[number % len(stubs)].Generate(router_pb2.RouterGenerateRequest(text=f"idle {number}"))
                    for number in range(start, start + 250)
                ]
                firsts = await asyncio.gather(*(call.read() for call in some))
                assert all(first.text for first in firsts)  # each has begun and then says no more
                calls += some
            peaks.append(router.resident())
            for fake in fakes:
                fake.script.gate = None
            await complete(router, "hello")
            for call in calls:
                call.cancel()
            await until(lambda: all(call.outcome != "running" for fake in fakes for call in fake.calls))
        for channel in channels:
            await channel.close()
        assert peaks[0] - before < count * 60_000
        assert peaks[1] - peaks[0] < 20 * MB  # later ones find the memory that the first have left
        await complete(router, "still here")
        async with asyncio.timeout(60):  # the answer is here a moment before its request is over there
            while not re.search(
                r"^sapwood_router_running_requests 0\.0$", (await router.http.get("/metrics")).text, re.MULTILINE
            ):
                await asyncio.sleep(0.05)


async def test_readers_that_never_read_hold_a_bounded_part_of_their_answer() -> None:
    readers, length = 4, 2_000_000
    endless = [104] * length
    async with serving(2) as (router, fakes):
        for fake in fakes:
            fake.script.tokens = lambda prompt: endless if len(prompt) > 10 else [104] * 8
            fake.script.chunk, fake.script.ends_with_token = 64, False
        before = router.resident()
        kept, writers = [], []
        for _ in range(readers):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", router.http_port))
            reader, writer = await asyncio.open_connection(sock=client, limit=1024)
            body = b'{"prompt": "a very long answer", "stream": true, "max_tokens": %d}' % length
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            head += b"content-length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
            writer.transport.pause_reading()
            kept.append(reader)
            writers.append(writer)
        await until(lambda: sum(len(fake.calls) for fake in fakes) >= readers)
        calls = [call for fake in fakes for call in fake.calls]
        sent = -1
        while sent != (sent := sum(call.sent_tokens for call in calls)):
            await asyncio.sleep(1)
        for _ in range(20):
            response = await router.http.post("/v1/completions", json={"prompt": "short", "max_tokens": 8})
            assert response.json()["choices"][0]["text"] == "e" * 8
        assert {call.outcome for call in calls} == {
            "running"
        }  # nothing can be finished into a socket that nobody reads
        # The tokens themselves, to resume with; what was made of them is at most a window of each stream.
        resident = router.resident()
        sent = sum(call.sent_tokens for call in calls)  # a slow machine may have said more meanwhile
        assert sent < readers * length
        assert resident - before < 20 * sent + 20 * MB
        for writer in writers:
            writer.transport.abort()
        await until(lambda: all(call.outcome != "running" for call in calls))


async def test_a_message_of_100_mb_is_refused_and_not_kept() -> None:
    async with serving(1) as (router, _):
        before = router.resident()
        huge = b'{"prompt": "' + b"a" * (100 * MB) + b'"}'

        async def in_pieces():  # without a length that would give it away
            for start in range(0, len(huge), 1 << 20):
                yield huge[start : start + (1 << 20)]

        for content in (huge, in_pieces()):
            # The router answers without reading on, and may close before the client has sent all: either is a refusal.
            with contextlib.suppress(httpx.WriteError, httpx.RemoteProtocolError, httpx.ReadError):
                response = await router.http.post("/v1/completions", content=content)
                assert response.status_code == 413
        async with grpc.aio.insecure_channel(f"127.0.0.1:{router.grpc_port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                request = router_pb2.RouterGenerateRequest(text="a" * (100 * MB))
                await router_pb2_grpc.RouterStub(channel).Generate(request).read()
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await complete(router, "hello")
        assert router.resident() - before < 60 * MB


async def test_a_flood_of_fifty_times_the_capacity_is_refused_but_for_what_fits() -> None:
    slots, queue, flood = 8, 32, 400
    async with serving(2, "--requests-per-worker", str(slots // 2), "--queue-size", str(queue)) as (router, fakes):
        gate = asyncio.Event()
        for fake in fakes:
            fake.script.gate = gate
        before, files = router.resident(), router.open_files()
        limits = httpx.Limits(max_connections=flood)
        async with httpx.AsyncClient(
            base_url=router.http.base_url, timeout=200, trust_env=False, limits=limits
        ) as http:
            requests = [
                asyncio.ensure_future(http.post("/v1/completions", json={"prompt": f"flood {number}"}))
                for number in range(flood)
            ]
            await until(lambda: sum(request.done() for request in requests) >= flood - slots - queue)
            await until(lambda: sum(call.outcome == "running" for fake in fakes for call in fake.calls) == slots)
            urgent = asyncio.ensure_future(
                router.http.post("/v1/completions", json={"prompt": "urgent"}, headers={"x-priority": "100"})
            )
            # It takes the place of one that waits and goes before all others.
            await until(lambda: sum(request.done() for request in requests) >= flood - slots - queue + 1)
            gate.set()
            assert (await urgent).json()["choices"][0]["text"] == "urgent"
            answers = await asyncio.gather(*requests)
        refused = [answer for answer in answers if answer.status_code == 429]
        others = [answer.text for answer in answers if answer.status_code not in (200, 429)]
        assert not others, others[0]
        assert len(refused) == flood - slots - queue + 1
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert router.resident() - before < 60 * MB
        await until(lambda: router.open_files() <= files + 10)
