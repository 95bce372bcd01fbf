"""What quiet traffic feels of those who overload the router: its p99 beside its p99 alone, and the router's memory.

The quiet traffic is a process of its own: four clients, each with one short request at a time. The same is done to it with each
burden in turn; between two burdens it is measured alone, and a burden is compared with the measurements around it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import uvloop
from report import Figure, Goal
from router_load.engines import OURS, Router, Times, Workers, resident_mb, running
from router_load.load import HttpClient, http_load, http_request, percentile

_IDLE, _SLOW, _MALFORMED, _FLOOD = 5000, 16, 1000, 50
_QUIET_TOKENS = 8
_SECONDS = 6.0
_SLOTS = 4
"""What the workers take at a time while they are flooded."""

Burden = Callable[[Router], contextlib.AbstractAsyncContextManager[None]]


def measure(engines: list[str], folder: Path, scale: float) -> tuple[list[Figure], list[Goal]]:
    """Ours alone: the peers have no notion of some of these."""
    figures: list[Figure] = []
    goals: list[Goal] = []
    seconds = max(1.0, _SECONDS * scale)

    def compare(router: Router, burdens: dict[str, Burden], priority: int) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            before = runner.run(_quiet(router, seconds, priority))
            for name, burden in burdens.items():
                memory = resident_mb(router.process.pid)
                burdened = runner.run(_under(router, burden, seconds, priority))
                grown = resident_mb(router.process.pid) - memory
                router.rest()
                after = runner.run(_quiet(router, seconds, priority))
                alone = mean((before, after))
                figures.append(Figure(f"{name}: p99 of the others", burdened * 1000, "ms", OURS))
                figures.append(Figure(f"{name}: p99 alone", alone * 1000, "ms", OURS))
                figures.append(Figure(f"{name}: memory it added", grown, "MB", OURS))
                goals.append(Goal(f"{name}: p99 to that alone", burdened / alone, most=2.0))
                before = after

    burdens: dict[str, Burden] = {
        f"{_IDLE} idle streams": _idle_streams,
        f"{_SLOW} slow readers": _slow_readers,
        "vanishing clients": _vanishing,
        f"{_MALFORMED} malformed requests": _malformed,
        "a 100 MB message": _huge,
    }
    times = Times(base_ms=2, pace_ms=5, max_running=8192)
    with Workers(times, folder) as workers, running(OURS, workers, folder) as router:
        compare(router, burdens, 0)
    times = Times(base_ms=2, pace_ms=5, max_running=1)
    flags = ("--requests-per-worker", "1", "--queue-size", "64")
    with Workers(times, folder) as workers, running(OURS, workers, folder, *flags) as router:
        compare(router, {f"flood of {_FLOOD} times the capacity": _flood}, 100)
    return figures, goals


async def _under(router: Router, burden: Burden, seconds: float, priority: int) -> float:
    async with burden(router):
        return await _quiet(router, seconds, priority)


async def _quiet(router: Router, seconds: float, priority: int) -> float:
    """p99 of the quiet traffic over so many seconds."""
    command = [sys.executable, "-m", "router_load.overload", str(router.http_port), str(seconds), str(priority)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent)
    out, _ = await process.communicate()
    found = json.loads(out)
    assert found["failed"] == 0, found
    return float(found["p99"])


async def _quiet_clients(port: int, seconds: float, priority: int) -> None:
    """The subprocess."""
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    failed = 0
    until = loop.time() + seconds

    async def client(number: int) -> None:
        nonlocal failed
        connection = await HttpClient.connect(port)
        asked = 0
        while loop.time() < until:
            asked += 1
            body = {"prompt": f"client {number} asks {asked}: short", "max_tokens": _QUIET_TOKENS}
            answer = await connection.ask(_with_header(http_request(body), f"x-priority: {priority}"))
            if answer.status == 200:
                latencies.append(answer.ended - answer.began)
            else:
                failed += 1
            await asyncio.sleep(0.01)
        connection.close()

    await asyncio.gather(*(client(number) for number in range(4 if not priority else 1)))
    print(json.dumps({"p99": percentile(latencies, 0.99), "count": len(latencies), "failed": failed}))


def _with_header(request: bytes, header: str) -> bytes:
    head, _, rest = request.partition(b"\r\n")
    return head + b"\r\n" + header.encode() + b"\r\n" + rest


@asynccontextmanager
async def _idle_streams(router: Router) -> AsyncIterator[None]:
    """Each has had its first word and waits for the next."""
    clients = []
    for start in range(0, _IDLE, 250):
        some = await asyncio.gather(*(HttpClient.connect(router.http_port) for _ in range(250)))
        for number, client in enumerate(some):
            body = {"prompt": f"idle {start + number}", "max_tokens": 1000, "stream": True}
            client.send(http_request(body))
        await asyncio.gather(*(client.begun() for client in some))
        clients += some
    try:
        yield
    finally:
        for client in clients:
            client.close()


@asynccontextmanager
async def _slow_readers(router: Router) -> AsyncIterator[None]:
    clients = await asyncio.gather(*(HttpClient.connect(router.http_port) for _ in range(_SLOW)))
    for number, client in enumerate(clients):
        client.send(http_request({"prompt": f"slow {number}", "max_tokens": 1_000_000, "stream": True}))
        client.pause()
    await asyncio.sleep(8)  # by then every buffer on the way is full
    try:
        yield
    finally:
        for client in clients:
            client.close()


async def _again_and_again(step: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    for number in range(1 << 30):
        await step(number)


@asynccontextmanager
async def _meanwhile(step: Callable[[int], Coroutine[Any, Any, None]], tasks: int = 1) -> AsyncIterator[None]:
    running_tasks = [asyncio.ensure_future(_again_and_again(step)) for _ in range(tasks)]
    try:
        yield
    finally:
        for task in running_tasks:
            task.cancel()
        for ended in await asyncio.gather(*running_tasks, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), ended


def _vanishing(router: Router) -> contextlib.AbstractAsyncContextManager[None]:
    """A hundred a second."""

    async def step(number: int) -> None:
        client = await HttpClient.connect(router.http_port)
        client.send(http_request({"prompt": f"gone {number}", "max_tokens": 1000, "stream": True}))
        await client.begun()
        client.close()
        await asyncio.sleep(0.02)

    return _meanwhile(step, 2)


def _malformed(router: Router) -> contextlib.AbstractAsyncContextManager[None]:
    """A thousand over the time of the measurement."""
    bodies = [{"prompt": 5}, {"prompt": ["a", 1]}, {"prompt": "a", "max_tokens": -1}, {"prompt": "a", "nonsense": 1}]

    async def step(number: int) -> None:
        request = http_request(bodies[number % len(bodies)])  # type: ignore[arg-type]
        result = await http_load(router.http_port, lambda _: request, 1, False, concurrency=1, count=1)
        assert set(result.statuses) == {400}, result.statuses
        await asyncio.sleep(_SECONDS / _MALFORMED * 4)

    return _meanwhile(step, 4)


def _huge(router: Router) -> contextlib.AbstractAsyncContextManager[None]:
    """Sent without a length, a piece at a time, until it is refused; then again."""
    piece = b"100000\r\n" + b"a" * 0x100000 + b"\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"

    async def step(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.http_port)
        with contextlib.suppress(ConnectionError):
            writer.write(head)
            for _ in range(100):
                writer.write(piece)
                await writer.drain()
            status = (await reader.readline()).split()[1:2]
            assert status in ([b"413"], []), status
        writer.close()
        await asyncio.sleep(0.2)

    return _meanwhile(step)


@asynccontextmanager
async def _flood(router: Router) -> AsyncIterator[None]:
    """So many times what runs at once, from clients that come again as soon as they may."""

    async def step(number: int) -> None:
        client = await HttpClient.connect(router.http_port)
        answer = await client.ask(http_request({"prompt": f"flood {number}", "max_tokens": _QUIET_TOKENS}))
        client.close()
        assert answer.status in (200, 429), answer.status
        if answer.status == 429:
            await asyncio.sleep(1)

    async with _meanwhile(step, _FLOOD * _SLOTS):
        await asyncio.sleep(1)
        yield


if __name__ == "__main__":
    uvloop.run(_quiet_clients(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
