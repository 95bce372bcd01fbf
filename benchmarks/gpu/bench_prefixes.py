"""Requests that share a prefix, and such that share nothing, with shared-prefix attention and without: the engine alone, one GPU.

Two engines with the same random weights take turns, so that both see the same card. Prints one JSON object a line.

    python benchmarks/gpu/bench_prefixes.py --model benchmarks/gpu/configs/llama-3.1-8b
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from bench_engine import GREEDY, Engine, prompts_of
from commit import measured_commit
from step_profile import record


def shared_prompts(count: int, shared: int, own: int) -> list[list[int]]:
    """Prompts that have their first tokens in common."""
    [prefix] = prompts_of(1, shared, seed=shared)
    draw = random.Random(count)
    return [[*prefix, *(draw.randint(10, 99999) for _ in range(own))] for _ in range(count)]


def warm(engine: Engine, shared: int) -> None:
    """Brings the prefix, and nothing else, into the cache."""
    engine.generate([shared_prompts(1, shared, 1)[0]], [1])


def whole(engine: Engine, prompts: list[list[int]], length: int) -> dict[str, float]:
    """Seconds from submission to the first token of all, and to the last; what the cache holds stays."""
    engine.wait()
    started = time.perf_counter()
    engine.add(prompts, [length] * len(prompts), GREEDY)
    begun: set[int] = set()
    first = 0.0
    for outputs in engine.steps():
        begun.update(output.serial for output in outputs)
        if not first and len(begun) == len(prompts):
            first = time.perf_counter() - started
    engine.wait()
    return {"first": first, "last": time.perf_counter() - started}


def steady(engine: Engine, prompts: list[list[int]], steps: int) -> dict[str, float]:
    """Mean milliseconds of a step in which all decode."""
    engine.add(prompts, [steps + 40] * len(prompts), GREEDY)
    decoding = (None for outputs in engine.steps() if len(outputs) == len(prompts))
    for _ in range(20):
        next(decoding)
    found = engine.time_steps(lambda: next(decoding), steps)
    for _ in decoding:
        pass
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Folder with a config.json.")
    parser.add_argument("--batches", default="8,64,256", help="Requests (default: 8,64,256).")
    parser.add_argument("--shared", type=int, default=4096, help="Tokens that they share (default: 4096).")
    parser.add_argument("--alone", type=int, default=256, help="Tokens of prompts that share nothing (default: 256).")
    parser.add_argument("--kv-gb", type=float, default=42.0, help="KV cache of each engine in GiB (default: 42).")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto", help="Of the KV cache.")
    parser.add_argument("--profile", action="store_true", help="Also prints the device's time by part and kernel.")
    arguments = parser.parse_args()
    device, commit = torch.cuda.get_device_name(), measured_commit()
    variant = arguments.model.name + ("+fp8-kv" if arguments.kv_cache_dtype != "auto" else "")

    def report(what: str, values: dict[str, float], unit: str) -> None:
        for mode, value in values.items():
            row = {"what": f"{variant} {what}", "sharing": mode, "value": round(value, 4), "unit": unit}
            print(json.dumps(row | {"engine": "sapwood", "device": device, "commit": commit}), flush=True)

    engines = {
        mode: Engine(
            arguments.model, max_running=256, max_step_tokens=8192, kv_gb=arguments.kv_gb,
            kv_cache_dtype=arguments.kv_cache_dtype, shared_prefix_attention=mode == "on",
        )
        for mode in ("off", "on")
    }  # fmt: skip
    report("start-up", {mode: engine.start_seconds for mode, engine in engines.items()}, "s")
    for engine in engines.values():
        engine.generate(prompts_of(4, 700, seed=1), [8] * 4)
    batches = list(map(int, arguments.batches.split(",")))
    for batch in batches:
        steps: dict[str, dict[str, float]] = {}
        for mode, engine in engines.items():
            warm(engine, arguments.shared)
            steps[mode] = steady(engine, shared_prompts(batch, arguments.shared, 128), 40)
        for part in ("steady", "host"):
            report(f"decode {batch} sharing {arguments.shared} {part}", {m: s[part] for m, s in steps.items()}, "ms")
    for batch in batches:
        prompts = prompts_of(batch, arguments.alone, seed=batch)
        turns: dict[str, list[float]] = {"off": [], "on": []}
        for mode in ("off", "on", "on", "off"):
            engines[mode].scheduler.flush_cache()
            turns[mode].append(steady(engines[mode], prompts, 40)["steady"])
        report(
            f"decode {batch} of {arguments.alone} sharing nothing",
            {mode: sum(each) / 2 for mode, each in turns.items()},
            "ms",
        )
    seconds: dict[str, dict[str, float]] = {}
    for mode, engine in engines.items():
        for length in (4, 64):  # the first compiles what steps of this kind need
            warm(engine, 8192)
            seconds[mode] = whole(engine, shared_prompts(64, 8192, 128), length)
    report("64 requests sharing 8192, 128 of their own, 64 out", {m: s["last"] for m, s in seconds.items()}, "s")
    report("the same, to the first token of all", {m: s["first"] for m, s in seconds.items()}, "s")
    if arguments.profile:
        engine = engines["on"]
        for length, name in ((1, "the prompts' step"), (64, "all steps")):
            warm(engine, 8192)
            prompts = shared_prompts(64, 8192, 128)
            parts, kernels = record(lambda p=prompts, n=length: whole(engine, p, n))  # type: ignore[misc]
            for part, microseconds in parts.items():
                report(f"64 sharing 8192, {name}, profile: {part}", {"on": microseconds / 1e3}, "ms")
            for kernel, microseconds in list(kernels.items())[:15]:
                print(f"#   {microseconds / 1e3:9.3f} ms {kernel[:120]}", flush=True)
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
