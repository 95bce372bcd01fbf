"""On one GPU: requests that begin with a copied page get the tokens of computing all of it, and how long the copy takes.

    python benchmarks/gpu/checks/check_part_pages.py --model benchmarks/gpu/configs/qwen3-0.6b

1. The kernel's copy equals torch's, for all layers, to the bit.
2. float32 and float32 with a float8 cache: prompts that part within a page, with and without a prefix cache, steps overlapped.
3. Milliseconds of the host and of the device for 1, 8 and 64 copied pages.

Prints one JSON object a line; exit status 1 if anything differs, but for a few texts over a float8 cache.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.options import RunnerOptions


def make(model: Path, dtype: Any, cache: Any) -> Any:
    return build_runner(
        RunnerOptions(
            model_path=model, load_format="dummy", device="cuda", dtype=dtype, kv_cache_dtype=cache, context_length=2048,
            num_pages=400, max_running=8,
        )
    )  # fmt: skip


def answers(runner: Any, *, cached: bool) -> tuple[list[list[int]], int]:
    """The answers to prompts that part within a page, and how many tokens came from pages that differ or are not full."""
    info, chance = runner.info, random.Random(3)
    scheduler = Scheduler(
        SchedulerConfig(
            windows=info.windows, page_size=info.page_size, num_pages=400, context_length=info.context_length,
            max_running=8, max_step_tokens=1024, prefix_cache=cached,
        )
    )  # fmt: skip
    shared = [chance.randint(10, 9_999) for _ in range(605)]
    received: dict[int, list[int]] = {}
    launched: deque[Any] = deque()
    for serial in range(24):
        prompt = shared[: chance.randint(1, 605)] + [chance.randint(10, 9_999) for _ in range(3)]
        sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        scheduler.add(Request(serial, str(serial), prompt, sampling))
        while scheduler.has_work and (serial % 4 == 3 or not serial):
            planned = scheduler.schedule()
            if planned:
                launched.append(runner.launch(planned))
            while len(launched) > (1 if planned else 0):
                for output in scheduler.update(launched.popleft().result()):
                    received.setdefault(output.serial, []).extend(output.token_ids)
        while launched:
            scheduler.update(launched.popleft().result())
    return [received[serial] for serial in range(24)], scheduler.load().part_page_tokens


def kernel_is_right(runner: Any) -> bool:
    for pages in runner._pool.pages.values():
        pages.view(torch.uint8).random_(0, 256)
    before = {layer: pages.view(torch.uint8).clone() for layer, pages in runner._pool.pages.items()}
    groups = range(len(runner._pool.counts))
    runner._copier.copy(
        np.array([(group, source, target) for group in groups for source, target in ((3, 9), (3, 11), (5, 2))])
    )
    torch.cuda.synchronize()
    for layer, content in before.items():
        content[[9, 11, 2]] = content[[3, 3, 5]]
        if not torch.equal(content, runner._pool.pages[layer].view(torch.uint8)):
            return False
    return True


def milliseconds(runner: Any, count: int) -> dict[str, float]:
    copies = np.array([(0, each, 200 + each) for each in range(count)])
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    runner._copier.copy(copies)
    torch.cuda.synchronize()
    began = time.perf_counter()
    start.record()
    for _ in range(50):
        runner._copier.copy(copies)
    host = time.perf_counter() - began
    end.record()
    torch.cuda.synchronize()
    return {"pages": count, "host ms": round(1000 * host / 50, 4), "device ms": round(start.elapsed_time(end) / 50, 4)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    model = parser.parse_args().model
    right = True
    for dtype, cache in (("float32", "auto"), ("float32", "fp8_e4m3"), ("bfloat16", "auto")):
        runner = make(model, dtype, cache)
        if dtype == "float32":
            (hits, tokens), (misses, _) = answers(runner, cached=True), answers(runner, cached=False)
            same = sum(a == b for a, b in zip(hits, misses, strict=True))
            row = {"what": f"{dtype}, cache {cache}: texts", "same": same, "of": len(hits), "part page tokens": tokens}
            # A float8 cache keeps rounded keys and values: sums that differ in a last bit round to other ones now and then.
            wanted = len(hits) if cache == "auto" else 3 * len(hits) // 4
            right = right and same >= wanted and tokens > 0
            print(json.dumps(row), flush=True)
        equal = kernel_is_right(runner)
        right = right and equal
        print(json.dumps({"what": f"{dtype}, cache {cache}: kernel equals torch", "value": equal}), flush=True)
        for count in (1, 8, 64):
            print(json.dumps({"what": f"{dtype}, cache {cache}: time"} | milliseconds(runner, count)), flush=True)
        del runner
        torch.cuda.empty_cache()
    sys.exit(not right)


if __name__ == "__main__":
    main()
