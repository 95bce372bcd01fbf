"""The targets of the engine on one GPU, measured as a worker ships: every size is its own choice, no flag but the model.

One model in one process, built as a worker builds it: runner, tiers and scheduler, with whatever drafts by default.
``--flags`` gives it flags of the worker, for what the best of them would bring. The time to the first request counts from the
start of the process: with empty caches it is a cold start. Prints one JSON object a line; ``--table FILE`` prints a file of them
next to the targets, the figures of d3c93b6 and those of vLLM 0.24.0.

    benchmarks/gpu/targets.sh OUT.jsonl
"""

from __future__ import annotations

import time

BEGAN = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import shlex  # noqa: E402
import threading  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, NamedTuple  # noqa: E402

if TYPE_CHECKING:
    from bench_engine import Engine

SMALL, LARGE = "qwen3-0.6b", "llama-3.1-8b"
SHARED, COLD, OFFLINE = "64 sharing 8192, 128 own, 64 out", "cold start to the first token", "offline256"


class Target(NamedTuple):
    """A figure's goal, and what d3c93b6 and vLLM 0.24.0 reached (docs/design/figures-gpu.md); None: not known."""

    goal: float
    before: float
    vllm: float | None
    most: bool = False
    """Whether more is better."""


TARGETS = {
    (SMALL, SHARED): Target(0.25, 0.675, 0.954),
    (LARGE, SHARED): Target(0.65, 1.192, 1.391),
    (SMALL, "decode 256"): Target(8.6, 9.44, 10.6),
    (LARGE, "decode 256"): Target(14.5, 16.7, 18.4),
    (SMALL, OFFLINE): Target(29_000, 26_300, 23_550, most=True),
    (LARGE, OFFLINE): Target(12_000, 10_630, 9_995, most=True),
    (LARGE, "decode 32"): Target(5.7, 6.43, 6.36),
    (LARGE, COLD): Target(30, 124, None),
}
OWN, BEST = "none", "best"
"""What rows call the worker's own choice, and flags."""


class Row(NamedTuple):
    """A figure."""

    what: str
    value: float
    unit: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Folder with a config.json.")
    parser.add_argument("--flags", default="", help="Flags of the worker, in one argument (default: none).")
    parser.add_argument("--cold", action="store_true", help="The caches are empty: a cold start, and no more.")
    parser.add_argument("--divide", type=int, default=1, help="Takes all numbers by so much less: only to try it.")
    parser.add_argument("--table", type=Path, metavar="FILE.jsonl", help="Measures nothing: prints these.")
    arguments = parser.parse_args()
    if arguments.table is not None:
        print_table(arguments.table)
        return
    if arguments.model is None:
        parser.error("--model is missing")
    import torch
    from commit import measured_commit

    gpu = torch.cuda.is_available()
    about = {
        "engine": "sapwood",
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "commit": measured_commit(),
        "flags": BEST if arguments.flags else OWN,
        "given": arguments.flags,
    }
    for row in measure(arguments.model, arguments.flags, cold=arguments.cold, divide=arguments.divide):
        name = f"{arguments.model.name} {row.what}"
        print(json.dumps({"what": name, "value": round(row.value, 4), "unit": row.unit} | about), flush=True)


def measure(model: Path, flags: str, *, cold: bool, divide: int) -> Iterator[Row]:
    """All figures of one model."""
    from bench_engine import GREEDY, prompts_of
    from bench_prefixes import shared_prompts, warm
    from bench_prefixes import whole as all_of

    engine = worker_engine(model, flags)
    engine.generate([[5] * 100], [1])
    yield Row(COLD if cold else "start to the first token", time.perf_counter() - BEGAN, "s")
    info = engine.runner.info
    yield Row("max_running", info.max_running, "requests")
    yield Row("max_step_tokens", info.max_step_tokens, "tokens")
    yield Row("KV cache", info.num_pages * info.page_size, "tokens")
    while any(thread.name == "kernels" for thread in threading.enumerate()):
        time.sleep(0.1)  # what a cold start does not wait for
    yield Row("all kernels compiled", time.perf_counter() - BEGAN, "s")
    if cold:
        return
    engine.generate(prompts_of(4, 700 // divide, seed=1), [8] * 4)

    def decode(count: int) -> float:
        prompts = prompts_of(count, 1024 // divide, seed=count)
        first, whole = (min(engine.generate(prompts, [length] * count) for _ in range(2)) for length in (1, 129))
        return (whole - first) / 128 * 1000  # of two, as the first of their size are slow even where nothing compiles

    for count in (32, 256):
        yield Row(f"decode {count}", decode(max(1, count // divide)), "ms")
    prompts, outputs = offline(divide)
    yield Row(OFFLINE, sum(outputs) / engine.generate(prompts, outputs, GREEDY), "output tokens/s")
    seconds: dict[str, float] = {}
    for length in (4, 64):  # the first compiles what steps of this kind need
        warm(engine, 8192 // divide)
        seconds = all_of(engine, shared_prompts(64 // divide, 8192 // divide, 128), length)
    yield Row(SHARED, seconds["last"], "s")
    yield Row(f"{SHARED}: first tokens", seconds["first"], "s")
    load = engine.scheduler.load()
    yield Row(
        "drafts", load.drafted_tokens, "tokens"
    )  # random weights repeat themselves: drafts may be right more often
    yield Row("drafts that were right", load.accepted_tokens, "tokens")
    engine.close()


def offline(divide: int) -> tuple[list[list[int]], list[int]]:
    """The prompts of offline256 and the lengths of their outputs, as ``bench_engine`` draws them."""
    import random

    draw = random.Random(0)
    shapes = [(draw.randint(100, 1024) // divide, draw.randint(100, 1024) // divide) for _ in range(256 // divide)]
    return [[draw.randint(10, 99999) for _ in range(length)] for length, _ in shapes], [length for _, length in shapes]


def worker_engine(model: Path, flags: str) -> Engine:
    """The engine of a worker with these flags, in this process: dummy weights, no text and so no grammars."""
    from bench_engine import Engine

    from sapwood_common.settings.config import build_parser, given_settings, load_config
    from sapwood_worker.config import WorkerConfig
    from sapwood_worker.core.scheduler_process import build_scheduler, build_tiers
    from sapwood_worker.model.runner.factory import make_runner

    every = ["--model", str(model), "--load-format", "dummy", *shlex.split(flags)]
    given = build_parser(WorkerConfig, "worker", "").parse_args(every)
    config = load_config(WorkerConfig, given_settings(WorkerConfig, given), given.config)
    runner = make_runner(config)
    tiering = build_tiers(config, runner)
    scheduler = build_scheduler(config, runner.info, () if tiering is None else tiering.caches, None, runner.draft)
    return Engine.of(runner, scheduler)


def print_table(path: Path) -> None:
    """A file's figures next to the targets, and the share of the best flags' that the worker's own choice reaches."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    found = {(row["what"], row["flags"]): row["value"] for row in rows}
    print("| figure | no flags | target | | best flags | d3c93b6 | vLLM 0.24 |\n|---|---|---|---|---|---|---|")
    for (model, figure), target in TARGETS.items():
        name = f"{model} {figure}"
        own, best = found.get((name, OWN)), found.get((name, BEST))
        better: Callable[[float, float], bool] = float.__ge__ if target.most else float.__le__
        said = (
            "" if own is None else "met" if better(float(own), float(target.goal)) else f"{own / target.goal:.2f} of it"
        )
        cells = [_number(own), _number(target.goal), said, _number(best), _number(target.before), _number(target.vllm)]
        print(f"| {name} | {' | '.join(cells)} |")
    for (model, figure), target in TARGETS.items():
        own, best = (found.get((f"{model} {figure}", flags)) for flags in (OWN, BEST))
        if own is not None and best is not None:
            off = (best / own if target.most else own / best) - 1
            print(f"no flags against the best, {model} {figure}: {off:+.1%} (at most +3.0% asked)")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if value < 1000 else f"{value:.0f}"


if __name__ == "__main__":
    main()
