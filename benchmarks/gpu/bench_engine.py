"""The engine alone on one GPU: scheduler, cache and runner in this process, random weights of the true shape, greedy.

Workloads as in the table of docs/design/figures-gpu.md: offline256, decode B, prefill k x n; ``steady`` is decode without what is
measured through whole requests, for when time is short. Prints one JSON object a line.

    python benchmarks/gpu/bench_engine.py --model benchmarks/gpu/configs/qwen3-0.6b --only decode,offline
"""

from __future__ import annotations

import json
import logging
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from commit import measured_commit
from engine_flags import parse_arguments, variant_of
from ranks import Split, group_runners, leave
from step_profile import record

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.child import spare_the_collector
from sapwood_worker.core.loaded_runner import LoadedRunner
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.rank_planner import RankPlanner
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.records.expert_load import expert_load
from sapwood_worker.records.output import RequestOutput
from sapwood_worker.records.step import LaunchedStep, ModelOutput, Step

STEP_TOKENS = 8192
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = {
    "temperature": SamplingParams(temperature=0.8),
    "top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "top-k 50": SamplingParams(temperature=0.8, top_k=50),
    "penalties": SamplingParams(temperature=0.0, presence_penalty=0.5, repetition_penalty=1.1),
    "logprobs 5": SamplingParams(temperature=0.0, logprobs=5),
}


class TimedRunner:
    """Attributes: info, experts, exchanged_bytes, sums: The runner's; waited: Seconds that the host waited for results; steps:
    Results so far."""

    def __init__(self, runner: LoadedRunner) -> None:
        self._runner = runner
        self.info, self.experts, self.sums = runner.info, runner.experts, runner.sums
        self.exchanged_bytes = runner.exchanged_bytes
        self.waited, self.steps = 0.0, 0

    def launch(self, planned: Step) -> LaunchedStep:
        step = self._runner.launch(planned)
        take = step.result

        def result() -> ModelOutput:
            started = time.perf_counter()
            try:
                return take()
            finally:
                self.waited += time.perf_counter() - started
                self.steps += 1

        step.result = result  # type: ignore[method-assign]
        return step


class Engine:
    """Args: as the options of main say."""

    _experts: Any = 0
    _steps = 0

    def __init__(
        self,
        model: Path,
        max_running: int,
        max_step_tokens: int,
        kv_gb: float,
        overlap: bool = True,
        ranks: int = 1,
        stages: int = 1,
        split: Split = Split(),  # noqa: B008 - it holds nothing
        device: str = "cuda",
        turn: Path | None = None,
        **options: Any,
    ) -> None:
        self.overlap = overlap
        self._device = device
        started = time.perf_counter()
        self._ranks = ExitStack()
        wanted: dict[str, Any] = {
            "model_path": model, "load_format": "dummy", "dtype": "bfloat16", "context_length": 16384,
            "kv_cache_bytes": int(kv_gb * 2**30) if kv_gb else None, "max_running": max_running,
            "max_step_tokens": max_step_tokens, **options,
        }  # fmt: skip
        runners = self._ranks.enter_context(group_runners(ranks, [wanted], device, stages, split, turn))
        self.runner = TimedRunner(next(runners))
        self.wait()
        self.start_seconds = time.perf_counter() - started
        spare_the_collector()
        info = self.runner.info
        config = SchedulerConfig(
            windows=info.windows,
            states=info.states,
            page_size=info.page_size, num_pages=info.num_pages, context_length=info.context_length,
            max_running=max_running, max_step_tokens=max_step_tokens,
            micro_batches=info.micro_batches, micro_batches_from=info.micro_batches_from, chained=info.chained and overlap,
        )  # fmt: skip
        schedulers = [Scheduler(config) for _ in range(info.attention_ranks)]
        self.scheduler = schedulers[0] if len(schedulers) == 1 else RankPlanner(config, schedulers)
        self.count = 0

    @classmethod
    def of(cls, runner: LoadedRunner, scheduler: Scheduler | RankPlanner) -> Engine:
        """The engine of what a worker has built, on one device."""
        made = cls.__new__(cls)
        made.overlap, made.count, made._ranks = True, 0, ExitStack()
        made._device = "cuda" if torch.cuda.is_available() else "cpu"
        made.runner, made.scheduler = TimedRunner(runner), scheduler
        spare_the_collector()
        return made

    def wait(self) -> None:
        """Returns once the device has done all that is queued."""
        if self._device == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Ends the other ranks."""
        self._ranks.close()

    def add(self, prompts: list[list[int]], lengths: list[int], sampling: SamplingParams) -> None:
        for prompt, length in zip(prompts, lengths, strict=True):
            self.count += 1
            own = msgspec.structs.replace(sampling, seed=self.count, max_tokens=length)
            self.scheduler.add(Request(self.count, str(self.count), prompt, own))

    def steps(self) -> Iterator[list[RequestOutput]]:
        """Steps until all is done, as the worker's event loop takes them; each yields what it brought."""
        launched: deque[LaunchedStep] = deque()
        while self.scheduler.has_work:
            planned = self.scheduler.schedule() if self.scheduler.plans_ahead else None
            if planned:
                launched.append(self.runner.launch(planned))
            outputs: list[RequestOutput] = []
            most = max(int(self.overlap), self.scheduler.depth - 1) if planned else max(0, len(launched) - 1)
            while len(launched) > most:
                outputs += self.scheduler.update(launched.popleft().result())
            yield outputs

    def generate(self, prompts: list[list[int]], lengths: list[int], sampling: SamplingParams = GREEDY) -> float:
        """Seconds from submission to the last token."""
        self.scheduler.flush_cache()
        self.wait()
        started = time.perf_counter()
        self.add(prompts, lengths, sampling)
        for _ in self.steps():
            pass
        self.wait()
        return time.perf_counter() - started

    @contextmanager
    def decoding(
        self, batch: int, length: int = 120, sampling: SamplingParams = GREEDY, prompt: int = 1024
    ) -> Iterator[Callable[[], None]]:
        """Lets a batch of prompts of so many tokens decode; gives what does a step of it."""
        last = min(99999, self.runner.info.vocab_size - 1)
        self.add(prompts_of(batch, prompt, seed=5, last=last), [length] * batch, sampling)
        decoding = self._rounds(batch)
        for _ in range(20):
            next(decoding)
        yield lambda: next(decoding)
        for _ in decoding:
            pass

    def _rounds(self, batch: int) -> Iterator[None]:
        """Steps until all is done, as :meth:`steps`; yields when they have brought each of a batch's requests a token."""
        shares = self.scheduler.micro_batches if batch >= self.runner.info.micro_batches_from else 1
        recent, since = deque[int](maxlen=shares), 0
        for outputs in self.steps():
            recent.append(len(outputs))
            since += 1
            if sum(recent) == batch and since >= shares:
                since = 0
                yield

    def expert_balance(self) -> float | None:
        """How even the load of experts was since the last call, as ``sapwood worker experts`` tells it; None: there are none, or
        steps had fewer choices of experts than there are experts, some of which had to get more than others."""
        if self.runner.experts is None:
            return None
        before, steps = self._experts, self.runner.steps - self._steps
        self._experts, self._steps = np.array(self.runner.experts()()), self.runner.steps
        fresh = self._experts - before
        return expert_load(fresh.tolist()).balance if fresh.sum() >= steps * fresh.size else None

    def exchanged(self) -> float | None:
        """Bytes that ranks have given each other for experts, as a part of those of all rows to all ranks; None: none do."""
        each = self.runner.info.expert_exchange
        if self.runner.experts is None or not each:
            return None
        tokens = sum(map(sum, self.runner.experts()()))
        return self.runner.exchanged_bytes(tokens) / (tokens * each)

    def time_steps(self, step: Callable[[], None], steps: int) -> dict[str, float]:
        """Mean milliseconds of a steady step, and of what the host does in one but wait."""
        self.runner.waited = 0.0
        started = time.perf_counter()
        for _ in range(steps):
            step()
        seconds = time.perf_counter() - started
        host = seconds - self.runner.waited
        return {"steady": seconds / steps * 1000, "host": host / steps * 1000}


def since_process_start() -> float:
    """Seconds that this process has run, its imports too."""
    began = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


def prompts_of(count: int, length: int, seed: int, last: int = 99999) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randint(10, last) for _ in range(length)] for _ in range(count)]


class Bench:
    """Runs workloads and prints their figures, each under the name of the variant, so that none is taken for the plain model's.

    Args:
        engine: What computes.
        variant: The model's name, and what is not as usual.
        where: The device and the commit, for each figure.
        profiles: Folder for Chrome traces; None: none.
    """

    def __init__(self, engine: Engine, variant: str, where: dict[str, str], profiles: Path | None) -> None:
        self._engine = engine
        self._variant = variant
        self._where = where
        self._profiles = profiles

    def report(self, what: str, value: float, unit: str) -> None:
        """Prints a figure."""
        row = {"what": f"{self._variant} {what}", "value": round(value, 4), "unit": unit, "engine": "sapwood"}
        print(json.dumps(row | {"overlap": self._engine.overlap} | self._where), flush=True)

    def decode(self, batch: int, repeats: int, *, whole: bool) -> None:
        """A step of so many requests: steady, and if ``whole`` as 128 tokens more of whole requests take."""
        engine = self._engine
        if whole:
            prompts = prompts_of(batch, 1024, seed=batch)
            engine.generate(prompts, [4] * batch)
            first = min(engine.generate(prompts, [1] * batch) for _ in range(repeats))
            last = min(engine.generate(prompts, [129] * batch) for _ in range(repeats))
            self.report(f"decode {batch}", (last - first) / 128 * 1000, "ms")
        with engine.decoding(batch, length=130) as step:
            engine.expert_balance()
            for part, milliseconds in engine.time_steps(step, 50).items():
                self.report(f"decode {batch} {part}", milliseconds, "ms")
            self._report_balance(f"decode {batch}")
            self._profile(f"decode {batch}", lambda: [step() for _ in range(10)], 10)

    def sampled(self) -> None:
        """Steps of 256 requests by settings of sampling."""
        for name, sampling in {"greedy": GREEDY, **SAMPLED}.items():
            with self._engine.decoding(256, length=130, sampling=sampling) as step:
                self.report(f"sampled 256 {name}", self._engine.time_steps(step, 40)["steady"], "ms")

    def prefill(self, count: int, length: int) -> None:
        """So many prompts of a length at once; of a single one the quickest of four."""
        engine, prompts = self._engine, prompts_of(count, length, seed=count)
        engine.expert_balance()
        seconds = min(engine.generate(prompts, [1] * count) for _ in range(4 if count == 1 else 1))
        self.report(f"prefill {count}x{length}", seconds * 1000, "ms")
        self.report(f"prefill {count}x{length} rate", count * length / seconds, "tokens/s")
        self._report_balance(f"prefill {count}x{length}")
        if count == 1:
            self._profile(f"prefill {count}x{length}", lambda: engine.generate(prompts, [1]), 1)

    def offline(self, *, both_loops: bool) -> None:
        """256 requests at once, of 100 to 1024 tokens in and out; if ``both_loops`` step by step, too."""
        engine, draw = self._engine, random.Random(0)
        shapes = [(draw.randint(100, 1024), draw.randint(100, 1024)) for _ in range(256)]
        prompts = [[draw.randint(10, 99999) for _ in range(length)] for length, _ in shapes]
        outputs = [length for _, length in shapes]
        engine.expert_balance()
        self.report("offline256", sum(outputs) / engine.generate(prompts, outputs), "output tokens/s")
        self._report_balance("offline256")
        if both_loops:
            engine.overlap = False
            self.report("offline256", sum(outputs) / engine.generate(prompts, outputs), "output tokens/s")

    def _report_balance(self, what: str) -> None:
        if (balance := self._engine.expert_balance()) is not None:
            self.report(f"{what} expert balance", balance, "mean of a layer's experts / its busiest")

    def _profile(self, what: str, run: Callable[[], object], steps: int) -> None:
        if self._profiles is None:
            return
        parts, kernels = record(run, self._profiles / f"{self._variant}-{what.replace(' ', '-')}.json.gz")
        for part, microseconds in parts.items():
            self.report(f"{what} profile: {part}", microseconds / steps, "us")
        for kernel, microseconds in list(kernels.items())[:12]:
            print(f"#   {microseconds / steps:9.1f} us {kernel[:120]}", flush=True)


def main() -> None:
    arguments = parse_arguments(str(__doc__))
    logging.basicConfig(
        level=logging.INFO, format="%(relativeCreated)d ms %(message)s"
    )  # how the start goes, of rank 0
    wanted = set(arguments.only.split(","))
    commit = measured_commit()
    most = STEP_TOKENS * (arguments.tensor_parallel if arguments.data_parallel_attention else 1)
    split = Split(
        whole_experts=arguments.expert_parallel,
        own_requests=arguments.data_parallel_attention,
        dispatch=arguments.expert_dispatch,
        all_reduce=arguments.all_reduce,
        uniform_tokens=most if arguments.routing == "uniform" else 0,
        graph_sizes=arguments.graph_sizes,
        diverging_rank=arguments.diverging_rank,
    )
    engine = Engine(
        arguments.model, max_running=256, max_step_tokens=STEP_TOKENS, attention_backend=arguments.attention_backend,
        expert_tuning=arguments.expert_tuning, kv_gb=arguments.kv_gb, overlap=not arguments.no_overlap,
        kv_cache_dtype=arguments.kv_cache_dtype, quantization=arguments.quantization,
        ranks=arguments.tensor_parallel * arguments.pipeline_parallel, stages=arguments.pipeline_parallel,
        split=split, device=arguments.device, turn=arguments.turn, kernels_wait=not arguments.as_a_worker,
        micro_batches=arguments.micro_batches,
    )  # fmt: skip
    variant = variant_of(arguments)
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    bench = Bench(engine, variant, {"device": device, "commit": commit}, arguments.profile)
    info = engine.runner.info
    bench.report("KV cache", info.attention_ranks * info.num_pages * info.page_size, "tokens")
    if info.pipeline_parallel > 1:
        bench.report("micro_batches", info.micro_batches, f"steps at once, from {info.micro_batches_from} requests on")
    engine.generate(prompts_of(1, 16, seed=1), [1])
    if arguments.turn is None:  # else it has waited
        bench.report("start-up", engine.start_seconds, "s")
        bench.report("start-up to first token", since_process_start(), "s")
    engine.generate(prompts_of(4, 700, seed=1), [8] * 4)
    if wanted & {"decode", "steady"}:
        for batch in map(int, arguments.batches.split(",")):
            bench.decode(batch, arguments.repeats, whole="decode" in wanted)
    if "sampled" in wanted:
        bench.sampled()
    if "prefill" in wanted:
        for count, length in (map(int, each.split("x")) for each in arguments.prefills.split(",")):
            bench.prefill(count, length)
    if "offline" in wanted:
        bench.offline(both_loops=arguments.both_loops)
    if (exchanged := engine.exchanged()) is not None:
        bench.report("exchanged", exchanged, "of the bytes of all rows to all ranks")
    if engine.runner.sums is not None:
        print(
            json.dumps({"what": f"{variant} all-reduce", "chosen": info.all_reduce.words, "sums": engine.runner.sums()})
        )
    if arguments.tensor_parallel > 1:  # else it has raised
        same = "sampled the same" if info.attention_ranks == 1 else "got the same rows for each layer"
        bench.report(f"all ranks {same}", engine.runner.steps, "steps")
    engine.close()


if __name__ == "__main__":
    leave(main)
