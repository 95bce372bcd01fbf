"""Prefix-cache hit rate and load imbalance of every router's cache-aware policy on multi-turn conversations.

The workloads are those of the design, over HTTP as text, without any key that names a conversation. What the design leaves
open, the lengths of the turns, is set so that its two yardsticks come out: 200 characters of the user's and 24 of the answer
give 0.927 with one infinite cache on the easy workload, and 0.81 with a fixed worker for each conversation on the tight one.
"""

from __future__ import annotations

import asyncio
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import msgspec
import uvloop
from report import Figure, Goal
from router_load.engines import OURS, Router, Times, Workers, get, running
from router_load.load import HttpClient, http_request, percentile
from router_load.mock_engine import BLOCK, WORD

_SYSTEMS, _SYSTEM, _USER, _ANSWER, _TURNS = 4, 2000, 200, 6, 8
_CONCURRENCY = 8
_SEEDS = (1, 2, 3, 4, 5)
_LETTERS = string.ascii_letters + string.digits + "      "


@dataclass(frozen=True)
class Workload:
    """So many conversations, and the share of all their blocks that each worker's cache holds."""

    name: str
    conversations: int
    share: float
    least_hits: float
    most_imbalance: float

    @property
    def blocks(self) -> int:
        turn = _USER + _ANSWER * len(WORD)
        return int((_SYSTEMS * _SYSTEM + self.conversations * _TURNS * turn) // BLOCK * self.share)


_WORKLOADS = (
    Workload("easy", 64, 0.30, least_hits=0.92, most_imbalance=1.25),
    Workload("tight", 256, 0.08, least_hits=0.82, most_imbalance=1.15),
)


@dataclass
class _Outcome:
    hits: float
    imbalance: float
    p99: float


def measure(engines: list[str], folder: Path, scale: float) -> tuple[list[Figure], list[Goal]]:
    """Every router on the same conversations, each time started again."""
    figures: list[Figure] = []
    goals: list[Goal] = []
    seeds = _SEEDS[: max(1, round(len(_SEEDS) * scale))]
    for workload in _WORKLOADS:
        hits: dict[str, float] = {}
        # A prefill of 2 ms and 0.1 ms a block that is not held.
        with Workers(Times(blocks=workload.blocks, base_ms=2, block_us=100), folder) as workers:
            found: dict[str, list[_Outcome]] = {engine: [] for engine in engines}
            for seed in seeds:
                for engine in engines:
                    with (
                        running(engine, workers, folder) as router,
                        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
                    ):
                        found[engine].append(runner.run(_converse(workload, router, workers, seed)))
        for engine, outcomes in found.items():
            hits[engine] = mean(outcome.hits for outcome in outcomes)
            imbalance = mean(outcome.imbalance for outcome in outcomes)
            p99 = mean(outcome.p99 for outcome in outcomes)
            figures.append(Figure(f"{workload.name}: hit rate", hits[engine], "", engine))
            figures.append(Figure(f"{workload.name}: lowest of the seeds", min(o.hits for o in outcomes), "", engine))
            figures.append(Figure(f"{workload.name}: load imbalance", imbalance, "", engine))
            figures.append(Figure(f"{workload.name}: p99", p99 * 1000, "ms", engine))
            if engine == OURS:
                goals.append(Goal(f"{workload.name}: hit rate", hits[engine], least=workload.least_hits))
                goals.append(Goal(f"{workload.name}: load imbalance", imbalance, most=workload.most_imbalance))
        if workload.name == "tight":
            best = max((rate for engine, rate in hits.items() if engine != OURS), default=0.0)
            goals.append(Goal("tight: hit rate to that of the best peer", hits[OURS] / (best or hits[OURS]), least=1.0))
    return figures, goals


async def _converse(workload: Workload, router: Router, workers: Workers, seed: int) -> _Outcome:
    rng = random.Random(seed)
    some: Callable[[int], str] = lambda length: "".join(rng.choices(_LETTERS, k=length))  # noqa: E731
    systems = [some(_SYSTEM) for _ in range(_SYSTEMS)]
    popularity = [1 / (rank + 1) for rank in range(_SYSTEMS)]
    talks = rng.choices(systems, popularity, k=workload.conversations)
    left = [_TURNS] * len(talks)
    waiting = list(range(len(talks)))
    latencies: list[float] = []
    for port in workers.http_ports:
        get(port, "/reset")

    async def client() -> None:
        connection = await HttpClient.connect(router.http_port)
        while waiting:
            talk = waiting.pop(rng.randrange(len(waiting)))
            left[talk] -= 1
            talks[talk] += some(_USER)
            answer = await connection.ask(http_request({"prompt": talks[talk], "max_tokens": _ANSWER}))
            assert answer.status == 200, f"{router.engine}: {answer.status} {answer.body[:200]!r}"
            latencies.append(answer.ended - answer.began)
            talks[talk] += WORD * _ANSWER
            if left[talk]:
                waiting.append(talk)
        connection.close()

    await asyncio.gather(*(client() for _ in range(_CONCURRENCY)))
    stats = [msgspec.json.decode(get(port, "/stats")[1]) for port in workers.http_ports]
    requests = [each["requests"] for each in stats]
    return _Outcome(
        sum(each["hits"] for each in stats) / sum(each["asked"] for each in stats),
        max(requests) / mean(requests),
        percentile(latencies, 0.99),
    )
