"""What a lost worker costs: 1 of 4 is stopped (SIGSTOP) under streams, or killed (SIGKILL) and started again.

Each client asks for a stream of 32 words paced at 5 ms, again and again. Completions are counted in tenths of a second; the
yardstick is the throughput with three workers from the start.
"""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import msgspec
import uvloop
from report import Figure, Goal
from router_load.engines import OURS, Process, Router, Times, Workers, get, running
from router_load.load import HttpClient, http_request, is_whole, percentile

_TOKENS, _CLIENTS = 32, 24
_TIMES = Times(pace_ms=5, base_ms=20, max_running=8)
"""A worker prefills 50 requests a second: with three of four left the clients notice."""
_WINDOW = 1.0


class _Clients:
    """Streams until it is told to stop."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._running = True
        self.completed: list[float] = []
        self.began: list[float] = []
        self.failed = 0
        self._tasks = [asyncio.ensure_future(self._client(number)) for number in range(_CLIENTS)]

    async def _client(self, number: int) -> None:
        connection = await HttpClient.connect(self._router.http_port)
        asked = 0
        while self._running:
            asked += 1
            if not connection.open:
                connection = await HttpClient.connect(self._router.http_port)
            body = {"prompt": f"{number} asks {asked}: how is it going?", "max_tokens": _TOKENS, "stream": True}
            began = time.perf_counter()
            try:
                async with asyncio.timeout(10):
                    answer = await connection.ask(http_request(body))
            except TimeoutError:
                connection.close()
                self.failed += 1
                continue
            if answer.status == 200 and is_whole(answer, _TOKENS, True):
                self.completed.append(time.perf_counter())
                self.began.append(began)
            else:
                self.failed += 1
                await asyncio.sleep(0.01)
        connection.close()

    def rate(self, since: float, until: float) -> float:
        return sum(since <= at < until for at in self.completed) / (until - since)

    async def stop(self) -> None:
        self._running = False
        await asyncio.gather(*self._tasks)


def measure(engines: list[str], folder: Path, scale: float) -> tuple[list[Figure], list[Goal]]:
    """All routers with round_robin, so that every worker has its part of the load; ours with cache_aware too."""
    figures: list[Figure] = []
    goals: list[Goal] = []
    for engine in engines:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            with Workers(_TIMES, folder) as workers, running(engine, workers, folder, policy="round_robin") as router:
                found = runner.run(_stop_one(router, workers))
                figures += [Figure(f"SIGSTOP: {what}", value, unit, engine) for what, value, unit in found]
                if engine == OURS:
                    values = {what: value for what, value, _ in found}
                    goals.append(Goal("SIGSTOP: seconds to 95 % of three workers", values["back to 95 %"], most=2.0))
                    goals.append(Goal("SIGSTOP: failed", values["failed"], most=0))
            with Workers(_TIMES, folder) as workers, running(engine, workers, folder, policy="round_robin") as router:
                found = runner.run(_restart_one(router, workers))
                figures += [Figure(f"SIGKILL and restart: {what}", value, unit, engine) for what, value, unit in found]
                if engine == OURS:
                    values = {what: value for what, value, _ in found}
                    goals.append(Goal("restarted worker serves after, s", values["serves again after"], most=3.0))
                    goals.append(Goal("SIGKILL: failed", values["failed"], most=0))
    return figures, goals


async def _stop_one(router: Router, workers: Workers) -> list[tuple[str, float, str]]:
    """Three, then four, then three again, of which the router has to find out by itself."""
    clients = _Clients(router)
    await asyncio.sleep(2)
    four_from = time.perf_counter()
    await asyncio.sleep(3)
    stopped_at = time.perf_counter()
    workers.processes[0].handle.send_signal(signal.SIGSTOP)
    await asyncio.sleep(12)
    ended_at = time.perf_counter()
    workers.processes[0].handle.send_signal(signal.SIGCONT)
    four = clients.rate(four_from, stopped_at)
    three = clients.rate(ended_at - 6, ended_at)
    back = _back(clients, stopped_at, ended_at, 0.95 * three)
    dip = min(clients.rate(stopped_at + at / 4, stopped_at + at / 4 + _WINDOW) for at in range(40))
    await clients.stop()
    longest = max((b - a for a, b in zip(clients.began, clients.completed, strict=True)), default=0.0)
    normal = percentile([b - a for a, b in zip(clients.began, clients.completed, strict=True)], 0.5)
    return [
        ("requests/s with four", four, "1/s"),
        ("requests/s with three", three, "1/s"),
        ("lowest second", dip, "1/s"),
        ("back to 95 %", back, "s"),
        ("longest answer", longest, "s"),
        ("median answer", normal, "s"),
        ("failed", float(clients.failed), ""),
    ]


def _back(clients: _Clients, since: float, until: float, rate: float) -> float:
    """Seconds after which a second begins whose rate, and that of every later second, is what it should be."""
    starts = [since + step / 20 for step in range(int((until - since - _WINDOW) * 20))]
    # A second of forty completions is off by a sixth one time in three: what counts is the mean from there on, and that the
    # second itself is not the gap.
    for start in starts:
        if clients.rate(start, start + _WINDOW) >= rate and clients.rate(start, min(start + 4, until)) >= rate:
            return start - since
    return until - since


async def _restart_one(router: Router, workers: Workers) -> list[tuple[str, float, str]]:
    clients = _Clients(router)
    await asyncio.sleep(2)
    workers.processes[0].stop()
    await asyncio.sleep(3)
    workers.processes[0] = started = workers.start_worker(0)
    healthy = await _first(started, workers.http_ports[0], "asked", least=0)
    deadline = healthy + 90
    serves = deadline
    while time.perf_counter() < deadline:
        if _stat(workers.http_ports[0], "requests") > 0:
            serves = time.perf_counter()
            break
        await asyncio.sleep(0.02)
    await asyncio.sleep(1)
    await clients.stop()
    return [("serves again after", serves - healthy, "s"), ("failed", float(clients.failed), "")]


async def _first(process: Process, port: int, key: str, least: int) -> float:
    while _stat(port, key) < least:
        assert process.handle.poll() is None, f"see {process.log}"
        await asyncio.sleep(0.02)
    return time.perf_counter()


def _stat(port: int, key: str) -> int:
    status, body = get(port, "/stats")
    return int(msgspec.json.decode(body)[key]) if status == 200 else -1
