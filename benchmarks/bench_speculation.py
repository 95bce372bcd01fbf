"""Decoding with drafts compared with the same without, in one process in turns: scheduler, cache and runner, no services.

    python benchmarks/bench_speculation.py                                         # the demo model on this CPU
    python benchmarks/bench_speculation.py --model benchmarks/gpu/configs/llama-3.1-8b --dummy walk --device cuda

Workloads, each with batches of several sizes (``WORKLOAD@1/16``: its own):

- ``copy`` edits a long text that its prompt holds; it needs a model that can: the demo model
- ``edit R`` writes a file of 2048 tokens again, a share of 1 - R of it changed: dummy weights that walk
  (``walking_weights.py``)
- ``again`` asks what was asked before; ``again 2048``: prompts of so many tokens
- ``new`` has nothing that could be foreseen
- ``dial R`` has a drafter that knows the answer and gets a share of 1 - R wrong
- ``draft R``: the draft model of ``--draft`` or the head of ``--eagle``, whose steps are run and paid for, but what it says is
  the dial's, as dummy weights agree on nothing
- ``itself`` drafts whatever the draft model says, whatever steps cost: with the model itself all of it must be right

Prints a JSON object a line: on a GPU first what replays of the graphs of the model and of what drafts take; then tokens/s without
and with drafts, the median of their ratio over the rounds, the ratio of the round before, in which it learns what steps take
(``first``), the share of drafted tokens that were accepted, the share of answers that are the same, and the time of a step (by
requests, and by requests:positions, rounded up, where drafts were checked) with that of making drafts in it; and ``parts_ms``: of
the step loop's own time, by the tokens of the longest draft (0: none; off: of the steps without drafts), the medians of planning,
making the draft (launching it, where it stays on the device), launching and waiting for the result, and how many steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from dialled_drafts import Dial, DialledRunner, edit_prompt, file_prompt
from msgspec.structs import replace
from walking_weights import eagle_head, untied, walk

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.models.model_files import packaged_path
from sapwood_worker.core.scheduler.config import SchedulerConfig, SpeculateName
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.core.scheduler.speculation.drafter import Drafter
from sapwood_worker.core.scheduler.speculation.model_drafter import DraftModel
from sapwood_worker.model.runner.builder import build_drafted_runner, build_headed_runner, build_runner
from sapwood_worker.model.runner.drafting_runner import DraftingRunner
from sapwood_worker.model.runner.model_runner import LaunchedStep, ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions

Answers = dict[int, list[int]]


class OwnClock:
    """Seconds of another clock, of which those between :meth:`stop` and :meth:`start` are left out.

    Args:
        clock: The other clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left_out = 0.0
        self._stopped: float | None = None

    def __call__(self) -> float:
        return (self._clock() if self._stopped is None else self._stopped) - self._left_out

    def stop(self) -> None:
        self._stopped = self._clock()

    def start(self) -> None:
        if self._stopped is not None:
            self._left_out += self._clock() - self._stopped
            self._stopped = None


class Engine:
    """A scheduler over a runner that others may use too, but not at the same time.

    Args:
        runner: The runner.
        speculate: What it drafts.
        max_running: Most requests at once.
        drafter: Who drafts; None: the prefix drafter.
    """

    def __init__(
        self,
        runner: ModelRunner,
        speculate: SpeculateName,
        max_running: int,
        drafter: Drafter | DraftModel | None = None,
    ) -> None:
        info = runner.info
        self.runner = runner
        self.clock = OwnClock(time.perf_counter if runner.asynchronous else time.process_time)
        self.scheduler = Scheduler(
            SchedulerConfig(
                windows=info.windows,
                page_size=info.page_size,
                num_pages=info.num_pages,
                context_length=info.context_length,
                max_running=max_running,
                max_step_tokens=2048,
                speculate=speculate,
            ),
            clock=self.clock,
            drafter=drafter,
        )
        self._serial = 0
        self._parts: dict[int, list[tuple[float, ...]]] = {}
        self._sizes: deque[tuple[int, tuple[float, ...]]] = deque()
        self.drafts = 0
        self.draft_seconds = 0.0
        if (speculation := self.scheduler._speculation) is not None:
            speculation._clock = self.clock
            fill = speculation._drafter.fill

            def timed(decodes: Sequence[Request], drafts: list[list[int]]) -> list[list[int]]:
                started = time.perf_counter()
                filled = fill(decodes, drafts)
                self.drafts += 1
                self.draft_seconds += time.perf_counter() - started
                return filled

            speculation._drafter.fill = timed

    def step_times(self) -> dict[str, float]:
        """Milliseconds of steps, by requests and, where drafts were checked, sampled positions, and of making drafts, by requests
        and the tokens of the longest; the device's where it has them before the host."""
        speculation = self.scheduler._speculation
        if speculation is None or speculation._planner is None:
            return {}
        costs, drafts = speculation._planner.costs, speculation._planner._drafts
        times = {str(rows): mean.seconds for rows, mean in costs._plain.items()}
        times |= {f"{rows}:{most}": mean.seconds for (rows, most), mean in sorted(costs._drafted.items())}
        made = ((rows, most, mean) for rows, means in drafts._means.items() for most, mean in sorted(means.items()))
        times |= {f"{rows} drafts {most}": mean.seconds for rows, most, mean in made}
        return {name: round(seconds * 1000, 2) for name, seconds in times.items()}

    def generate(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> tuple[Answers, float]:
        """The answers, and tokens/s from the time on when all prompts are computed; of CPU seconds where the CPU computes."""
        run = self.run(prompts, sampling)
        while True:
            try:
                next(run)
            except StopIteration as ended:
                return ended.value

    def run(
        self, prompts: Sequence[list[int]], sampling: SamplingParams
    ) -> Generator[None, None, tuple[Answers, float]]:
        """:meth:`generate`, a step at a time."""
        answers: Answers = {index: [] for index in range(len(prompts))}
        first = self._serial
        for index, prompt in enumerate(prompts):
            own = replace(sampling, seed=index)
            self.scheduler.add(Request(self._serial, str(index), prompt, own))
            self._serial += 1
        launched: deque[LaunchedStep] = deque()
        started, before = 0.0, 0
        while self.scheduler.has_work:
            while launched and not self.scheduler.plans_ahead:
                self._take(launched, answers, first)
            begun, filled = time.perf_counter(), self.draft_seconds
            planned = self.scheduler.schedule()
            ended, filled = time.perf_counter(), self.draft_seconds - filled
            if planned:
                launched.append(self.runner.launch(planned))
                longest = int(planned.samples.max(initial=1)) - 1 if (planned.counts == planned.samples).all() else -1
                parts = ended - begun - filled, filled, time.perf_counter() - ended
                self._sizes.append((longest, parts))
            while len(launched) > (1 if planned and self.runner.asynchronous else 0):
                self._take(launched, answers, first)
            if not started and all(answers.values()):
                started, before = self.clock(), sum(map(len, answers.values()))
            yield
        seconds = self.clock() - started
        return answers, (sum(map(len, answers.values())) - before) / seconds

    def parts(self) -> dict[str, list[float]]:
        """Milliseconds that parts of a step take, and the number of steps, by the tokens of the longest draft."""
        return {
            str(longest): [*(round(median(each) * 1000, 3) for each in zip(*found, strict=True)), len(found)]
            for longest, found in sorted(self._parts.items())
        }

    def _take(self, launched: deque[LaunchedStep], answers: Answers, first: int) -> None:
        began = time.perf_counter()
        result = launched.popleft().result()
        longest, parts = self._sizes.popleft()
        if longest >= 0:  # a step of prompts is not told
            self._parts.setdefault(longest, []).append((*parts, time.perf_counter() - began))
        for output in self.scheduler.update(result):
            answers[output.serial - first] += output.token_ids


def duel(
    engines: Mapping[str, Engine], prompts: Sequence[list[int]], sampling: SamplingParams
) -> dict[str, tuple[Answers, float]]:
    """What the engines' ``generate`` returns, if they go step by step in turns: the next is always the one whose clock is behind,
    so that whatever slows the machine slows them alike. Each has a runner of its own."""
    runs = {name: engine.run(prompts, sampling) for name, engine in engines.items()}
    began = {name: engine.clock() for name, engine in engines.items()}
    found: dict[str, tuple[Answers, float]] = {}
    for engine in engines.values():
        engine.clock.stop()
    while runs:
        name = min(runs, key=lambda each: engines[each].clock() - began[each])
        engines[name].clock.start()
        try:
            next(runs[name])
        except StopIteration as ended:
            found[name] = ended.value
            del runs[name]
        engines[name].clock.stop()
    for engine in engines.values():
        engine.clock.start()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Model file or folder [default: the demo model]")
    parser.add_argument("--dummy", choices=("random", "walk"), help="Weights of the true shape that are made up")
    parser.add_argument("--draft", type=Path, help="Draft model for draft R")
    parser.add_argument(
        "--eagle", type=Path, help="The same: a head of EAGLE-3; 'random': one of the model's shape is made up"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--attention-backend", default="auto", help="triton needs no compiler of FlashInfer's")
    parser.add_argument("--max-running", type=int, default=64, help="Also the most positions of a step [default: 64]")
    parser.add_argument("--threads", type=int, default=0, help="On the CPU [default: all cores]")
    parser.add_argument("--workloads", default="copy,again,new,dial 0.8", help="[default: %(default)s]")
    parser.add_argument("--batches", default="1,4", help="[default: %(default)s]")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="Of all workloads but copy")
    parser.add_argument("--tokens", type=int, default=192, help="Of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-gb", type=float, default=0.5)
    parser.add_argument(
        "--duel",
        action="store_true",
        help="Go in turns by steps, with the model loaded twice and swapped each round: for machines that do other work too",
    )
    arguments = parser.parse_args()
    batches = [int(each) for each in arguments.batches.split(",")]
    model = arguments.model or packaged_path("demo-base")
    if arguments.dummy == "walk":
        walk()
        model = untied(model)
    if arguments.eagle == Path("random"):
        arguments.eagle = eagle_head(model)
    workloads = [each.partition("@")[::2] for each in arguments.workloads.split(",")]
    cases = [(name, list(map(int, own.split("/"))) if own else batches) for name, own in workloads]
    arguments.max_running = max(arguments.max_running, *(batch for _, own in cases for batch in own))
    options = RunnerOptions(
        model_path=model,
        load_format="dummy" if arguments.dummy else "auto",
        device=arguments.device,
        attention_backend=arguments.attention_backend,
        dtype=arguments.dtype,
        threads=arguments.threads or None,
        context_length=8192,
        max_running=arguments.max_running,
        max_step_tokens=2048,
        kv_cache_bytes=int(arguments.kv_gb * 2**30),
    )
    if arguments.eagle is not None:
        runner = build_headed_runner(options, arguments.eagle)
    elif arguments.draft is None:
        runner = build_runner(options)
    else:
        runner = build_drafted_runner(options, dataclasses.replace(options, model_path=arguments.draft))
    beside = build_runner(options) if arguments.duel else None
    if runner.asynchronous:
        of_draft = {} if runner.draft is None else graph_times(runner.draft)
        print(json.dumps({"graphs_ms": graph_times(runner), "draft_graphs_ms": of_draft}), flush=True)
    draft = runner.draft
    for workload, own in cases:
        # What does not draft computes nothing behind checks, as in a worker that was not given it.
        runner.draft = draft if workload.split()[0] in ("draft", "itself") else None
        for batch in own:
            measure(runner, beside, workload, batch, arguments, None if arguments.model else model)


def graph_times(runner: ModelRunner) -> dict[str, float]:
    """Milliseconds of the device for a replay of a runner's decode graphs, by their rows, over one key each."""
    graphs, times = runner._graphs, {}
    for size in (1, 2, 4, 8, 16, 32):
        if graphs is None or size not in graphs._captured:
            continue
        replay = graphs._captured[size].graph.replay
        replay()
        begun = runner.ops.moment()
        for _ in range(20):
            replay()
        ended = runner.ops.moment()
        runner.ops.to_host([runner._last_tokens]).wait()
        times[str(size)] = round(ended.seconds_since(begun) / 20 * 1000, 3)
    return times


def measure(
    runner: ModelRunner, beside: ModelRunner | None, workload: str, batch: int, arguments: Any, demo: Path | None
) -> None:
    """Prints one workload's figures for one batch size; ``beside`` runs what is not drafted for, if they go in turns by steps."""
    chance = random.Random(batch)
    sampling = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
    length = int(workload.split()[1]) if workload.startswith("again ") else arguments.prompt_tokens
    prompts = [[chance.randrange(10, 30_000) for _ in range(length)] for _ in range(batch)]
    if workload == "copy":
        if demo is None:
            return
        prompts = [edit_prompt(demo, number) for number in range(batch)]
    elif workload.startswith("edit"):
        prompts = [file_prompt(chance, float(workload.split()[1])) for _ in range(batch)]
    elif workload == "new":
        sampling = replace(sampling, temperature=1.5)
    drafter: Drafter | DraftModel | None = None
    most = arguments.max_running
    plain = Engine(beside or runner, "off", most)
    if workload.startswith("dial"):
        known, _ = plain.generate(prompts, sampling)
        drafter = Dial({str(index): answer for index, answer in known.items()}, float(workload.split()[1]))
    elif workload.startswith("draft"):
        assert isinstance(runner.draft, DraftingRunner), "draft R needs --draft or --eagle"
        known, _ = plain.generate(prompts, sampling)
        said = DialledRunner(runner.draft, prompts, known, float(workload.split()[1]))
        kind, first = ("draft", 0) if arguments.eagle is None else ("eagle", 1)
        drafter = DraftModel(said, runner.draft.info.context_length, 2048, kind, first)
    elif workload == "itself":
        assert runner.draft is not None, "itself needs --draft"
        drafter = DraftModel(runner.draft, runner.draft.info.context_length, 2048)
    drafting = Engine(runner, "prefix" if workload == "itself" else "auto", most, drafter)
    ratios: list[float] = []
    rates: dict[str, list[float]] = {"off": [], "auto": []}
    same = drafted = accepted = 0
    for turn in range(arguments.rounds + 1):
        engines = dict(sorted({"off": plain, "auto": drafting}.items(), reverse=bool(turn % 2)))
        for engine in engines.values():
            engine.scheduler.flush_cache()
            if workload.startswith("again"):
                engine.generate(prompts, sampling)
        before = drafting.scheduler.load()
        if beside is not None:  # one may lie better in memory
            plain.runner, drafting.runner = drafting.runner, plain.runner
        if beside is None:
            found = {name: engine.generate(prompts, sampling) for name, engine in engines.items()}
        else:
            found = duel(engines, prompts, sampling)
        after = drafting.scheduler.load()
        ratios.append(found["auto"][1] / found["off"][1])
        if turn:  # the first round is for what is slow once, and to learn what steps take
            for name, (_, rate) in found.items():
                rates[name].append(rate)
            drafted += after.drafted_tokens - before.drafted_tokens
            accepted += after.accepted_tokens - before.accepted_tokens
            off, auto = found["off"][0], found["auto"][0]
            same += sum(off[index] == auto[index] for index in off)
    first, *ratios = ratios
    row = {
        "workload": workload,
        "batch": batch,
        "off": round(median(rates["off"]), 1),
        "auto": round(median(rates["auto"]), 1),
        "ratio": round(median(ratios) if beside is None else geometric_mean(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "first": round(first, 3),
        "drafted": drafted,
        "accepted": round(accepted / drafted, 3) if drafted else None,
        "same": round(same / (batch * arguments.rounds), 3),
        "step_ms": drafting.step_times(),
        "draft_ms": round(drafting.draft_seconds / max(1, drafting.drafts) * 1000, 2),
        "parts_ms": {"off": plain.parts().get("0")} | drafting.parts(),
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
