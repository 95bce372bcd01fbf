"""What a cached prefix is worth, by the tier it comes from: the demo model's time to first token on the CPU.

    python benchmarks/bench_tiers.py --store file --store mooncake --store nixl

For each store a prompt of 2000 tokens is asked for: computed (nothing has it yet), from the device, from the host (device
pages cleared), by a second worker that is started cold next to the first, and by the first one restarted, both from the store.
Medians over several prompts; ratios within a run.

``mooncake`` starts a mooncake_master and a client that lends it memory, on this machine, over TCP; ``nixl`` is its plugin POSIX.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import grpc
from report import Figure, Goal, print_figures, print_table

from sapwood.cli.model import fetch_packaged
from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_testing.worker.storage.mooncake_cluster import MooncakeCluster


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--store", action="append", choices=["file", "mooncake", "nixl"], help="repeatable [default: file]"
    )
    parser.add_argument("--tokens", type=int, default=2000, help="of the prefix [default: 2000]")
    parser.add_argument("--rounds", type=int, default=3, help="prompts for each figure [default: 3]")
    return parser.parse_args()


@contextlib.contextmanager
def killed_at_the_end(processes: list[subprocess.Popen[str]]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


@contextlib.contextmanager
def store_url(kind: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="sapwood-bench-") as folder:
        if kind == "mooncake":
            with MooncakeCluster(Path(folder), lend_bytes=2 << 30) as cluster:
                yield cluster.url
        else:
            yield f"{'nixl://posix' if kind == 'nixl' else 'file://'}{folder}?size_gb=8"


@contextlib.contextmanager
def worker(url: str) -> Iterator[worker_pb2_grpc.WorkerStub]:
    log = tempfile.NamedTemporaryFile("w+", prefix="sapwood-bench-")  # noqa: SIM115 -- closed with the worker
    flags = ("--port", "0", "--kv-cache-gb", "0.5", "--host-cache", "ratio=2", "--storage-prefetch", "wait_complete")
    command = [sys.executable, "-m", "sapwood_worker", *flags, "--storage", url, "--max-step-tokens", "2048"]
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)
    with log, killed_at_the_end([process]):
        while (found := re.search(r"listening on (\S+)", Path(log.name).read_text())) is None:
            assert process.poll() is None, Path(log.name).read_text()
            time.sleep(0.2)
        for line in Path(log.name).read_text().splitlines():
            if "third tier" in line:
                print("#", line.split("[-] ")[-1], file=sys.stderr)
        with grpc.insecure_channel(found[1]) as channel:
            yield worker_pb2_grpc.WorkerStub(channel)


def first_token(stub: worker_pb2_grpc.WorkerStub, prompt: list[int], cached: bool) -> float:
    """Seconds to the first token; that the prefix came from the cache, or did not, is checked."""
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=1)
    request = worker_pb2.WorkerGenerateRequest(
        request_id=f"r{time.monotonic_ns()}", token_ids=prompt, sampling=sampling
    )
    began = time.perf_counter()
    response = next(iter(stub.Generate(request)))
    seconds = time.perf_counter() - began
    found = response.usage.cached_tokens
    assert found >= len(prompt) - 17 if cached else found == 0, found
    return seconds


def prompts(count: int, tokens: int) -> list[list[int]]:
    return [[2, *((1000 + 7 * place + 131 * index) % 200_000 for place in range(tokens - 1))] for index in range(count)]


def clear(stub: worker_pb2_grpc.WorkerStub, *tiers: worker_pb2.CacheTier) -> None:
    stub.ClearCache(worker_pb2.ClearCacheRequest(tiers=tiers))


def wait_until_stored(stub: worker_pb2_grpc.WorkerStub) -> None:
    before = -1
    while True:
        [storage] = [
            tier
            for tier in stub.GetCacheStats(worker_pb2.GetCacheStatsRequest()).tiers
            if tier.tier == worker_pb2.CACHE_TIER_STORAGE
        ]
        if storage.bytes_in == before > 0:
            return
        before = storage.bytes_in
        time.sleep(1)


def measure(kind: str, arguments: argparse.Namespace) -> tuple[list[Figure], list[Goal]]:
    asked = prompts(arguments.rounds, arguments.tokens)
    seconds: dict[str, list[float]] = {}
    with store_url(kind) as url:
        with worker(url) as stub:
            first_token(stub, prompts(arguments.rounds + 1, arguments.tokens)[-1], cached=False)  # warms up
            for prompt in asked:
                seconds.setdefault("computed", []).append(first_token(stub, prompt, cached=False))
                seconds.setdefault("from the device", []).append(first_token(stub, prompt, cached=True))
                clear(stub, worker_pb2.CACHE_TIER_DEVICE)
                seconds.setdefault("from the host", []).append(first_token(stub, prompt, cached=True))
            wait_until_stored(stub)
            with worker(url) as second:
                first_token(second, [7] * 64, cached=False)  # warms up; what it has asked is in the store from now on
                for prompt in asked:
                    seconds.setdefault(f"from {kind}, second worker", []).append(
                        first_token(second, prompt, cached=True)
                    )
        with worker(url) as stub:
            first_token(stub, [8] * 64, cached=False)
            for prompt in asked:
                seconds.setdefault(f"from {kind}, restarted", []).append(first_token(stub, prompt, cached=True))
    figures = [
        Figure(f"TTFT of {arguments.tokens} tokens {what}", median(took), "s", "sapwood")
        for what, took in seconds.items()
    ]
    computed = median(seconds.pop("computed"))
    goals = [
        Goal(f"{what} against computed ({kind} attached)", median(took) / computed, most=0.25)
        for what, took in seconds.items()
    ]
    return figures, goals


def main() -> None:
    arguments = parse_arguments()
    fetch_packaged("demo-base")
    figures: list[Figure] = []
    goals: list[Goal] = []
    for kind in arguments.store or ["file"]:
        more_figures, more_goals = measure(kind, arguments)
        figures += more_figures
        goals += more_goals
    print_figures(figures)
    print_table(figures, goals)


if __name__ == "__main__":
    main()
