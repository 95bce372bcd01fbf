"""What long prompts of one tenant do to others' first tokens, to running streams and to throughput: in virtual time.

    python benchmarks/bench_shares.py

It runs the worker's scheduler. A step takes what ``COSTS`` says of its decodes, prompt tokens and context, so nothing else that
the machine does matters, and two commits can be compared exactly: put the other's ``services/worker`` on PYTHONPATH. With a real
model ``benchmarks/gpu/bench_tenants.py`` measures the same.

long    eleven tokens of Bob's, again and again, and two streams of Carol's, while long prompts of Alice's are computed
open    so many requests a second; a fifth of the prompts are long, the others have 16 to 256 tokens; outputs of 16 to 64
closed  the same from clients that ask one after the other without a pause: more than the CPU can do

Prints one JSON object a line, times in ms. A "short" prompt has up to 256 tokens.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import NamedTuple

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.records.step import ModelOutput, Step


class Device(NamedTuple):
    """What a step costs in seconds, and the scheduler's sizes."""

    fixed: float
    decode: float
    prompt: float
    context: float
    max_running: int
    max_step_tokens: int
    num_pages: int

    def seconds(self, step: Step) -> float:
        """What a step takes."""
        decodes = int(((step.counts == 1) & (step.starts > 0)).sum())
        context = int((step.counts * (step.starts + step.counts / 2)).sum())
        prompts = len(step.token_ids) - decodes
        return self.fixed + self.decode * decodes + self.prompt * prompts + self.context * context


COSTS = {
    "CPU": Device(0.033, 8e-4, 2.2e-3, 1.5e-7, 64, 512, 1800),
    "H200 8B": Device(0.0065, 2e-5, 2.6e-5, 2e-10, 256, 8192, 55_000),
}


class Asked(NamedTuple):
    """A request to come."""

    at: float
    serial: int
    tenant: str
    prompt: int
    outputs: int


class Worker:
    """A scheduler whose steps take virtual time."""

    def __init__(self, device: Device) -> None:
        settings = {
            "page_size": 16,
            "num_pages": device.num_pages,
            "context_length": 16_384,
            "max_running": device.max_running,
            "max_step_tokens": device.max_step_tokens,
            "step_seconds": 0.25,
        }
        known = {field.name for field in fields(SchedulerConfig)}
        self.now = 0.0
        self._device = device
        config = SchedulerConfig(**{name: value for name, value in settings.items() if name in known})  # type: ignore[arg-type]
        self._scheduler = Scheduler(config, clock=lambda: self.now)
        self._coming: list[Asked] = []
        self._draw = random.Random(3)
        self._last: dict[int, float] = {}
        self._gaps: list[tuple[float, float]] = []
        self._tokens = 0
        self.asked: dict[int, Asked] = {}
        self.first: dict[int, float] = {}

    def ask(self, tenant: str, prompt: int, outputs: int, at: float | None = None) -> None:
        asked = Asked(self.now if at is None else at, len(self._coming) + len(self.asked), tenant, prompt, outputs)
        heapq.heappush(self._coming, asked)

    def run(self, until: float = float("inf"), ended: Callable[[], None] = lambda: None) -> None:
        """Runs until all requests have ended, or to a time."""
        scheduler = self._scheduler
        while (scheduler.has_work or self._coming) and self.now < until:
            if not scheduler.has_work:
                self.now = max(self.now, self._coming[0].at)
            while self._coming and self._coming[0].at <= self.now:
                self._add(heapq.heappop(self._coming))
            step = scheduler.schedule()
            if not len(step.rows):
                self.now += 1e-3
                continue
            self.now += self._device.seconds(step)
            answer = ModelOutput(step.number, [[7] * samples for samples in step.samples.tolist()])
            for output in scheduler.update(answer):
                if output.serial in self._last:
                    self._gaps.append((self.now, self.now - self._last[output.serial]))
                self.first.setdefault(output.serial, self.now)
                self._last[output.serial] = self.now
                self._tokens += len(output.token_ids)
                if output.finish_reason is not None:
                    ended()

    def waits(self, suits: Callable[[Asked], bool]) -> list[float]:
        """Seconds to the first tokens of requests."""
        return [at - self.asked[serial].at for serial, at in self.first.items() if suits(self.asked[serial])]

    def gaps(self, since: float = 0.0, until: float = float("inf")) -> list[float]:
        return [seconds for at, seconds in self._gaps if since < at <= until]

    @property
    def rate(self) -> float:
        """Prompt and output tokens a second."""
        return (self._tokens + sum(each.prompt for each in self.asked.values())) / self.now

    def _add(self, asked: Asked) -> None:
        prompt = [self._draw.randrange(100_000) for _ in range(asked.prompt)]
        sampling = SamplingParams(max_tokens=asked.outputs, ignore_eos=True)
        self._scheduler.add(Request(asked.serial, str(asked.serial), prompt, sampling, tenant=asked.tenant))
        self.asked[asked.serial] = asked


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def report(device: str, what: str, **figures: float) -> None:
    print(json.dumps({"device": device, "what": what, **{name: round(value, 1) for name, value in figures.items()}}))


def long(device: str, prompts: int, tokens: int, every: float) -> None:
    worker = Worker(COSTS[device])
    for _ in range(2):
        worker.ask("carol", 11, 4000)
    worker.run(until=1.0)
    began = worker.now
    for _ in range(prompts):
        worker.ask("alice", tokens, 8)
    for number in range(400):
        worker.ask("bob", 11, 2, began + every * (number + 1))
    worker.run(until=began + 400 * every)
    end = began + max(worker.waits(lambda asked: asked.tenant == "alice"))
    waits = worker.waits(lambda asked: asked.tenant == "bob" and asked.at < end)
    gaps = worker.gaps(began, end)
    report(
        device,
        f"long: {prompts} of {tokens} tokens",
        bob_p50=1e3 * percentile(waits, 0.5),
        bob_p99=1e3 * percentile(waits, 0.99),
        gap_p50=1e3 * percentile(gaps, 0.5),
        gap_max=1e3 * max(gaps),
        alice_last=1e3 * (end - began),
    )


def mix(count: int, longest: int, tenants: int) -> Iterator[tuple[str, int, int]]:
    draw = random.Random(2)
    for _ in range(count):
        prompt = draw.randint(256, longest) if draw.random() < 0.2 else draw.randint(16, 256)
        yield f"t{draw.randrange(tenants)}", prompt, draw.randint(16, 64)


def mixed(device: str, what: str, worker: Worker) -> None:
    shorts, longs = worker.waits(lambda asked: asked.prompt <= 256), worker.waits(lambda asked: asked.prompt > 256)
    gaps = worker.gaps()
    report(
        device,
        what,
        first_mean=1e3 * sum(shorts + longs) / len(shorts + longs),
        short_p50=1e3 * percentile(shorts, 0.5),
        short_p99=1e3 * percentile(shorts, 0.99),
        long_p50=1e3 * percentile(longs, 0.5),
        long_p99=1e3 * percentile(longs, 0.99),
        gap_p50=1e3 * percentile(gaps, 0.5),
        gap_p99=1e3 * percentile(gaps, 0.99),
        tokens_a_second=worker.rate,
    )


def open_loop(device: str, rate: float, count: int, longest: int, tenants: int) -> None:
    worker, draw, at = Worker(COSTS[device]), random.Random(5), 0.0
    for tenant, prompt, outputs in mix(count, longest, tenants):
        at += draw.expovariate(rate)
        worker.ask(tenant, prompt, outputs, at)
    worker.run()
    mixed(device, f"open: {rate} a second, {tenants} tenants", worker)


def closed_loop(device: str, clients: int, count: int, longest: int, tenants: int) -> None:
    worker, requests = Worker(COSTS[device]), mix(count, longest, tenants)

    def following() -> None:
        if (request := next(requests, None)) is not None:
            worker.ask(*request)

    for _ in range(clients):
        following()
    worker.run(ended=following)
    mixed(device, f"closed: {clients} clients, {tenants} tenants", worker)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for prompts in (1, 4):
        long("CPU", prompts, 8000, 0.3)
    for tenants in (3, 1):
        open_loop("CPU", 0.25, 300, 4000, tenants)
        open_loop("CPU", 0.4, 300, 4000, tenants)
        closed_loop("CPU", 16, 200, 4000, tenants)
    for prompts in (1, 8):
        long("H200 8B", prompts, 15_000, 0.05)
    for tenants in (3, 1):
        closed_loop("H200 8B", 64, 1500, 15_000, tenants)


if __name__ == "__main__":
    main()
