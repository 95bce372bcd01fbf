"""The second tier on one GPU: bandwidth of load-back, what a hit is worth, what write-through costs, more than the pool holds.

    python benchmarks/gpu/bench_tiers.py --model benchmarks/gpu/configs/llama-3.1-8b

1. Bandwidth: a plain pinned copy in each direction, and a load-back and a store of a 16k-token prefix.
2. Time to first token of that prefix: computed, and loaded back.
3. 64 requests of 1024 tokens and 257 of answer, all pages written through, and the same without a second tier: decode rate
   from the step on in which all of them decode, and the whole.
4. Ten conversations over a document of 12k tokens each, six turns of a 192-token question and a 64-token answer, everybody
   asking in each turn; together three times the pool. Output tokens/s with and without a second tier.

Random weights of the true shape, bf16, steps overlapped as in the worker. Prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from commit import measured_commit

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.steps import step_for
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.cache.host import HostPages
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.model_runner import LaunchedStep
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.records.step import Copies, PageCopy

PREFIX = 16_000


class Engine:
    """A runner and schedulers over it, with and without the second tier."""

    def __init__(self, model: Path, pool_gb: float, host_gb: float) -> None:
        self.runner = build_runner(
            RunnerOptions(
                model_path=model,
                load_format="dummy",
                device="cuda",
                dtype="bfloat16",
                context_length=PREFIX + 2048,
                kv_cache_bytes=int(pool_gb * 2**30),
                max_running=64,
                host_cache_gb=host_gb,
            )
        )
        assert self.runner.host_pool is not None
        self.count = 0
        self.use(tiered=True)

    def use(self, *, tiered: bool, num_pages: int | None = None) -> None:
        """Begins again with empty tiers, over the first ``num_pages`` pages of the pool."""
        info = self.runner.info
        assert self.runner.host_pool is not None
        pages = num_pages or info.num_pages
        host = HostPages(self.runner.host_pool.num_pages)
        self.tiers = HierarchicalCache(host, pages, info.page_size) if tiered else None
        self.config = SchedulerConfig(
            windows=info.windows,
            page_size=info.page_size,
            num_pages=pages,
            context_length=info.context_length,
            max_running=64,
            max_step_tokens=8192,
        )
        self.scheduler = Scheduler(replace(self.config), self.tiers)

    def generate(self, prompts: list[list[int]], length: int) -> tuple[float, float]:
        """Seconds from submission to the last token, and from the first step on in which all of them decoded."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        decoding = 0.0
        for prompt in prompts:
            self.count += 1
            sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            self.scheduler.add(Request(self.count, str(self.count), prompt, sampling))
        launched: deque[LaunchedStep] = deque()
        while self.scheduler.has_work:
            planned = self.scheduler.schedule()
            if planned:
                launched.append(self.runner.launch(planned))
            while len(launched) > (1 if planned else 0):
                outputs = self.scheduler.update(launched.popleft().result())
                if not decoding and len(outputs) == len(prompts):
                    decoding = time.perf_counter()
        for step in launched:  # planned before the end was known
            self.scheduler.update(step.result())
        torch.cuda.synchronize()
        ended = time.perf_counter()
        return ended - began, ended - decoding

    def settle(self) -> None:
        """Waits for the copies to the host."""
        while self.scheduler.has_copies:
            planned = self.scheduler.schedule()
            if planned:
                self.scheduler.update(self.runner.execute(planned))

    def copy_seconds(self, copies: Copies) -> float:
        """What a step of copies alone takes."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.runner.execute(step_for(self.runner.info, 0, np.zeros((1, 1), np.int32), [], copies))
        torch.cuda.synchronize()
        return time.perf_counter() - began


def prompt(chance: random.Random, tokens: int) -> list[int]:
    return [chance.randint(10, 99_999) for _ in range(tokens)]


def show(what: str, value: float, unit: str) -> None:
    row = {"what": what, "value": round(value, 4), "unit": unit, "engine": "sapwood"}
    print(json.dumps({**row, "device": torch.cuda.get_device_name(), "commit": measured_commit()}), flush=True)


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
        show(f"{pages} scattered pages {name}", rate, "GB/s")
        show(f"pages over plain copy {name}", rate / plain[name], "ratio")


def first_token(engine: Engine) -> None:
    host = engine.runner.host_pool
    assert host is not None
    chance = random.Random(1)
    engine.use(tiered=True)
    engine.generate([prompt(chance, PREFIX)], 1)  # warms up
    asked = [prompt(chance, PREFIX) for _ in range(3)]
    computed = [engine.generate([each], 1)[0] for each in asked]
    engine.settle()
    engine.scheduler.clear_device()
    engine.generate([asked[0]], 1)  # warms up
    engine.settle()
    engine.scheduler.clear_device()
    assert engine.tiers is not None
    before = replace(engine.tiers.counters)
    loaded = [engine.generate([each], 1)[0] for each in asked]
    engine.settle()
    hits = engine.tiers.counters.host_hits - before.host_hits
    assert hits == 3 * ((PREFIX - 1) // engine.runner.info.page_size), hits
    seconds = engine.tiers.counters.load_seconds - before.load_seconds
    show(f"TTFT of {PREFIX} tokens, computed", sorted(computed)[1] * 1e3, "ms")
    show(f"TTFT of {PREFIX} tokens, from the host", sorted(loaded)[1] * 1e3, "ms")
    show("from the host over computed", sorted(loaded)[1] / sorted(computed)[1], "ratio")
    show("load-back within these requests", hits * host.page_bytes / seconds / 1e9, "GB/s")


def write_through_cost(engine: Engine) -> None:
    taken: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    chance = random.Random(2)
    prompts = [prompt(chance, 1024) for _ in range(64)]
    for tiered in (False, True) * 3:
        engine.use(tiered=tiered)
        taken[tiered].append(engine.generate(prompts, 257))
        engine.settle()
        if engine.tiers is not None:
            show("pages written through", engine.tiers.counters.stored, "pages")
            assert engine.tiers.counters.stored >= 64 * 64
    for part, name in ((1, "decode"), (0, "whole")):
        plain, through = (min(each[part] for each in taken[tiered]) for tiered in (False, True))
        show(f"64 requests, {name}, no second tier", plain, "s")
        show(f"64 requests, {name}, write-through", through, "s")
        show(f"write-through costs, {name}", through / plain - 1, "share")


def conversations(engine: Engine) -> None:
    count, turns, document, question, answer = 10, 6, 12_288, 192, 64
    total = count * (document + turns * (question + answer))
    pages = total // 3 // engine.runner.info.page_size
    rates = {}
    for tiered in (True, False):
        engine.use(tiered=tiered, num_pages=pages)
        chance = random.Random(3)
        talks = [prompt(chance, document + question) for _ in range(count)]
        seconds = 0.0
        for _ in range(turns):
            seconds += engine.generate(talks, answer)[0]
            # The answers are as long as these, and random weights say nothing of interest.
            talks = [talk + prompt(chance, answer + question) for talk in talks]
        rates[tiered] = count * turns * answer / seconds
        engine.settle()
        name = "second tier" if tiered else "device alone"
        show(f"conversations three times the pool, {name}", rates[tiered], "tokens/s")
        if engine.tiers is not None:
            show("their hits in the device's pages", engine.tiers.counters.device_hits, "pages")
            show("their hits in the host's pages", engine.tiers.counters.host_hits, "pages")
    show("second tier over device alone", rates[True] / rates[False], "ratio")


def touch(gigabytes: float) -> None:
    """Some virtual machines are given their memory as it is used; until then it does not count as free."""

    blocks = [np.empty(1 << 30, np.uint8) for _ in range(int(gigabytes) + 1)]
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda block: block.fill(1), blocks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory; its config.json is enough")
    parser.add_argument("--pool-gb", type=float, default=12.0, help="device pool in GiB [default: 12]")
    parser.add_argument("--host-gb", type=float, default=20.0, help="host pool in GiB [default: 20]")
    arguments = parser.parse_args()
    began = time.perf_counter()
    touch(1.2 * arguments.host_gb + 4)
    print(f"touched memory in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    began = time.perf_counter()
    engine = Engine(arguments.model, arguments.pool_gb, arguments.host_gb)
    print(f"started in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    for part in (bandwidth, first_token, write_through_cost, conversations):
        try:
            part(engine)
        except Exception:  # the other parts are worth having
            print(json.dumps({"what": part.__name__, "error": traceback.format_exc()[-2500:]}), flush=True)


if __name__ == "__main__":
    main()
