"""What quiet traffic feels of those who overload the router: its p99 compared with its p99 alone, and the router's memory.

The quiet traffic is a process of its own: four clients, each with one short request at a time. It is measured alone and along
with each burden in turn, a phase at a time. Along with the flood it has a tenant of its own, or a higher priority. On a machine
with other things to do their noise is larger than what is measured here: a phase in which other processes took more than
``_OTHERS`` of a core is measured again, with at most ``_TRIES`` phases for each p99, and those with the least of that count.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from report import Figure, Goal
from router_load.engines import OURS, Router, Times, Workers, cpu_seconds, resident_mb, running
from router_load.load import Answer, HttpClient, http_load, http_request, percentile

from sapwood_common.tenants.api_keys import hash_key, make_key

_IDLE, _SLOW, _MALFORMED, _FLOOD = 5000, 16, 1000, 50
_QUIET_CLIENTS, _QUIET_TOKENS = 4, 8
_PHASE = 1.5
"""Seconds."""
_PHASES, _TRIES, _OTHERS = 4, 16, 0.3
_WORKERS = 4
_SLOTS, _FLOOD_TOKENS = 4, 24
"""While they are flooded: what each worker takes at a time, and the tokens of an answer, quiet or not."""

Burden = Callable[[Router], contextlib.AbstractAsyncContextManager[None]]


@dataclass(frozen=True)
class _Quiet:
    """The quiet traffic: tokens of an answer, and what each request says of itself in headers."""

    tokens: int = _QUIET_TOKENS
    headers: tuple[str, ...] = ()


def measure(engines: list[str], folder: Path, scale: float) -> tuple[list[Figure], list[Goal]]:
    """Ours alone: the peers have no notion of some of these."""
    figures: list[Figure] = []
    goals: list[Goal] = []
    phases = max(1, round(_PHASES * scale))

    def compare(router: Router, burdens: dict[str, tuple[Burden, _Quiet]]) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            before: tuple[_Quiet, _Measured] | None = None
            for name, (burden, quiet) in burdens.items():
                if before is None or before[0] != quiet:
                    before = quiet, runner.run(_quiet(router, phases, quiet))
                memory = resident_mb(router.process.pid)
                burdened = runner.run(_under(router, burden, phases, quiet))
                grown = resident_mb(router.process.pid) - memory
                router.rest()
                after = runner.run(_quiet(router, phases, quiet))
                alone = percentile(before[1].latencies + after.latencies, 0.99)
                p99 = percentile(burdened.latencies, 0.99)
                others = max(before[1].others, burdened.others, after.others)
                figures.append(Figure(f"{name}: p99 of the others", p99 * 1000, "ms", OURS))
                figures.append(Figure(f"{name}: p99 alone", alone * 1000, "ms", OURS))
                figures.append(Figure(f"{name}: memory it added", grown, "MB", OURS))
                figures.append(Figure(f"{name}: cores that other processes took at most", others, "", OURS))
                goals.append(Goal(f"{name}: p99 to that alone", p99 / alone, most=2.0))
                before = quiet, after

    burdens: dict[str, Burden] = {
        f"{_IDLE} idle streams": _idle_streams,
        f"{_SLOW} slow readers": _slow_readers,
        "vanishing clients": _vanishing,
        f"{_MALFORMED} malformed requests": _malformed,
        "a 100 MB message": _huge,
    }
    times = Times(base_ms=2, pace_ms=5, max_running=8192)
    with Workers(times, folder) as workers, running(OURS, workers, folder) as router:
        compare(router, {name: (burden, _Quiet()) for name, burden in burdens.items()})
    keys = {name: make_key() for name in ("flood", "other")}
    file = folder / "api-keys"
    file.write_text("".join(f"{name} {hash_key(key)} priority=100\n" for name, key in keys.items()))
    times = Times(base_ms=2, pace_ms=5, max_running=_SLOTS)
    flags = ("--requests-per-worker", str(_SLOTS), "--queue-size", "64", "--api-keys", str(file))
    flood = partial(_flood, key=keys["flood"])
    important = _Quiet(_FLOOD_TOKENS, (_authorization(keys["flood"]), "x-priority: 100"))
    other = _Quiet(_FLOOD_TOKENS, (_authorization(keys["other"]),))
    name = f"flood of {_FLOOD} times the capacity"
    with (
        Workers(times, folder) as workers,
        running(OURS, workers, folder, *flags, headers=dict([_authorization(keys["other"]).split(": ")])) as router,
    ):
        compare(router, {f"{name}, more important": (flood, important), f"{name}, another tenant": (flood, other)})
    return figures, goals


@dataclass
class _Measured:
    """Latencies of the quiet traffic in seconds, and the most that other processes took in a phase of it, in cores."""

    latencies: list[float]
    others: float


async def _under(router: Router, burden: Burden, phases: int, quiet: _Quiet) -> _Measured:
    async with burden(router):
        return await _quiet(router, phases, quiet)


async def _quiet(router: Router, phases: int, quiet: _Quiet) -> _Measured:
    """The quiet traffic in so many phases."""
    command = [sys.executable, "-m", "router_load.overload", str(router.http_port), str(_PHASE), str(quiet.tokens)]
    command += quiet.headers
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=1 << 24, cwd=Path(__file__).parent.parent
    )
    assert process.stdin is not None
    assert process.stdout is not None
    found: list[tuple[float, list[float]]] = []
    for _ in range(_TRIES * phases // _PHASES):
        began, others = time.perf_counter(), _cpu_of_others()
        process.stdin.write(b"go\n")
        answer = json.loads(await process.stdout.readline())
        assert not answer["failed"], answer["failed"]
        found.append(((_cpu_of_others() - others) / (time.perf_counter() - began), answer["latencies"]))
        if sum(each <= _OTHERS for each, _ in found) == phases:
            break
    process.stdin.close()
    await process.wait()
    best = sorted(found)[:phases]
    return _Measured([latency for _, latencies in best for latency in latencies], best[-1][0])


def _cpu_of_others() -> float:
    """CPU seconds that this machine spent on processes that are not this benchmark's, or did not get from its host."""
    user, nice, system, _, _, irq, soft, stolen = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + soft + stolen) / float(os.sysconf("SC_CLK_TCK")) - cpu_seconds(os.getpid())


async def _quiet_clients(port: int, seconds: float, tokens: int, headers: list[str]) -> None:
    """The subprocess: one phase for each line of its input, answered with a line."""
    loop = asyncio.get_running_loop()
    connections = [await HttpClient.connect(port) for _ in range(_QUIET_CLIENTS)]
    asked = itertools.count()
    while await loop.run_in_executor(None, sys.stdin.readline):
        latencies: list[float] = []
        failed: list[str] = []
        until = loop.time() + seconds

        async def client(which: int) -> None:
            while loop.time() < until:  # noqa: B023
                if not connections[which].open:  # it failed one request, which is counted
                    connections[which] = await HttpClient.connect(port)
                connection = connections[which]
                body = {"prompt": f"request {next(asked)}: short", "max_tokens": tokens}
                answer = await connection.ask(_with_headers(http_request(body), *headers))
                if answer.status == 200:
                    latencies.append(answer.ended - answer.began)  # noqa: B023
                else:
                    failed.append(f"{answer.status} {answer.body[:200]!r}")  # noqa: B023
                await asyncio.sleep(0.01)

        await asyncio.gather(*map(client, range(len(connections))))
        print(json.dumps({"latencies": latencies, "failed": failed}), flush=True)


def _with_headers(request: bytes, *headers: str) -> bytes:
    head, _, rest = request.partition(b"\r\n")
    return b"\r\n".join((head, *(header.encode() for header in headers), rest))


def _authorization(key: str) -> str:
    return f"authorization: Bearer {key}"


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
    """A thousand in the time of four phases."""
    bodies = [{"prompt": 5}, {"prompt": ["a", 1]}, {"prompt": "a", "max_tokens": -1}, {"prompt": "a", "nonsense": 1}]

    async def step(number: int) -> None:
        request = http_request(bodies[number % len(bodies)])  # type: ignore[arg-type]
        result = await http_load(router.http_port, lambda _: request, 1, False, concurrency=1, count=1)
        assert set(result.statuses) == {400}, result.statuses
        await asyncio.sleep(_PHASE * _PHASES / _MALFORMED * 4)

    return _meanwhile(step, 4)


def _huge(router: Router) -> contextlib.AbstractAsyncContextManager[None]:
    """Sent without a length, a piece at a time, until it is refused; then again."""
    piece = b"100000\r\n" + b"a" * 0x100000 + b"\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"transfer-encoding: chunked\r\n\r\n"

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
async def _flood(router: Router, key: str) -> AsyncIterator[None]:
    """So many times what runs at once, from clients that come again as soon as they may, each time on a new connection. Their
    answers are of different lengths: of one length, all workers would be done at the same moment, and everybody wait for that.
    """
    rng = random.Random(1)

    async def step(number: int) -> None:
        client = await HttpClient.connect(router.http_port)
        length = rng.randint(1, 2 * _FLOOD_TOKENS - 1)
        body = {"prompt": f"flood {number}", "max_tokens": length}
        answer = await client.ask(_with_headers(http_request(body), _authorization(key)))
        client.close()
        assert answer.status in (200, 429), answer.status
        if answer.status == 429:
            await asyncio.sleep(_retry_delay(answer))

    async with _meanwhile(step, _FLOOD * _SLOTS * _WORKERS):
        await asyncio.sleep(2)
        yield


def _retry_delay(answer: Answer) -> float:
    """Seconds, as the answer says."""
    return int(answer.headers["retry-after-ms"]) / 1000


if __name__ == "__main__":
    uvloop.run(_quiet_clients(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
