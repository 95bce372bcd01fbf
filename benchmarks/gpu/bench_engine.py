"""The engine alone on one GPU: scheduler, cache and runner in this process, random weights of the true shape, greedy.

Workloads as in the table of docs/performance.md: offline256, decode B, prefill k x n. Prints one JSON object a line.

    python benchmarks/gpu/bench_engine.py --model benchmarks/gpu/configs/qwen3-0.6b --only decode,offline
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import time
from pathlib import Path

import torch

from sapwood_worker.runner.model_runner import ModelRunner, RunnerOptions
from sapwood_worker.sampling.params import SamplingParams
from sapwood_worker.scheduler.config import SchedulerConfig
from sapwood_worker.scheduler.request import Request
from sapwood_worker.scheduler.scheduler import Scheduler


class Engine:
    def __init__(self, model: Path, max_running: int, max_step_tokens: int, kv_gb: float) -> None:
        started = time.perf_counter()
        self.runner = ModelRunner(
            RunnerOptions(
                model_path=model, load_format="dummy", device="cuda", dtype="bfloat16", context_length=16384,
                kv_cache_bytes=int(kv_gb * 2**30), max_running=max_running,
            )
        )  # fmt: skip
        torch.cuda.synchronize()
        self.start_seconds = time.perf_counter() - started
        info = self.runner.info
        self.scheduler = Scheduler(
            SchedulerConfig(
                page_size=info.page_size, num_pages=info.num_pages, context_length=info.context_length,
                max_running=max_running, max_step_tokens=max_step_tokens,
            )
        )  # fmt: skip
        self.count = 0

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> float:
        """Seconds from submission to the last token."""
        self.scheduler.flush_cache()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for prompt, length in zip(prompts, lengths, strict=True):
            self.count += 1
            self.scheduler.add(
                Request(self.count, str(self.count), prompt, SamplingParams(temperature=0.0, max_tokens=length))
            )
        while self.scheduler.has_work:
            self.scheduler.update(self.runner.execute(self.scheduler.schedule()))
        torch.cuda.synchronize()
        return time.perf_counter() - started

    def profile_decode(self, batch: int, steps: int) -> dict[str, float]:
        """Mean milliseconds of each part of a decode step on the host."""
        parts = {"schedule": 0.0, "execute": 0.0, "update": 0.0}
        for prompt in prompts_of(batch, 1024, seed=5):
            self.count += 1
            self.scheduler.add(
                Request(self.count, str(self.count), prompt, SamplingParams(temperature=0.0, max_tokens=steps + 40))
            )
        while self.scheduler.load().queued_tokens:
            self.scheduler.update(self.runner.execute(self.scheduler.schedule()))
        for step in range(steps + 10):
            if step == 10:
                parts = dict.fromkeys(parts, 0.0)
            t0 = time.perf_counter()
            planned = self.scheduler.schedule()
            t1 = time.perf_counter()
            result = self.runner.execute(planned)
            t2 = time.perf_counter()
            self.scheduler.update(result)
            parts["schedule"] += t1 - t0
            parts["execute"] += t2 - t1
            parts["update"] += time.perf_counter() - t2
        while self.scheduler.has_work:
            self.scheduler.update(self.runner.execute(self.scheduler.schedule()))
        return {name: seconds / steps * 1000 for name, seconds in parts.items()}


def prompts_of(count: int, length: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randint(10, 99999) for _ in range(length)] for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Folder with a config.json.")
    parser.add_argument("--only", default="decode,prefill,offline", help="Which workloads (default: all).")
    parser.add_argument("--kv-gb", type=float, default=60.0, help="KV cache in GiB (default: 60).")
    arguments = parser.parse_args()
    wanted = set(arguments.only.split(","))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()

    def report(what: str, value: float, unit: str) -> None:
        row = {"what": f"{arguments.model.name} {what}", "value": round(value, 4), "unit": unit, "engine": "sapwood"}
        print(json.dumps(row | {"device": torch.cuda.get_device_name(), "commit": commit}), flush=True)

    engine = Engine(arguments.model, max_running=256, max_step_tokens=8192, kv_gb=arguments.kv_gb)
    report("start-up", engine.start_seconds, "s")
    engine.generate(prompts_of(4, 700, seed=1), [8] * 4)
    if "decode" in wanted:
        for batch in (1, 64, 256):
            prompts = prompts_of(batch, 1024, seed=batch)
            engine.generate(prompts, [4] * batch)
            first = min(engine.generate(prompts, [1] * batch) for _ in range(2))
            whole = min(engine.generate(prompts, [129] * batch) for _ in range(2))
            report(f"decode {batch}", (whole - first) / 128 * 1000, "ms")
            for part, milliseconds in engine.profile_decode(batch, 50).items():
                report(f"decode {batch} host {part}", milliseconds, "ms")
    if "prefill" in wanted:
        for count, length in ((1, 8192), (16, 8192)):
            prompts = prompts_of(count, length, seed=count)
            engine.generate(prompts, [1] * count)
            seconds = min(engine.generate(prompts, [1] * count) for _ in range(3))
            report(f"prefill {count}x{length}", seconds * 1000, "ms")
            report(f"prefill {count}x{length} rate", count * length / seconds, "tokens/s")
    if "offline" in wanted:
        draw = random.Random(0)
        shapes = [(draw.randint(100, 1024), draw.randint(100, 1024)) for _ in range(256)]
        prompts = [[draw.randint(10, 99999) for _ in range(length)] for length, _ in shapes]
        outputs = [length for _, length in shapes]
        seconds = engine.generate(prompts, outputs)
        report("offline256", sum(outputs) / seconds, "output tokens/s")


if __name__ == "__main__":
    main()
