"""What a step costs the host on a GPU, without one: scheduler and runner with CUDA graphs that do nothing, 28 layers.

FlashInfer's wrappers and our decode kernel do nothing either, pinned memory is ordinary; all else is what a GPU worker runs.
Prints for each workload the median CPU time of this thread by part, the least of the whole, and a step's Python calls.

    python benchmarks/bench_host.py [--work decode-1,decode-64,prompt-128,prompt-1024]
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import importlib.machinery
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 28, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 1024,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000, "tie_word_embeddings": True,
    "hidden_act": "silu", "attention_bias": False, "eos_token_id": 1,
}  # fmt: skip
PARTS = ("schedule", "launch", "result", "update")


def pretend_a_gpu() -> None:
    """Puts what does nothing in the place of CUDA, FlashInfer and the decode kernel, for as long as the process lives."""
    torch.set_num_threads(1)
    cuda: Any = torch.cuda

    class Graph:
        capture_begin = capture_end = replay = pool = staticmethod(lambda *args, **given: None)

    class Event:
        record = synchronize = wait = staticmethod(lambda *args: None)

    cuda.CUDAGraph, cuda.Event, cuda.Stream = Graph, Event, lambda *args: mock.MagicMock()
    cuda.graph = cuda.stream = lambda *args, **given: contextlib.nullcontext()
    cuda.current_stream = cuda.graph_pool_handle = mock.MagicMock()
    torch.Tensor.pin_memory = torch.Tensor.clone  # type: ignore[assignment, method-assign]

    class Wrapper:
        plan = __init__ = lambda self, *args, **given: None

        def run(self, query: torch.Tensor, cache: object, out: torch.Tensor | None = None) -> torch.Tensor:
            return torch.zeros_like(query) if out is None else out

    flashinfer: Any = types.ModuleType("flashinfer")
    flashinfer.BatchPrefillWithPagedKVCacheWrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper = Wrapper
    flashinfer.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    sys.modules["flashinfer"] = flashinfer


def make_runner(folder: Path) -> Any:
    """A runner that takes itself for a GPU's."""
    from sapwood_kernels.attention import split_decode
    from sapwood_kernels.ops.cpu import CpuOps
    from sapwood_kernels.ops.cuda import CudaOps
    from sapwood_worker.model.attention import flashinfer
    from sapwood_worker.model.runner import builder, cuda_graph, piecewise_graphs
    from sapwood_worker.model.runner.options import RunnerOptions

    class Ops(CpuOps):
        asynchronous = captures = True
        to_device, fill, to_host, fence = CudaOps.to_device, CudaOps.fill, CudaOps.to_host, CudaOps.fence
        row_max = staticmethod(lambda logits: (torch.ones(len(logits)), torch.full((len(logits),), 7)))

    for where, name, instead in (
        (split_decode, "decode_attention", lambda query, *args, **given: torch.zeros_like(query)),
        (flashinfer, "gpu_refusal", lambda ops: None),
        (builder, "device_ops", lambda device: Ops(torch.device("cpu"))),
        (builder, "begin_kernels", lambda *args, **given: None),
        (piecewise_graphs, "worth_capturing", lambda *args, **given: 8192),
        (piecewise_graphs, "token_ladder", lambda largest: [128, 1024]),
        (cuda_graph, "ladder", lambda largest: [1, 2, 4, 64]),
    ):
        setattr(where, name, instead)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return builder.build_runner(
        RunnerOptions(
            folder, load_format="dummy", dtype="bfloat16", context_length=16384, num_pages=3000, max_running=256,
            max_step_tokens=8192, attention_backend="flashinfer",
        )
    )  # fmt: skip


class Host:
    """Runs steps, overlapped as a GPU worker does."""

    def __init__(self, runner: Any) -> None:
        from sapwood_worker.core.scheduler.config import SchedulerConfig
        from sapwood_worker.core.scheduler.scheduler import Scheduler

        info = runner.info
        self._runner = runner
        self.scheduler = Scheduler(
            SchedulerConfig(
                page_size=info.page_size,
                num_pages=info.num_pages,
                context_length=info.context_length,
                max_running=256,
                max_step_tokens=8192,
            )
        )
        self._launched: collections.deque[Any] = collections.deque()
        self._count = 0

    def add(self, length: int, tokens: int) -> None:
        from sapwood_common.contract.sampling import SamplingParams
        from sapwood_worker.core.scheduler.request import Request

        self._count += 1
        draw = random.Random(self._count)
        settings = SamplingParams(temperature=0.0, seed=self._count, max_tokens=tokens, ignore_eos=True)
        prompt = [draw.randint(10, 999) for _ in range(length)]
        self.scheduler.add(Request(self._count, str(self._count), prompt, settings))

    def step(self) -> list[float]:
        """Seconds of each of PARTS."""
        times = [time.thread_time()]
        planned = self.scheduler.schedule()
        times.append(time.thread_time())
        if planned:
            self._launched.append(self._runner.launch(planned))
        times.append(time.thread_time())
        answers = [self._launched.popleft().result() for _ in range(len(self._launched) - bool(planned))]
        times.append(time.thread_time())
        for answer in answers:
            self.scheduler.update(answer)
        times.append(time.thread_time())
        return [after - before for before, after in itertools.pairwise(times)]

    def finish(self) -> list[float]:
        steps = []
        while self.scheduler.has_work:
            steps.append(self.step())
        return [sum(part) for part in zip(*steps, strict=True)]

    def decode(self, batch: int) -> tuple[list[list[float]], int]:
        for _ in range(batch):
            self.add(200, 260)
        for _ in range(20):
            self.step()
        times = [self.step() for _ in range(200)]
        calls = count_calls(self.step)
        self.finish()
        return times, calls

    def prompt(self, length: int) -> tuple[list[list[float]], int]:
        times = []
        for _ in range(60):
            self.scheduler.flush_cache()
            self.add(length, 1)
            times.append(self.finish())
        self.add(length, 1)
        return times, count_calls(self.finish)


def count_calls(run: Any) -> int:
    """Python functions that are called."""
    counted = [0]

    def count(frame: object, event: str, argument: object) -> None:
        counted[0] += event == "call"

    sys.setprofile(count)
    run()
    sys.setprofile(None)
    return counted[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="decode-1,decode-64,prompt-128,prompt-1024", help="default: %(default)s")
    wanted = parser.parse_args().work.split(",")
    pretend_a_gpu()
    with tempfile.TemporaryDirectory() as folder:
        host = Host(make_runner(Path(folder)))
    gc.freeze()
    for work in wanted:
        kind, _, size = work.partition("-")
        times, calls = (host.decode if kind == "decode" else host.prompt)(int(size))
        medians = {
            part: round(1e6 * statistics.median(own), 1)
            for part, own in zip(PARTS, zip(*times, strict=True), strict=True)
        }
        least = round(1e6 * min(map(sum, times)), 1)
        print(json.dumps({"work": work, "us": medians, "least_us": least, "python_calls": calls}), flush=True)
    os._exit(0)  # Triton's modules, unloaded, complain


if __name__ == "__main__":
    main()
