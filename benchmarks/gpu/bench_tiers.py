"""The second tier on one GPU: bandwidth of load-back, what a hit is worth, what write-through costs, more than the pool holds.

    python benchmarks/gpu/bench_tiers.py --model benchmarks/gpu/configs/llama-3.1-8b

1. Bandwidth: a plain pinned copy in each direction, and a load-back and a store of a 16k-token prefix by the page kernels.
2. Time to first token of that prefix: computed, and loaded back.
3. Decode rate of 64 requests while their pages are written through, beside the rate without a second tier.
4. Conversations in turns whose pages together are three times the pool: output tokens/s with and without a second tier.

Random weights of the true shape, bf16. Prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sapwood_worker.cache.copies import Copies, PageCopy
from sapwood_worker.cache.hierarchical import HierarchicalCache
from sapwood_worker.cache.host_pages import HostPages
from sapwood_worker.runner.model_runner import ModelRunner, RunnerOptions
from sapwood_worker.sampling.params import SamplingParams
from sapwood_worker.scheduler.config import SchedulerConfig
from sapwood_worker.scheduler.output import SchedulerOutput
from sapwood_worker.scheduler.request import Request
from sapwood_worker.scheduler.scheduler import Scheduler

PREFIX = 16_000


class Engine:
    """A runner and schedulers over it, with and without the second tier."""

    def __init__(self, model: Path, pool_gb: float, ratio: float) -> None:
        self.runner = ModelRunner(
            RunnerOptions(
                model_path=model,
                load_format="dummy",
                device="cuda",
                dtype="bfloat16",
                context_length=PREFIX + 2048,
                kv_cache_bytes=int(pool_gb * 2**30),
                max_running=64,
                host_cache_ratio=ratio,
            )
        )
        assert self.runner.host_pool is not None
        self.count = 0
        self.use(tiered=True)

    def use(self, *, tiered: bool, num_pages: int | None = None) -> None:
        """Begins anew with empty tiers, over the first ``num_pages`` pages of the pool."""
        info = self.runner.info
        assert self.runner.host_pool is not None
        pages = num_pages or info.num_pages
        host = HostPages(self.runner.host_pool.num_pages)
        self.tiers = HierarchicalCache(host, pages, info.page_size) if tiered else None
        self.config = SchedulerConfig(
            page_size=info.page_size,
            num_pages=pages,
            context_length=info.context_length,
            max_running=64,
            max_step_tokens=8192,
        )
        self.scheduler = Scheduler(replace(self.config), self.tiers)

    def generate(self, prompts: list[list[int]], length: int) -> float:
        """Seconds from submission to the last token."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for prompt in prompts:
            self.count += 1
            sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            self.scheduler.add(Request(self.count, str(self.count), prompt, sampling))
        while self.scheduler.has_work:
            self._step()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def settle(self) -> None:
        """Waits for the copies to the host."""
        while self.scheduler.has_copies:
            self._step()

    def _step(self) -> None:
        planned = self.scheduler.schedule()
        if planned:
            self.scheduler.update(self.runner.execute(planned))

    def copy_seconds(self, copies: Copies) -> float:
        """What a step of copies alone takes."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.runner.execute(SchedulerOutput(0, np.zeros((1, 1), np.int32), [], copies))
        torch.cuda.synchronize()
        return time.perf_counter() - began


def prompt(chance: random.Random, tokens: int) -> list[int]:
    return [chance.randint(10, 99_999) for _ in range(tokens)]


def show(what: str, value: float, unit: str) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    row = {"what": what, "value": round(value, 4), "unit": unit, "engine": "sapwood"}
    print(json.dumps({**row, "device": torch.cuda.get_device_name(), "commit": commit.stdout.strip()}), flush=True)


def bandwidth(engine: Engine) -> None:
    host = engine.runner.host_pool
    assert host is not None
    pages = PREFIX // engine.runner.info.page_size
    size = pages * host.page_bytes
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    plain: dict[str, float] = {}
    for name, target, source in (("to the device", device, pinned), ("to the host", pinned, device)):
        seconds = []
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        plain[name] = size / min(seconds) / 1e9
        show(f"plain pinned copy {name}", plain[name], "GB/s")
    chance = np.random.default_rng(1)
    copy = PageCopy(
        0,
        chance.permutation(engine.runner.info.num_pages)[:pages].astype(np.int32),
        chance.permutation(host.num_pages)[:pages].astype(np.int32),
    )
    for name, copies in (("to the host", Copies(store=copy)), ("to the device", Copies(load=copy))):
        rate = size / min(engine.copy_seconds(copies) for _ in range(5)) / 1e9
        show(f"page kernel {name}, {pages} scattered pages", rate, "GB/s")
        show(f"page kernel over plain copy {name}", rate / plain[name], "ratio")


def first_token(engine: Engine) -> None:
    chance = random.Random(1)
    engine.use(tiered=True)
    engine.generate([prompt(chance, PREFIX)], 1)  # warms up
    asked = [prompt(chance, PREFIX) for _ in range(3)]
    computed = [engine.generate([each], 1) for each in asked]
    engine.settle()
    engine.scheduler.flush_cache()
    loaded = [engine.generate([each], 1) for each in asked]
    assert engine.tiers is not None and engine.tiers.counters.host_hits >= 3 * (PREFIX // 16 - 1)
    show(f"TTFT of {PREFIX} tokens, computed", sorted(computed)[1] * 1e3, "ms")
    show(f"TTFT of {PREFIX} tokens, from the host", sorted(loaded)[1] * 1e3, "ms")
    show("from the host over computed", sorted(loaded)[1] / sorted(computed)[1], "ratio")


def write_through_cost(engine: Engine) -> None:
    rates = {}
    for tiered in (False, True, False, True):
        engine.use(tiered=tiered)
        chance = random.Random(2)
        prompts = [prompt(chance, 1024) for _ in range(64)]
        short = engine.generate(prompts, 1)
        engine.settle()
        engine.scheduler.flush_cache()
        if engine.tiers is not None:
            engine.tiers.host.clear()
        rates[tiered] = 64 * 256 / (engine.generate(prompts, 257) - short)
        engine.settle()
    show("decode 64, no second tier", rates[False], "tokens/s")
    show("decode 64, write-through", rates[True], "tokens/s")
    show("write-through over none", rates[True] / rates[False], "ratio")


def conversations(engine: Engine) -> None:
    page_size = engine.runner.info.page_size
    pages = 48 * 2048 // page_size
    rates = {}
    for tiered in (False, True):
        engine.use(tiered=tiered, num_pages=pages)
        chance = random.Random(3)
        talks = [prompt(chance, 1024) for _ in range(72)]
        seconds = 0.0
        for _ in range(4):  # 72 conversations of up to 4 k tokens: three times the pool
            for start in range(0, len(talks), 8):
                seconds += engine.generate(talks[start : start + 8], 64)
            talks = [talk + prompt(chance, 1024) for talk in talks]
        rates[tiered] = 72 * 4 * 64 / seconds
        engine.settle()
    show("conversations three times the pool, device alone", rates[False], "tokens/s")
    show("conversations three times the pool, second tier", rates[True], "tokens/s")
    show("second tier over device alone", rates[True] / rates[False], "ratio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory; its config.json is enough")
    parser.add_argument("--pool-gb", type=float, default=16.0, help="device pool in GiB [default: 16]")
    parser.add_argument("--ratio", type=float, default=3.0, help="host pages for each device page [default: 3]")
    arguments = parser.parse_args()
    engine = Engine(arguments.model, arguments.pool_gb, arguments.ratio)
    bandwidth(engine)
    first_token(engine)
    write_through_cost(engine)
    conversations(engine)


if __name__ == "__main__":
    main()
