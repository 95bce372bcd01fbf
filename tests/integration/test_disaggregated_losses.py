"""Prefill and decode workers on the demo model, two of each, killed, stopped and cut off at six points of a way from one to
the other: no request fails, every greedy answer is the undisturbed one, and no page is kept.

``make test-handoffs`` does each of the 36 so often as ROUNDS says, or with PART=2/6 the second sixth of them; the test does a
third of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from sapwood.v1 import worker_pb2, worker_pb2_grpc
from sapwood_common.network.channel import open_channel
from sapwood_router.app import RouterApplication
from sapwood_router.config import RouterConfig
from sapwood_testing.link import Link
from sapwood_testing.ports import port_of_its_own
from sapwood_testing.router.worker_process import WorkerProcess

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

ROUNDS = int(os.environ.get("SAPWOOD_LOSS_ROUNDS", "0"))
"""0: each point and side once, with one of the three faults."""
PART, PARTS = map(int, os.environ.get("SAPWOOD_LOSS_PART", "1/1").split("/"))
TOKENS = 24
STEP_TOKENS = 48
PAGE_BYTES = 2 * 18 * 16 * 256 * 4  # keys and values, layers, tokens, the one head, float32
STORIES = [
    "Once upon a time, in a village by the sea, there lived a fisherman who had three daughters. ",
    "The history of the steam engine begins long before the railways, with pumps that drained mines. ",
    "A good soup needs time, patience, and bones; the vegetables are added only when the broth is clear. ",
]
POINTS = ("queued", "computing", "handing off", "pulling", "first token", "streaming")
SIDES = ("prefill", "decode")
FAULTS = ("kill", "stop", "cut")


class Worker(WorkerProcess):
    """A worker of a role, behind a link of its own."""

    start_seconds = 300.0

    def __init__(self, model: Path, role: str, number: int) -> None:
        self.model, self.role = model, role
        self.metrics_port, self.page_port = port_of_its_own(), port_of_its_own()
        few = ("--max-running", "1", "--max-step-tokens", str(STEP_TOKENS)) if role == "prefill" else ()
        pages = ("--handoff-port", str(self.page_port)) if role == "prefill" else ()
        super().__init__(flags=("--role", role, "--metrics-port", str(self.metrics_port), *few, *pages))
        self.dead = False
        self.link = Link(f"127.0.0.{10 + number}", "127.0.0.1", (self.port, self.page_port))

    def command(self) -> Sequence[str]:
        flags = ("--model", str(self.model), "--served-model-name", "demo", "--kv-cache-gb", "0.1", "--threads", "1")
        # As between hosts: of memory that both share nothing goes over the link.
        return ("sapwood_worker", *flags, "--host-cache-ratio", "2", "--handoff-mover", "tcp")

    @property
    def seen_at(self) -> str:
        """Where the router finds it."""
        return f"{self.link.host}:{self.port}"

    async def count(self, name: str) -> float:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            text = (await http.get(f"http://127.0.0.1:{self.metrics_port}/metrics")).text
        found = re.search(rf"^sapwood_worker_{name}(?:_total)? (\S+)$", text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    async def end(self) -> None:
        """Kills all of its processes at once."""
        self.dead = True
        self.send_to_all(signal.SIGKILL)
        await self.process.wait()

    async def start(self) -> None:
        await super().start()
        self.dead = False

    def send_to_all(self, number: signal.Signals) -> None:
        for pid in (self.process.pid, *self.ranks()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class Cluster:
    """Two workers of each role, the tokenizer and a router."""

    def __init__(self, workers: Sequence[Worker], router: RouterApplication) -> None:
        self.workers, self.router = workers, router
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{router.http_port}", trust_env=False, timeout=httpx.Timeout(300, pool=None)
        )
        self.salts = itertools.count()
        self.expected: list[str] = []

    def of(self, role: str) -> list[Worker]:
        return [worker for worker in self.workers if worker.role == role and not worker.dead]

    async def available(self, least: int) -> None:
        async with asyncio.timeout(180):
            while len(self.router.registry.available("demo")) < least:
                await asyncio.sleep(0.02)

    async def find(self, role: str, gauge: str) -> Worker:
        """The worker of a role of which a gauge is above 0, as soon as there is one."""
        async with asyncio.timeout(180):
            while True:
                for worker in self.of(role):
                    if await worker.count(gauge) > 0:
                        return worker

    async def ask(self, story: int, pieces: asyncio.Queue[str] | None = None) -> str:
        """An answer that no worker has anything of in its cache; each piece of it is told when it comes."""
        body = {
            "model": "demo",
            "prompt": STORIES[story] * 12,
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "cache_salt": f"round {next(self.salts)}",
        }
        text = ""
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        text += choice["text"]
                        if pieces is not None and choice["text"]:
                            pieces.put_nowait(choice["text"])
        return text


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(demo_model: Path) -> AsyncIterator[Cluster]:
    workers = [
        Worker(demo_model, role, number) for number, role in enumerate(("prefill", "prefill", "decode", "decode"))
    ]
    tokenizer = Tokenizer(demo_model)
    running: Cluster | None = None
    try:
        await asyncio.gather(tokenizer.start(), *(worker.start() for worker in workers))
        for worker in workers:
            await worker.link.open()
        router = RouterApplication(
            RouterConfig(
                port=0,
                http_port=0,
                tokenizer=tokenizer.address,
                workers=tuple(worker.seen_at for worker in workers),
                disaggregate="always",
                policy="least_load",
                worker_silence=2.0,
                resume_grace=120,
                queue_wait=300,
                most_resumptions=50,
            )
        )
        await router.start()
        running = Cluster(workers, router)
        await running.available(4)
        yield running
    finally:
        if running is not None:
            await running.http.aclose()
            await running.router.stop()
        for worker in workers:
            await worker.link.close()
            await worker.kill()
        await tokenizer.kill()


class Tokenizer(WorkerProcess):
    """The demo model's tokenizer."""

    start_seconds = 300.0

    def __init__(self, model: Path) -> None:
        super().__init__()
        self.model = model

    def command(self) -> Sequence[str]:
        return ("sapwood_tokenizer", "--metrics-port", "0", "--model", str(self.model))


class Round:
    """Three requests at a time, of which two prefill workers let the third wait; what is lost when the first comes to a point."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.pieces: list[asyncio.Queue[str]] = [asyncio.Queue() for _ in STORIES]
        self.answers = [asyncio.ensure_future(cluster.ask(story, pieces)) for story, pieces in enumerate(self.pieces)]

    async def comes_to(self, point: str, side: str) -> Worker | None:
        """Waits until a request is at a point; returns the worker of that side which it concerns, or may concern; None: all are
        over, and none was seen there."""
        coming = asyncio.ensure_future(self._comes_to(point, side))
        over = asyncio.ensure_future(asyncio.wait(self.answers))
        await asyncio.wait((coming, over), return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if coming.done():
            return coming.result()
        coming.cancel()
        return None

    async def _comes_to(self, point: str, side: str) -> Worker:
        cluster, there = self.cluster, "running_requests"
        match point:
            case "queued":
                worker = await cluster.find("prefill", "waiting_requests")
            case "computing":
                worker = await cluster.find("prefill", there)
            case "handing off":
                await self.some_piece(1)
                return await self.first_of(side, "handoff_pages", there)
            case "pulling":
                await self.first(worker.link.reached.wait() for worker in cluster.of("prefill"))
                reached = [worker for worker in cluster.of("prefill") if worker.link.reached.is_set()]
                # Pages are read for a request that waits, or before it is there.
                return reached[0] if side == "prefill" else await self.first_of("decode", "waiting_requests")
            case "first token":
                await self.some_piece(2)
                return await self.first_of(side, "handoff_pages", there)
            case _:
                await self.some_piece(6)
                return await self.first_of(side, "handoff_pages", there)
        return worker if side == "prefill" else cluster.of("decode")[0]

    async def first_of(self, side: str, *gauges: str) -> Worker:
        """The worker of a side that has something of a request, or any where all is over already."""
        for worker in self.cluster.of(side):
            for gauge in gauges:
                if await worker.count(gauge) > 0:
                    return worker
        return self.cluster.of(side)[0]

    async def some_piece(self, count: int) -> None:
        """Waits until one of the answers has so many pieces."""
        await self.first(self.so_many(pieces, count) for pieces in self.pieces)

    @staticmethod
    async def first(waits: Iterable[Coroutine[Any, Any, Any]]) -> None:
        """Waits for one of several."""
        tasks = [asyncio.ensure_future(each) for each in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in tasks:
                each.cancel()

    @staticmethod
    async def so_many(pieces: asyncio.Queue[str], count: int) -> None:
        for _ in range(count):
            await pieces.get()


async def lose(worker: Worker, fault: str) -> Callable[[], Any]:
    """Does it to a worker; returns what makes it well again."""
    match fault:
        case "kill":
            await worker.end()
            return worker.start
        case "stop":
            worker.send_to_all(signal.SIGSTOP)

            async def go_on() -> None:
                worker.send_to_all(signal.SIGCONT)

            return go_on
        case _:
            worker.link.cut()

            async def mend() -> None:
                worker.link.mend()

            return mend


def combinations() -> list[tuple[str, str, str]]:
    """All of them ROUNDS times, or one fault at each point of either side."""
    if ROUNDS:
        every = list(itertools.product(POINTS, SIDES, FAULTS)) * ROUNDS
        return every[len(every) * (PART - 1) // PARTS : len(every) * PART // PARTS]
    places = itertools.product(POINTS, SIDES)
    return [(point, side, FAULTS[(number + number // 6) % 3]) for number, (point, side) in enumerate(places)]


@pytest.mark.timeout(600 + 40 * 36 * ROUNDS)
async def test_a_worker_lost_at_any_point_of_a_hand_over_fails_no_request_changes_no_answer_and_keeps_no_page(
    cluster: Cluster,
) -> None:
    counts: Counter[str] = Counter()
    cluster.expected = [await cluster.ask(story) for story in range(len(STORIES))]
    assert sum([await worker.count("pulled_pages") for worker in cluster.of("decode")]) > 0
    restarts: list[asyncio.Future[None]] = []
    for point, side, fault in combinations():
        # While one that was killed starts, the others are stopped and cut off.
        await cluster.available(4 if fault == "kill" else 3)
        if point == "pulling":
            for worker in cluster.of("prefill"):
                worker.link.hold(worker.page_port, 3 * PAGE_BYTES)
        running = Round(cluster)
        lost = await running.comes_to(point, side)
        make_well = await lose(lost, fault) if lost is not None else None
        for worker in cluster.workers:
            worker.link.let_go()
        answers = await asyncio.gather(*running.answers, return_exceptions=True)
        if make_well is not None:
            restarts.append(asyncio.ensure_future(make_well()))
            if fault != "kill":
                await restarts[-1]
        counts["losses" if make_well is not None else "missed"] += 1
        counts["answers"] += len(answers)
        counts["failed"] += sum(isinstance(answer, BaseException) for answer in answers)
        counts["different"] += sum(a != b for a, b in zip(answers, cluster.expected, strict=True))
        print(f"{point}, {side}, {fault}: {dict(counts)}", flush=True)
    metrics = cluster.router._metrics.registry
    resumed, handed = (metrics.get_sample_value(f"sapwood_router_{name}_total") for name in ("resumptions", "handoffs"))
    print(f"{handed:g} hand-overs, {resumed:g} streams went on elsewhere; {dict(counts)}")
    assert not counts["failed"] and not counts["different"]
    await asyncio.gather(*restarts)
    await cluster.available(4)
    assert handed and counts["missed"] < counts["losses"]
    # Before its first token a request is not resumed, but asked for again.
    assert resumed or ("streaming", "decode", "kill") not in combinations()
    await nothing_is_kept(cluster)


async def nothing_is_kept(cluster: Cluster) -> None:
    """No ticket's pages are, and what the caches are told to forget is all that there is."""
    for worker in cluster.of("prefill"):
        async with asyncio.timeout(60):
            while await worker.count("handoff_pages"):
                await asyncio.sleep(0.05)
    for worker in cluster.workers:
        async with open_channel(worker.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            await stub.FlushCache(worker_pb2.FlushCacheRequest(), timeout=60)
            stats = await stub.GetCacheStats(worker_pb2.GetCacheStatsRequest(), timeout=60)
        assert [tier.pages for tier in stats.tiers if tier.capacity] == [0, 0], stats
