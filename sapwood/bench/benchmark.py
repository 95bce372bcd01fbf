"""A whole benchmark: a server is looked at, warmed up and put under one load after another."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from sapwood.bench.arrivals import constant, poisson
from sapwood.bench.data.conversation import Ask
from sapwood.bench.data.source import Source
from sapwood.bench.data.trace import trace_arrivals
from sapwood.bench.data.words import WORDS
from sapwood.bench.load import Load, Run
from sapwood.bench.measures import Measures, measure
from sapwood.bench.slo import Slo
from sapwood.bench.stopping import unless_stopped
from sapwood.bench.targets.open_target import Where, open_target
from sapwood.bench.targets.record import Record
from sapwood.bench.targets.target import Asked, Sampling, Target, TargetError

_FEW_WORDS, _MANY_WORDS = 32, 160
_WARM_UP_SEED = -1


@dataclass(frozen=True, slots=True)
class Level:
    """One load: ``value`` clients, ``value`` requests a second, or a trace ``value`` times as fast as it was.

    Attributes:
        kind: Which of these.
        value: How much.
        arriving: What comes at a rate.
    """

    kind: Literal["concurrency", "rate", "trace"]
    value: float
    arriving: Literal["requests", "conversations"] = "requests"

    def __str__(self) -> str:
        return {
            "concurrency": f"concurrency {self.value:g}",
            "rate": f"{self.value:g} {self.arriving}/s",
            "trace": f"trace at {self.value:g} x speed",
        }[self.kind]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Attributes:
        where: The server.
        source: The source of its requests.
        levels: The loads, one after the other. Each has prompts of its own, so that none finds those of another cached.
        sampling: How all requests are sampled.
        requests: After this many a load sends no more; None for no limit.
        seconds: The same by time.
        arrivals: How requests of a rate are spread.
        warm_up: Requests before the first load that are not measured.
        seed: The seed of all that is drawn.
        slo: The limits that good requests keep.
    """

    where: Where
    source: Source
    levels: tuple[Level, ...]
    sampling: Sampling = field(default=Sampling())
    requests: int | None = 100
    seconds: float | None = None
    arrivals: Literal["poisson", "constant"] = "poisson"
    warm_up: int = 4
    seed: int = 0
    slo: Slo | None = None


@dataclass(frozen=True, slots=True)
class LevelResult:
    """A load and its measurements."""

    level: Level
    run: Run
    measures: Measures


@dataclass(slots=True)
class Result:
    """What a benchmark found; it grows with each load.

    Attributes:
        plan: What was to be measured.
        model: The model's name.
        tokens_a_word: How many tokens a word of made-up prompts comes to, by the server's usage; None if it sent none.
        levels: The loads that were measured, the last of them perhaps not to its end.
        interrupted: Whether it was stopped.
    """

    plan: Plan
    model: str = ""
    tokens_a_word: float | None = None
    levels: list[LevelResult] = field(default_factory=list)
    interrupted: bool = False


class Benchmark:
    """Measures what a plan says.

    Args:
        plan: What is measured.
        on_progress: Called a few times a second while a load runs.
        on_level: Called after each load.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        on_progress: Callable[[Level, Run], None] = lambda level, run: None,
        on_level: Callable[[LevelResult], None] = lambda result: None,
    ) -> None:
        self._plan = plan
        self._on_progress = on_progress
        self._on_level = on_level
        self._load: Load | None = None
        self._stop = asyncio.Event()
        self.result = Result(plan)

    def stop(self) -> None:
        """Ends it: :meth:`run` returns soon, with what was measured."""
        self.result.interrupted = True
        self._stop.set()
        if self._load is not None:
            self._load.stop()

    async def run(self) -> Result:
        """Measures.

        Raises:
            TargetError: The server cannot be asked.
            DataError: A file of data is of no use.
            ValueError: The server's URL is none.
            OSError: A certificate cannot be read.
        """
        plan, result = self._plan, self.result
        target = open_target(plan.where, plan.sampling)
        try:
            await unless_stopped(self._look_at(target), self._stop)
            if plan.warm_up and not result.interrupted:
                await self._make_load(target, _WARM_UP_SEED, requests=plan.warm_up).closed(min(plan.warm_up, 8))
            for number, level in enumerate(plan.levels):
                if result.interrupted:
                    break
                run = await self._run_level(target, level, number)
                found = LevelResult(level, run, measure(run, plan.slo, expects_json=plan.source.expects_json))
                result.levels.append(found)
                self._on_level(found)
        finally:
            await target.close()
        return result

    async def _look_at(self, target: Target) -> None:
        self.result.model = await target.connect()
        self.result.tokens_a_word = await tokens_a_word(target)

    async def _run_level(self, target: Target, level: Level, number: int) -> Run:
        plan = self._plan
        seed = plan.seed + 1000 * number

        def on_progress(run: Run) -> None:
            self._on_progress(level, run)

        load = self._make_load(target, seed, requests=plan.requests, seconds=plan.seconds, on_progress=on_progress)
        if level.kind == "concurrency":
            return await load.closed(int(level.value))
        if level.kind == "trace":
            return await load.open(trace_arrivals(list(plan.source.trace), level.value))
        return await load.open(poisson(level.value, seed) if plan.arrivals == "poisson" else constant(level.value))

    def _make_load(
        self,
        target: Target,
        seed: int,
        *,
        requests: int | None,
        seconds: float | None = None,
        on_progress: Callable[[Run], None] = lambda run: None,
    ) -> Load:
        api = self._plan.where.api_used
        conversations = self._plan.source.open(api, self.result.tokens_a_word or 1.0, seed)
        self._load = Load(
            target,
            conversations,
            api,
            requests=requests,
            seconds=seconds,
            keep_texts=self._plan.source.expects_json,
            on_progress=on_progress,
        )
        return self._load


async def tokens_a_word(target: Asked) -> float | None:
    """How many tokens a word of :data:`~sapwood.bench.data.words.WORDS` comes to, by the server's usage; None if it tells none.

    Raises:
        TargetError: The server does not answer the two requests that find out.
    """
    words = random.Random(0).choices(WORDS, k=_MANY_WORDS)
    tokens = []
    for count in (_FEW_WORDS, _MANY_WORDS):
        record = Record()
        await target.ask(Ask(" ".join(words[:count]), 1), record)
        if record.error:
            raise TargetError(f"{record.error}: {record.message}" if record.message else record.error)
        if record.prompt_tokens is None:
            return None
        tokens.append(record.prompt_tokens)
    slope = (tokens[1] - tokens[0]) / (_MANY_WORDS - _FEW_WORDS)
    return slope if slope > 0 else None
