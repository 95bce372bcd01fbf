"""What a step costs the host on a GPU, without one: scheduler and runner with CUDA graphs that do nothing, 28 layers.

FlashInfer's wrappers and our decode kernel do nothing either, pinned memory is ordinary; all else is what a GPU worker runs.
Prints for each workload the median CPU time of this thread by part, the least of the whole, a step's Python calls, and its calls
of torch's operations, each of which a GPU's host launches or makes pinned memory for.

    python benchmarks/bench_host.py [--work decode-1,decode-64,prompt-128,prompt-1024,draft-7]

``draft-K``: one request, of which a head of EAGLE-3 drafts K tokens in each step, all of them right.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import importlib.machinery
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
from torch.utils._python_dispatch import TorchDispatchMode
from walking_weights import eagle_head

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
        elapsed_time, query = staticmethod(lambda *args: 0.3), staticmethod(lambda: True)

    cuda.CUDAGraph, cuda.Stream = Graph, lambda *args: mock.MagicMock()
    cuda.Event = lambda enable_timing=False: Event()
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


def make_runner(folder: Path, *, headed: bool = False) -> Any:
    """A runner that takes itself for a GPU's; ``headed``: with a head that drafts."""
    from sapwood_kernels.attention import split_decode, tiled_prefill
    from sapwood_kernels.ops.cpu import CpuOps
    from sapwood_kernels.ops.cuda import CudaOps
    from sapwood_worker.model.attention import flashinfer, triton
    from sapwood_worker.model.runner import builder
    from sapwood_worker.model.runner.graphs import cuda_graph, piecewise_graphs
    from sapwood_worker.model.runner.options import RunnerOptions

    class Ops(CpuOps):
        asynchronous = captures = True
        to_device, fill, to_host, fence = CudaOps.to_device, CudaOps.fill, CudaOps.to_host, CudaOps.fence
        moment = CudaOps.moment
        row_max = staticmethod(lambda logits: (torch.ones(len(logits)), torch.full((len(logits),), 7)))
        draw_rows = staticmethod(lambda logits, *others: (torch.full((len(logits),), 7),) * 2)

    zeros = lambda query, *args, **given: torch.zeros_like(query)  # noqa: E731
    for where, name, instead in (
        (tiled_prefill, "prefill_attention", zeros),
        (split_decode, "decode_attention", zeros),
        (flashinfer, "gpu_refusal", lambda ops: None),
        (triton, "gpu_refusal", lambda ops: None),
        (builder, "device_ops", lambda device: Ops(torch.device("cpu"))),
        (builder, "begin_kernels", lambda *args, **given: None),
        (piecewise_graphs, "worth_capturing", lambda *args, **given: 8192),
        (piecewise_graphs, "token_ladder", lambda largest: [128, 1024]),
        (cuda_graph, "ladder", lambda largest: [1, 2, 4, 8, 64]),
    ):
        setattr(where, name, instead)
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG | ({"tie_word_embeddings": False} if headed else {})))
    options = RunnerOptions(
        folder, load_format="dummy", dtype="bfloat16", context_length=16384, num_pages=3000, max_running=256,
        max_step_tokens=8192, attention_backend="flashinfer",
    )  # fmt: skip
    return builder.build_headed_runner(options, eagle_head(folder)) if headed else builder.build_runner(options)


class Host:
    """Runs steps, overlapped as a GPU worker does.

    Args:
        runner: The runner.
        drafted: Tokens of each draft, of a runner whose head drafts.
    """

    def __init__(self, runner: Any, drafted: int = 0) -> None:
        from sapwood_worker.core.scheduler.config import SchedulerConfig
        from sapwood_worker.core.scheduler.scheduler import Scheduler
        from sapwood_worker.core.scheduler.speculation import speculation
        from sapwood_worker.core.scheduler.speculation.model_drafter import DraftModel

        info = runner.info
        self._runner = runner
        self._now = 0.0
        drafter = DraftModel(runner.draft, info.context_length, 2048, "eagle", 1) if drafted else None
        speculation.MOST_DRAFTED = drafted or speculation.MOST_DRAFTED
        self.scheduler = Scheduler(
            SchedulerConfig(
                page_size=info.page_size,
                num_pages=info.num_pages,
                context_length=info.context_length,
                max_running=256,
                max_step_tokens=8192,
                speculate="auto" if drafted else "off",
            ),
            clock=lambda: self._now,
            drafter=drafter,
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
        spent = dict.fromkeys(PARTS, 0.0)

        def timed(part: str, call: Any, *given: Any) -> Any:
            began = time.thread_time()
            found = call(*given)
            spent[part] += time.thread_time() - began
            return found

        def take(keep: int) -> None:
            while len(self._launched) > keep:
                timed("update", self.scheduler.update, timed("result", self._launched.popleft().result))

        if not self.scheduler.plans_ahead:
            take(0)
        self._now += 0.005  # what a step takes, for what plans drafts
        planned = timed("schedule", self.scheduler.schedule)
        if planned:
            self._launched.append(timed("launch", self._runner.launch, planned))
        take(int(bool(planned)))
        return list(spent.values())

    def finish(self) -> list[float]:
        steps = []
        while self.scheduler.has_work:
            steps.append(self.step())
        return [sum(part) for part in zip(*steps, strict=True)]

    def decode(self, batch: int) -> tuple[list[list[float]], tuple[int, int]]:
        for _ in range(batch):
            self.add(200, 260)
        for _ in range(20):
            self.step()
        times = [self.step() for _ in range(200)]
        calls = count_calls(self.step)
        self.finish()
        return times, calls

    def draft(self, tokens: int) -> tuple[list[list[float]], tuple[int, int]]:
        """As :meth:`decode` of one request; the first steps try drafts of each length."""
        self.add(200, 4000)
        for _ in range(200):
            self.step()
        before = self.scheduler.load()
        times = [self.step() for _ in range(200)]
        after = self.scheduler.load()
        assert after.drafted_tokens - before.drafted_tokens == 200 * tokens, "each step checks a whole draft"
        calls = count_calls(self.step)
        self.finish()
        return times, calls

    def prompt(self, length: int) -> tuple[list[list[float]], tuple[int, int]]:
        times = []
        for _ in range(60):
            self.scheduler.flush_cache()
            self.add(length, 1)
            times.append(self.finish())

        def again() -> None:
            self.scheduler.flush_cache()
            self.add(length, 1)
            self.finish()

        return times, count_calls(again)


class Operations(TorchDispatchMode):
    """Counts torch's operations, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def count_calls(run: Any) -> tuple[int, int]:
    """Python functions and operations of torch that are called, in a run each."""
    counted = [0]

    def count(frame: object, event: str, argument: object) -> None:
        counted[0] += event == "call"

    sys.setprofile(count)
    run()
    sys.setprofile(None)
    with Operations() as operations:
        run()
    return counted[0], operations.count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="decode-1,decode-64,prompt-128,prompt-1024", help="default: %(default)s")
    wanted = [
        (kind, int(size)) for kind, _, size in (each.partition("-") for each in parser.parse_args().work.split(","))
    ]
    pretend_a_gpu()
    with tempfile.TemporaryDirectory() as folder:
        drafted = [size for kind, size in wanted if kind == "draft"]
        assert len(drafted) in (0, len(wanted)), "a runner whose head drafts does nothing else"
        host = Host(make_runner(Path(folder), headed=bool(drafted)), max(drafted, default=0))
    gc.freeze()
    for kind, size in wanted:
        times, calls = getattr(host, kind)(size)
        medians = {
            part: round(1e6 * statistics.median(own), 1)
            for part, own in zip(PARTS, zip(*times, strict=True), strict=True)
        }
        least = round(1e6 * min(map(sum, times)), 1)
        row = {
            "work": f"{kind}-{size}",
            "us": medians,
            "least_us": least,
            "python_calls": calls[0],
            "torch_calls": calls[1],
        }
        print(json.dumps(row), flush=True)
    os._exit(0)  # Triton's modules, unloaded, complain


if __name__ == "__main__":
    main()
