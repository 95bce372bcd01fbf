"""Workers, routers and a workload together: one run gives one row of figures."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from fleet_sim.events import Events
from fleet_sim.router import SimulatedRouter, Times
from fleet_sim.worker import Job, SimulatedWorker, Speed
from fleet_sim.workloads import Ask, Source, Workload

from sapwood_common.errors import ResourceExhaustedError
from sapwood_router.admission.control import Place
from sapwood_router.routing.policies.base import PromptPages

_DEADLINE = 30.0


@dataclass(frozen=True, slots=True)
class Size:
    """How large the fleet is."""

    workers: int
    pages: int
    """Of all workers together."""
    page_size: int
    routers: int
    max_running: int
    index_bytes: tuple[int, int]
    """Of each router: the index of its own placements, and that of the workers' events."""


class Tally:
    """What one run counted since its warm-up was over."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.asked_pages = self.cached_pages = self.requests = self.refused = self.waited = 0
        self.first_token: list[float] = []


class Fleet:
    """Made once; filled once; each run begins with full caches and routers that know of all of them."""

    def __init__(self, size: Size, speed: Speed, report_seconds: float) -> None:
        self.size = size
        self.events = Events()
        self._report_seconds = report_seconds
        self._answer_seconds = speed.decode
        self._waiters: set[asyncio.Task[None]] = set()
        each = size.pages // size.workers
        self.workers = {
            f"10.0.{i >> 8}.{i & 255}:50061": SimulatedWorker(
                f"10.0.{i >> 8}.{i & 255}:50061", each, size.page_size, speed, self.events
            )
            for i in range(size.workers)
        }
        self.routers = [
            SimulatedRouter(
                tuple(self.workers), size.page_size, each, size.max_running, size.index_bytes, self.events, i
            )
            for i in range(size.routers)
        ]

    def fill(self) -> dict[str, float]:
        """All workers' caches, then each router's index from their snapshots; returns what that took."""
        memory = []
        for number, router in enumerate(self.routers):
            if number == 0:
                snapshots = {address: worker.fill() for address, worker in self.workers.items()}
            before = resident_bytes()
            for address, raw in snapshots.items():
                router.hear(address, raw)
            memory.append(resident_bytes() - before)
        times = self.routers[0].times
        pages = self.size.pages // self.size.workers * self.size.workers
        gc.collect()
        gc.freeze()  # as a router does at its start, whose own collections wait for its event loop
        return {
            "pages": pages,
            "index_bytes_a_page": round(min(memory) / pages, 1),
            "index_gb": round(min(memory) / 1e9, 2),
            "accounted_bytes_a_page": round(self.routers[0].blocks.bytes_used / pages, 1),
            "refused_pages": self.routers[0].blocks.refused,
            "snapshot_us_a_page": round(times.events / pages / 1e3, 2),
        }

    async def run(
        self, workload: Workload, policy: str, rate: float, warm: float, seconds: float, seed: int
    ) -> dict[str, float | str]:
        """One policy on one workload for some virtual seconds."""
        began = time.monotonic()
        events = self.events
        events.clear()
        start = events.now
        rng = random.Random(seed)
        tally = Tally()
        for router in self.routers:
            router.begin(policy)
        heard = [router for router in self.routers if router.reads_events]

        def publish(address: str, raw: bytes) -> None:
            for router in heard:
                router.hear(address, raw)

        for worker in self.workers.values():
            worker.begin()
            worker.publish = publish if heard else None
        source = Source(
            workload,
            rate,
            start + warm + seconds,
            f"{seed} {policy} {workload.name}",  # what the caches hold of other runs is nothing that is asked for now
            events.after,
            events.clock,
            lambda ask: self._ask(ask, rng.choice(self.routers), tally),
        )
        source.start(self._answer_seconds * workload.answer)
        self._report(list(self.workers.values()), 0)
        await events.run(start + warm)
        for router in self.routers:
            router.times = Times()
        for worker in self.workers.values():
            worker.requests, worker.busy = 0, 0.0
        tally.clear()
        await events.run(start + warm + seconds)
        for waiter in tuple(self._waiters):
            waiter.cancel()
        await asyncio.gather(*self._waiters, return_exceptions=True)
        for worker in self.workers.values():
            worker.end()
        row = self._row(tally, seconds)
        row |= {"real_seconds": round(time.monotonic() - began, 1)}
        return {"workload": workload.name, "policy": policy} | row

    def _ask(self, ask: Ask, router: SimulatedRouter, tally: Tally) -> None:
        tally.requests += 1
        came = self.events.now
        place = router.reserve(len(ask.tokens) + len(ask.answer), came + _DEADLINE)
        if place is None:
            tally.refused += 1
        elif place.ready():
            self._place(ask, router, tally, came)
        else:
            tally.waited += 1
            self.events.tasks += 1
            waiter = asyncio.get_running_loop().create_task(self._wait(ask, router, tally, came, place))
            self._waiters.add(waiter)
            waiter.add_done_callback(self._waiters.discard)

    async def _wait(self, ask: Ask, router: SimulatedRouter, tally: Tally, came: float, place: Place) -> None:
        try:
            await place.turn()
            self._place(ask, router, tally, came)
        except ResourceExhaustedError:
            tally.refused += 1
        finally:
            self.events.tasks -= 1

    def _place(self, ask: Ask, router: SimulatedRouter, tally: Tally, came: float) -> None:
        prompt = PromptPages(ask.tokens, ask.session)
        placement = router.place(prompt)
        hashes = prompt.hashes(self.size.page_size)

        def prefilled(held: int) -> None:
            placement.lease.prefilled()
            tally.first_token.append(self.events.now - came)
            tally.asked_pages += len(hashes)
            tally.cached_pages += held

        def finished() -> None:
            router.finished(placement, prompt, ask.answer)
            ask.done()

        self.workers[placement.address].take(Job(ask.tokens, hashes, ask.answer, prefilled, finished))

    def _report(self, workers: Sequence[SimulatedWorker], turn: int) -> None:
        """Workers report their loads in turn, each once in so many seconds, to all routers."""
        parts = 20
        for worker in workers[turn % parts :: parts]:
            load = worker.load()
            for router in self.routers:
                known = router.registry.find(worker.address)
                assert known is not None
                known.report(load)
        self.events.after(self._report_seconds / parts, lambda: self._report(workers, turn + 1))

    def _row(self, tally: Tally, seconds: float) -> dict[str, float | str]:
        requests = [worker.requests for worker in self.workers.values()]
        busy = [worker.busy for worker in self.workers.values()]
        row: dict[str, float | str] = {
            "requests_a_second": round(tally.requests / seconds),
            "refused": tally.refused,
            "waited": tally.waited,
            "hit_rate": round(tally.cached_pages / max(1, tally.asked_pages), 4),
            "imbalance_requests": round(max(requests) / (sum(requests) / len(requests)), 2),
            "imbalance_prefill": round(max(busy) / (sum(busy) / len(busy)), 2),
            "ttft_ms_p50": round(1e3 * share(tally.first_token, 0.5), 1),
            "ttft_ms_p99": round(1e3 * share(tally.first_token, 0.99), 1),
        }
        times = [router.times for router in self.routers]
        parts = {
            "hash": [each.hash for each in times],
            "select": [each.select for each in times],
            "acquire": [each.acquire for each in times],
            "finish": [each.finish for each in times],
        }
        for name, lists in parts.items():
            all_of_it = list(chain.from_iterable(lists))
            row |= {
                f"{name}_us_p50": round(share(all_of_it, 0.5) / 1e3),
                f"{name}_us_p99": round(share(all_of_it, 0.99) / 1e3),
            }
        pages = sum(each.pages for each in times)
        row["event_us_a_page"] = round(sum(each.events for each in times) / pages / 1e3, 2) if pages else 0.0
        return row


def share(values: Sequence[float], part: float) -> float:
    """The value below which that part lies; 0 if there are none."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else 0.0


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
