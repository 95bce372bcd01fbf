"""What scheduler and prefix cache cost the host, and what each policy's order is worth. No model: tokens are made up.

Times are CPU time of the one thread, so that what else the machine does matters little.

python benchmarks/bench_scheduler.py [--out results.json] [--steps 400]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from array import array
from pathlib import Path
from typing import Any

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.cache.pages import PageAllocator, PageTable
from sapwood_worker.core.cache.prefix import PrefixCache
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.core.scheduler.waiting import PolicyName
from sapwood_worker.records.step import ModelOutput, Step

PAGE = 16


def answer(planned: Step) -> ModelOutput:
    """What a runner would say, at no cost."""
    joined = [[7]] * len(planned.joins)
    return ModelOutput(planned.number, [[7] * samples for samples in planned.samples.tolist()] + joined)


def run(scheduler: Scheduler) -> None:
    while scheduler.has_work:
        scheduler.update(answer(scheduler.schedule()))


def step_time(cached_prefixes: int, prefix_tokens: int, running: int, steps: int) -> dict[str, float]:
    """Milliseconds a step of ``running`` decodes takes in schedule() and update(), with a cache of unused prefixes.

    One in 64 steps a request ends and another comes, which finds its prefix cached; events are noted as in production.
    """
    prompt = 512
    pages = cached_prefixes * (prefix_tokens // PAGE + 1) + running * ((prompt + 2 * steps) // PAGE + 8) + 4096
    scheduler = Scheduler(
        SchedulerConfig(
            page_size=PAGE,
            num_pages=pages,
            context_length=8192,
            max_running=running,
            max_waiting=100_000,
            max_step_tokens=8192,
            kv_events=True,
        )
    )
    chance = random.Random(1)
    serial = 0

    def add(tokens: int, max_tokens: int) -> None:
        nonlocal serial
        ids = [chance.randrange(100_000) for _ in range(tokens)]
        scheduler.add(Request(serial, f"r{serial}", ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True)))
        serial += 1

    for _ in range(cached_prefixes):
        add(prefix_tokens, 1)
        if scheduler.load().waiting_requests >= 64:
            run(scheduler)
    run(scheduler)
    for index in range(running):
        add(prompt, steps + 64 * (index + 1) if index < steps // 64 else 4 * steps)
    while scheduler.load().waiting_requests or any(r.remaining > 1 for r in scheduler._running.requests):
        scheduler.update(answer(scheduler.schedule()))
        scheduler.take_kv_events()
    plan, take, all_of_it = [], [], []
    for number in range(steps):
        if number % 64 == 0:
            add(prompt, 4 * steps)
            scheduler.abort(scheduler._running.requests[0].serial)
        begin = time.thread_time()
        planned = scheduler.schedule()
        middle = time.thread_time()
        result = answer(planned)
        resumed = time.thread_time()
        scheduler.update(result)
        scheduler.load()
        scheduler.take_kv_events()
        end = time.thread_time()
        plan.append(1e3 * (middle - begin))
        take.append(1e3 * (end - resumed))
        all_of_it.append(plan[-1] + take[-1])
    return {
        "cached_tokens": cached_prefixes * prefix_tokens,
        "running": running,
        "schedule_ms": round(statistics.median(plan), 3),
        "update_ms": round(statistics.median(take), 3),
        "step_ms": round(statistics.median(all_of_it), 3),
        "step_p95_ms": round(statistics.quantiles(all_of_it, n=20)[-1], 3),
    }


def match_and_insert(prompts: int, shared: int) -> dict[str, float]:
    """Prompts of 4 000 tokens a second through open, allocate, commit and close; ``shared`` of their tokens are cached."""
    pages = prompts * 260 + 600
    allocator = PageAllocator(pages)
    table = PageTable(1, 300)
    cache = PrefixCache(allocator, table, PAGE)
    chance = random.Random(2)
    prefix = [chance.randrange(100_000) for _ in range(shared)]
    tokens = [array("I", prefix + [chance.randrange(100_000) for _ in range(4000 - shared)]) for _ in range(prompts)]
    begin = time.thread_time()
    for index, each in enumerate(tokens):
        slot = table.open()
        found = cache.open(slot, f"r{index}", each, b"")
        cache.allocate(slot, 250 - found // PAGE)
        cache.commit(slot, each, 4000)
        cache.close(slot)
        table.close(slot)
    seconds = time.thread_time() - begin
    return {"prompt_tokens": 4000, "shared_tokens": shared, "prompts_per_second": round(prompts / seconds)}


def hit_rate(policy: PolicyName, seed: int = 3) -> float:
    """Share of prompt tokens found cached, with 48 prefixes of which the pool holds a few at a time."""
    chance = random.Random(seed)
    prefixes = [[chance.randrange(50_000) for _ in range(512)] for _ in range(48)]
    scheduler = Scheduler(
        SchedulerConfig(
            page_size=PAGE,
            num_pages=512,
            context_length=1024,
            max_running=8,
            max_waiting=4096,
            max_step_tokens=1024,
            policy=policy,
            starved_after=1_000_000,
        )
    )
    for serial in range(1200):
        prompt = chance.choice(prefixes) + [chance.randrange(50_000) for _ in range(32)]
        sampling = SamplingParams(max_tokens=chance.randint(1, 24), ignore_eos=True)
        scheduler.add(Request(serial, f"r{serial}", prompt, sampling, priority=chance.randrange(3)))
        # About as many come as are served, with a queue of some dozens.
        while scheduler.load().waiting_requests > 96:
            scheduler.update(answer(scheduler.schedule()))
    run(scheduler)
    load = scheduler.load()
    return load.cached_tokens / load.prompt_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="Write the results as JSON.")
    parser.add_argument("--steps", type=int, default=400, help="Steps to time for each size of cache.")
    options = parser.parse_args()
    steps = [step_time(*size, 256, options.steps) for size in ((0, 64), (10_000, 64), (10_000, 512))]
    inserts = [match_and_insert(300, shared) for shared in (0, 3200)]
    rates = {policy: round(hit_rate(policy), 3) for policy in ("fcfs", "lpm", "dfs-weight", "lof", "priority")}  # type: ignore[arg-type]
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "host_time_per_step": steps,
        "match_and_insert": inserts,
        "hit_rate": rates,
        "lpm_over_fcfs": round(rates["lpm"] / rates["fcfs"], 2),
    }
    print(json.dumps(results, indent=2))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
