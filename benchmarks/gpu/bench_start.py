"""Where a start's seconds continue a GPU: imports, FlashInfer's compilers by file, Triton's by kernel, graphs, the first request.

Whether it is a cold start is for the caches to say: ``start.sh`` runs it with empty ones, with full ones, and with an archive.
Prints one JSON object a line; ``begin`` and ``seconds`` count from the process's own beginning.

    benchmarks/gpu/start.sh OUT.jsonl
"""

from __future__ import annotations

import time

BEGAN = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import threading  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

Kernel = tuple[str, float, bool]
"""A kernel of Triton's: its name, the seconds that it took, and whether it came from the cache."""


def now() -> float:
    return round(time.perf_counter() - BEGAN, 2)


class Timeline:
    """Says what is done, by the name of the run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def say(self, phase: str, **values: Any) -> None:
        print(json.dumps({"what": "start", "run": self._name, "phase": phase} | values), flush=True)

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        begin = now()
        try:
            yield
        finally:
            self.say(phase, begin=begin, seconds=round(now() - begin, 2))

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Has every call of a function said."""
        whole = getattr(owner, name)

        def watched(*args: Any, **named: Any) -> Any:
            with self.span(phase):
                return whole(*args, **named)

        setattr(owner, name, watched)


def listen() -> list[Kernel]:
    """Gets every kernel that Triton compiles or finds from now on."""
    from triton import knobs

    heard: list[Kernel] = []

    def hear(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        heard.append((getattr(src, "name", "?"), times.total / 1e6, cache_hit))

    knobs.compilation.listener = hear
    return heard


def tell_compilers(timeline: Timeline, kernels: list[Kernel]) -> None:
    """What FlashInfer's compilers did, from ninja's logs, and Triton's."""
    workspace = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home()))
    for log in (workspace / ".cache" / "flashinfer").rglob(".ninja_log"):
        for line in log.read_text().splitlines()[1:]:
            begin, end, _, target, *_ = line.split("\t")
            seconds = (int(end) - int(begin)) / 1e3
            timeline.say("nvcc", file="/".join(target.split("/")[-2:]), after=int(begin) / 1e3, seconds=seconds)
    made = [kernel for kernel in kernels if not kernel[2]]
    for name in dict.fromkeys(name for name, _, _ in made):
        own = [seconds for other, seconds, _ in made if other == name]
        timeline.say("triton", kernel=name, variants=len(own), seconds=round(sum(own), 2), slowest=round(max(own), 2))
    total = round(sum(seconds for _, seconds, _ in made), 1)
    timeline.say("triton in all", compiled=len(made), seconds=total, from_cache=len(kernels) - len(made))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Folder with a config.json.")
    parser.add_argument("--name", default="start", help="What to call the run.")
    parser.add_argument("--archive", type=Path, help="Kernels are taken from it first.")
    parser.add_argument("--pack", type=Path, help="Afterwards the caches are packed into this archive.")
    parser.add_argument("--wait", action="store_true", help="As the worker's --kernels-wait.")
    arguments = parser.parse_args()
    timeline = Timeline(arguments.name)
    with timeline.span("import torch"):
        import torch
    with timeline.span("CUDA context"):
        torch.zeros(1, device="cuda")
    with timeline.span("import triton"):
        kernels = listen()
    with timeline.span("import sapwood"):
        import bench_engine

        from sapwood_kernels.compiled.archive import pack
        from sapwood_kernels.compiled.early import EarlyBuild
        from sapwood_kernels.compiled.places import triton_cache
        from sapwood_worker.model.compiled_kernels import take_kernels, this_machine
        from sapwood_worker.model.runner import builder
        from sapwood_worker.model.runner.ahead_of_time import AheadOfTimeKernels
        from sapwood_worker.model.runner.graphs import cuda_graph
    if arguments.archive is not None:
        with timeline.span("archive taken"):
            take_kernels(arguments.archive)
    timeline.watch(builder, "load_model", "weights, made up")
    timeline.watch(AheadOfTimeKernels, "compile", "rehearsal, and Triton's compilers side by side")
    timeline.watch(EarlyBuild, "wait", "waiting for FlashInfer's compilers")
    timeline.watch(EarlyBuild, "_run", "FlashInfer's compilers, along with the rest")
    timeline.watch(builder, "measure_pool_bytes", "memory measured, with the largest graphs")
    timeline.watch(builder, "compute_trial", "trial of a step")
    timeline.watch(cuda_graph.DecodeGraphs, "_capture_all", "decode graphs of a ladder")
    timeline.watch(builder._Builder, "_build_pieces", "prompts' graphs")
    with timeline.span("engine"):
        engine = bench_engine.Engine(
            arguments.model, max_running=256, max_step_tokens=8192, kv_gb=0.0, kernels_wait=arguments.wait
        )
    with timeline.span("first request"):
        engine.generate([[5] * 100], [2])
    timeline.say("ready", at=now())
    seconds = [engine.generate([[5 + i for i in range(8192)]], [1]) for _ in range(2)]
    timeline.say("a prompt of 8192 tokens at once", seconds=round(min(seconds), 4))
    while any(thread.name == "kernels" for thread in threading.enumerate()):
        time.sleep(0.1)
    seconds = [engine.generate([[5 + i for i in range(8192)]], [1]) for _ in range(3)]
    timeline.say("a prompt of 8192 tokens, all compiled", at=now(), seconds=round(min(seconds), 4))
    tell_compilers(timeline, kernels)
    if arguments.pack is not None:
        workspace = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home()))
        built = list(workspace.glob(".cache/flashinfer/*/*/cached_ops"))
        with timeline.span("packed"):
            count = pack(arguments.pack, this_machine(), triton_cache(), built[0] if built else Path("none"))
        size = round(arguments.pack.stat().st_size / 1e6, 1)
        timeline.say("archive", triton=count.triton, flashinfer=count.flashinfer, megabytes=size)
    engine.close()


if __name__ == "__main__":
    main()
