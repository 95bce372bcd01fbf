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
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from sapwood.v1 import worker_pb2, worker_pb2_grpc
from sapwood_common.network.channel import open_channel
from sapwood_router.app import RouterApplication
from sapwood_router.config import RouterConfig
from sapwood_router.fleet.worker import Worker as FleetWorker
from sapwood_testing.link import Link
from sapwood_testing.losses import note
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
TRIES = 5
"""On a busy machine a request may be past a point before it was seen there; then there is another."""
POINTS = ("queued", "computing", "handing off", "pulling", "first token", "streaming")
SIDES = ("prefill", "decode")
FAULTS = ("kill", "stop", "cut")
EVERY = list(itertools.product(POINTS, SIDES, FAULTS))


class Worker(WorkerProcess):
    """A worker of a role, behind a link of its own."""

    start_seconds = 600.0

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

    def owner(self, port: int) -> Worker | None:
        """The decode worker that has opened a connection from a port."""
        connections = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        inodes = {f"socket:[{each[9]}]" for each in connections if each[1].endswith(f":{port:04X}")}
        for worker in self.of("decode"):
            for pid in worker.ranks():
                for file in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        if str(file.readlink()) in inodes:
                            return worker
        return None

    async def available(self, least: int) -> None:
        async with asyncio.timeout(180):
            while len(self.router.registry.available("demo")) < least:
                await asyncio.sleep(0.02)

    def seen(self, role: str) -> list[tuple[Worker, FleetWorker]]:
        """The workers of a role, and what the router knows of each."""
        pairs = [(worker, self.router.registry.find(worker.seen_at)) for worker in self.of(role)]
        return [(worker, known) for worker, known in pairs if known is not None and known.available]

    @property
    def handed_over(self) -> float:
        return self.router._metrics.registry.get_sample_value("sapwood_router_handoffs_total") or 0

    async def ask(self, story: int, on_piece: Callable[[], None] = lambda: None) -> str:
        """An answer that no worker has anything of in its cache; ``on_piece`` is called with each piece of it."""
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
                        on_piece()
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

    start_seconds = 600.0

    def __init__(self, model: Path) -> None:
        super().__init__()
        self.model = model

    def command(self) -> Sequence[str]:
        return ("sapwood_tokenizer", "--metrics-port", "0", "--model", str(self.model))


class Round:
    """One request, or three of which two prefill workers let the third wait. What comes of it is looked at where the router is:
    in this process, so that a worker is lost at the point and not some time later."""

    def __init__(self, cluster: Cluster, stories: Sequence[int]) -> None:
        self.cluster = cluster
        self.pieces = 0
        self.stories = stories
        self.prefill: Worker | None = None
        """Who has computed."""
        self.handed_over = cluster.handed_over
        self.answers = [asyncio.ensure_future(cluster.ask(story, self.piece)) for story in stories]

    def piece(self) -> None:
        self.pieces += 1

    async def comes_to(self, point: str, side: str) -> Worker | None:
        """Waits until a request is at a point; returns the worker of that side which it concerns, or may concern; None: all are
        over, and none was seen there."""
        while not all(answer.done() for answer in self.answers):
            if (found := self.at(point, side)) is not None:
                return found
            await asyncio.sleep(0.001)
        return None

    def at(self, point: str, side: str) -> Worker | None:
        cluster, handed_over = self.cluster, self.cluster.handed_over > self.handed_over
        prefills, decodes = cluster.seen("prefill"), cluster.seen("decode")
        self.prefill = next((worker for worker, known in prefills if known.in_flight), self.prefill)
        going_on = next((worker for worker, known in decodes if known.in_flight), None)
        generating = any(known.generating for _, known in decodes)
        match point:
            case "queued":
                waiting = [worker for worker, known in prefills if known.in_flight and known.load.waiting_requests]
                return next(iter(waiting), None) if side == "prefill" or not waiting else cluster.of("decode")[0]
            case "computing" if side == "prefill":
                computing = (worker for worker, known in prefills if known.in_flight and known.load.running_requests)
                return None if handed_over else next(computing, None)
            case (
                "computing" | "pulling"
            ):  # on the decode side somebody reads what is computed of a prompt while the rest is
                source = next((worker for worker, _ in prefills if worker.link.reached.is_set()), None)
                if source is None or (point == "computing" and handed_over):
                    return None
                return source if side == "prefill" else cluster.owner(source.link.asked_from)
            case "handing off":
                there = handed_over and not generating
            case "first token":
                there = generating
            case _:
                there = generating and self.pieces >= 6
        return (self.prefill if side == "prefill" else going_on) if there else None


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
        every = EVERY * ROUNDS
        return every[len(every) * (PART - 1) // PARTS : len(every) * PART // PARTS]
    places = itertools.product(POINTS, SIDES)
    return [(point, side, FAULTS[(number + number // 6) % 3]) for number, (point, side) in enumerate(places)]


@pytest.mark.timeout(600 + 40 * 36 * ROUNDS)
async def test_a_worker_lost_anywhere_in_a_hand_over_changes_no_answer_and_leaks_no_page(
    cluster: Cluster,
) -> None:
    counts: Counter[str] = Counter()
    cluster.expected = [await cluster.ask(story) for story in range(len(STORIES))]
    assert sum([await worker.count("pulled_pages") for worker in cluster.of("decode")]) > 0
    restarts: list[asyncio.Future[None]] = []
    for number, (point, side, fault) in enumerate(combinations()):
        for attempt in range(TRIES):
            # While one that was killed starts, the others are stopped and cut off.
            await cluster.available(4 if fault == "kill" else 3)
            if point == "pulling" or (point, side) == ("computing", "decode"):
                for worker in cluster.workers[:2]:  # also the one that is just being started again
                    worker.link.hold(worker.page_port, PAGE_BYTES * 3 // 2)
            running = Round(cluster, range(3) if point == "queued" else [number % 3])
            lost = await running.comes_to(point, side)
            make_well = await lose(lost, fault) if lost is not None else None
            for worker in cluster.workers:
                worker.link.let_go()
            answers = await asyncio.gather(*running.answers, return_exceptions=True)
            if make_well is not None:
                restarts.append(asyncio.ensure_future(make_well()))
                if fault != "kill":
                    await restarts[-1]
            happened = Counter(answers=len(answers), **{"losses" if make_well is not None else "missed": 1})
            for story, answer in zip(running.stories, answers, strict=True):
                happened["failed"] += isinstance(answer, BaseException)
                happened["different"] += answer != cluster.expected[story]
                if answer != cluster.expected[story]:
                    print(f"{answer!r} in place of {cluster.expected[story]!r}", flush=True)
            counts += happened
            note(point=point, side=side, fault=fault, attempt=attempt + 1, **happened)
            print(f"{point}, {side}, {fault}: {dict(counts)}", flush=True)
            if make_well is not None:
                break
        if number % len(EVERY) == len(EVERY) - 1 or number == len(combinations()) - 1:
            await asyncio.gather(*restarts)
            await cluster.available(4)
            await nothing_is_kept(cluster)
            note(losses_so_far=counts["losses"], kept=0)
    metrics = cluster.router._metrics.registry
    resumed, handed = (metrics.get_sample_value(f"sapwood_router_{name}_total") for name in ("resumptions", "handoffs"))
    print(f"{handed:g} hand-overs, {resumed:g} streams went on elsewhere; {dict(counts)}")
    assert not counts["failed"] and not counts["different"]
    assert handed and counts["losses"] == len(combinations())
    # Before its first token a request is not resumed, but asked for again.
    assert resumed or ("streaming", "decode", "kill") not in combinations()


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
