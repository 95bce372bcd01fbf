"""Requests with objectives under overload, in virtual time: how many are met with and without the router knowing of them.

Registry, admission, policy and headroom are the router's own. A worker computes in steps, as real ones do: a token of each
request that decodes, and a chunk of the first prompts that wait; a step takes longer the more of both there is.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from fleet_sim.events import Events

from sapwood_common.errors import ResourceExhaustedError
from sapwood_router.admission.control import AdmissionControl, Place
from sapwood_router.admission.fair_queue import AdmissionSettings
from sapwood_router.fleet.circuit_breaker import BreakerSettings, CircuitBreaker, Outcome
from sapwood_router.fleet.eligibility import Demand
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.served_model import ServedModel
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.attempts import acquire
from sapwood_router.flow.headroom import Headroom, Pursuit
from sapwood_router.flow.select import candidates, choose
from sapwood_router.request.caller import Caller
from sapwood_router.request.objective import Objective, ShedError
from sapwood_router.routing.factory import PolicyParts, make_policy
from sapwood_router.routing.index.blocks import BlockIndex
from sapwood_router.routing.policies.base import PromptPages
from sapwood_router.routing.policy_book import Shadowed

MODEL = "m"
_STEP, _EACH, _TOKEN, _CHUNK, _RUNNING, _PAGE = 0.008, 0.0002, 1 / 20_000, 512, 64, 16
"""A step's seconds: fixed, for each request that decodes, for each prompt token; most prompt tokens in it; requests at once."""
_DEADLINE = 120.0


@dataclass(frozen=True)
class Kind:
    """Requests that are alike.

    Attributes:
        name: For the figures.
        rate: A second, of all together.
        priority: Their class.
        prompt, answer: Tokens, drawn between these.
        objective: What their clients want; None: they wait as long as it takes.
        burst: Seconds between bursts in which all of their requests come; 0: they come by chance.
    """

    name: str
    rate: float
    priority: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    objective: Objective | None = None
    burst: float = 0.0


CHAT = Objective(first_token=1.0, each_token=0.06)
SCENARIOS: dict[str, tuple[Kind, ...]] = {
    "chats, 0.8 of what 8 workers can do": (Kind("chat", 60, 0, (200, 1500), (50, 250), CHAT),),
    "chats, 1.25 times": (Kind("chat", 94, 0, (200, 1500), (50, 250), CHAT),),
    "chats, twice": (Kind("chat", 150, 0, (200, 1500), (50, 250), CHAT),),
    "chats 0.8, and 300 more at once every 30 s": (
        Kind("chat", 60, 0, (200, 1500), (50, 250), CHAT),
        Kind("chat", 10, 0, (200, 1500), (50, 250), CHAT, burst=30.0),
    ),
    "chats 0.5, batch 1.0 below them": (
        Kind("chat", 38, 0, (200, 1500), (50, 250), CHAT),
        Kind("batch", 20, -100, (1000, 6000), (100, 400)),
    ),
    "chats 0.5, batch in bursts of 10 s": (
        Kind("chat", 38, 0, (200, 1500), (50, 250), CHAT),
        Kind("batch", 20, -100, (1000, 6000), (100, 400), burst=10.0),
    ),
}


@dataclass(eq=False)
class Job:
    """A request at a worker."""

    left: int
    answer: int
    first: Callable[[], None]
    done: Callable[[], None]
    made: int = 0


class SteppedWorker:
    """Computes requests in steps, first come first served."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._busy = False

    def take(self, job: Job) -> None:
        """A request came."""
        self._waiting.append(job)
        if not self._busy:
            self._step()

    def drop(self, job: Job) -> None:
        """It is taken back."""
        if job in self._waiting:
            self._waiting.remove(job)

    def _step(self) -> None:
        budget, chunks = _CHUNK, list[tuple[Job, int]]()
        for job in itertools.islice(self._waiting, max(0, _RUNNING - len(self._running))):
            if not budget:
                break
            chunks.append((job, min(job.left, budget)))
            budget -= chunks[-1][1]
        self._busy = bool(chunks or self._running)
        if self._busy:
            decoding, tokens = list(self._running), sum(tokens for _, tokens in chunks)
            seconds = _STEP + _EACH * len(decoding) + _TOKEN * tokens
            self._events.after(seconds, lambda: self._stepped(decoding, chunks))

    def _stepped(self, decoding: list[Job], chunks: list[tuple[Job, int]]) -> None:
        for job in decoding:
            job.made += 1
        for job, tokens in chunks:
            if job not in self._waiting:
                continue  # it was dropped
            job.left -= tokens
            if not job.left:
                self._waiting.remove(job)
                self._running.append(job)
                job.made = 1
                job.first()
        ended = [job for job in self._running if job.made >= job.answer]
        self._running = [job for job in self._running if job.made < job.answer]
        for job in ended:
            job.done()
        self._step()


@dataclass
class Tally:
    """What became of the requests of a kind.

    ``told``: of those that were shed, the seconds after which they are to come again; ``again``, ``met_again``: those that did,
    each once, and of how many the objective was then met.
    """

    came: int = 0
    met: int = 0
    answered: int = 0
    refused: int = 0
    preempted: int = 0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    told: list[float] = field(default_factory=list)
    again: int = 0
    met_again: int = 0


class Run:
    """One scenario, with or without the objectives told to the router."""

    def __init__(self, kinds: tuple[Kind, ...], workers: int, *, told: bool, seed: int) -> None:
        self.events = Events()
        self.tallies = {kind.name: Tally() for kind in kinds}
        self.told = told
        self._kinds = kinds
        self.rng = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._counting = False
        clock = self.events.clock
        addresses = [f"10.0.0.{number}:50061" for number in range(workers)]
        self._computers = {address: SteppedWorker(self.events) for address in addresses}
        fleet = [Worker(address, CircuitBreaker(BreakerSettings(), clock), clock, self._pump) for address in addresses]
        self.registry = Registry(fleet, most_requests=lambda model: 2 * model.max_running)
        self.headroom = Headroom(self.registry, clock, self.rng)
        self.admission = AdmissionControl(self.registry, AdmissionSettings(), clock, self.rng, self.headroom.floor)
        policy = make_policy("cache_aware", PolicyParts(1 << 22, self.rng, clock, BlockIndex(1 << 20)))
        self.policy = Shadowed(policy, {}, lambda name, agrees: None)
        for each in fleet:
            policy.reset(each.address, 1 << 14)
            self.registry.mark_up(each, ServedModel(MODEL, 1 << 20, 1 << 20, _PAGE, 1 << 14, 1, _RUNNING))

    def _pump(self) -> None:
        self.admission.pump()

    async def run(self, warm: float, seconds: float) -> dict[str, Tally]:
        """Virtual seconds that do not count, and then those that do."""
        for kind in self._kinds:
            self.events.after(self._next(kind), self._source(kind, warm + seconds))
        self._poll()
        await self.events.run(warm)
        self._counting = True
        await self.events.run(warm + seconds + 60)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return self.tallies

    def _poll(self) -> None:
        for line in self.admission._lines.values():
            if line.queue.waiting:
                line.queue.expire()
        self.admission.pump()
        self.events.after(0.25, self._poll)

    def _next(self, kind: Kind) -> float:
        return kind.burst or self.rng.expovariate(kind.rate)

    def _source(self, kind: Kind, until: float) -> Callable[[], None]:
        def come() -> None:
            if self.events.now < until:
                for _ in range(round(kind.rate * kind.burst) or 1):
                    Ask(self, kind, self.rng, self.tallies[kind.name] if self._counting else Tally()).begin()
                self.events.after(self._next(kind), come)

        return come

    def wait(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine next to the events."""
        self.events.tasks += 1
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def over(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self.events.tasks -= 1
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

        task.add_done_callback(over)

    def computer(self, address: str) -> SteppedWorker:
        """The worker at an address."""
        return self._computers[address]


class Ask:
    """One request on its way, as ``Generation`` has it go."""

    def __init__(self, run: Run, kind: Kind, rng: random.Random, tally: Tally, *, again: bool = False) -> None:
        self._run, self._kind, self._tally, self._again = run, kind, tally, again
        self._came = 0.0
        self._caller = Caller(kind.name, kind.priority, objective=kind.objective if run.told else None)
        self._prompt = PromptPages([rng.randrange(1 << 20) for _ in range(rng.randint(*kind.prompt))])
        self._answer = rng.randint(*kind.answer)
        self._pursuit: Pursuit | None = None
        self._job: Job | None = None
        self._address = ""
        self._end: Callable[[], None] = lambda: None
        self._first = 0.0

    def begin(self) -> None:
        """It came."""
        self._came = self._run.events.now
        self._tally.came += not self._again
        self._tally.again += self._again
        self._pursuit = self._run.headroom.begin(MODEL, self._caller, self._came, self._preempt)
        self._queue(checks=True)

    def _queue(self, *, checks: bool) -> None:
        pursuit = self._pursuit
        cost, deadline = len(self._prompt.token_ids) + self._answer, self._came + _DEADLINE
        place: Place | None = None
        try:
            latest = () if pursuit is None else (pursuit.latest,)
            place = self._run.admission.reserve(MODEL, self._caller, cost, deadline, *latest)
            if checks:
                self._check()
            if place.ready():
                self._place()
                return
        except ResourceExhaustedError as error:
            if place is not None:
                place.leave()
            self._refused(error)
            return
        self._run.wait(self._wait(place))

    async def _wait(self, place: Place) -> None:
        try:
            await place.turn()
            self._check()
        except ResourceExhaustedError as error:
            self._refused(error)
            self._run.admission.pump()
            return
        self._place()

    def _check(self) -> None:
        if self._pursuit is not None and self._pursuit.objective is not None:
            workers, _ = candidates(self._demand, self._prompt, self._run.registry, self._run.policy)
            self._pursuit.check(workers, {}, len(self._prompt.token_ids))

    @property
    def _demand(self) -> Demand:
        return Demand(MODEL, len(self._prompt.token_ids), "prompt")

    def _refused(self, error: ResourceExhaustedError) -> None:
        self._tally.refused += not self._again
        if isinstance(error, ShedError) and not self._again:
            assert error.retry_after is not None
            self._tally.told.append(error.retry_after)
            run = self._run
            run.events.after(error.retry_after, Ask(run, self._kind, run.rng, self._tally, again=True).begin)
        if self._pursuit is not None:
            self._pursuit.close()

    def _place(self) -> None:
        run, pursuit, tokens = self._run, self._pursuit, len(self._prompt.token_ids)
        narrow = None if pursuit is None or pursuit.is_free else lambda workers: pursuit.narrow(workers, {}, tokens)
        worker, choice = choose(self._demand, self._prompt, run.registry, run.policy, narrow=narrow)
        lease, permit = acquire(worker, choice, self._prompt, run.policy)
        self._address = worker.address
        if pursuit is not None:
            pursuit.sent(worker, tokens)

        def first() -> None:
            self._first = run.events.now
            lease.prefilled()
            if pursuit is not None:
                pursuit.answers()
                run.admission.pump()

        def end() -> None:
            permit.end(Outcome.SUCCESS)
            lease.release()

        def done() -> None:
            end()
            self._done()

        self._end = end
        self._job = Job(tokens, self._answer, first, done)
        run.computer(worker.address).take(self._job)

    def _preempt(self) -> None:
        assert self._job is not None and self._pursuit is not None
        self._tally.preempted += 1
        self._run.computer(self._address).drop(self._job)
        self._pursuit.left()
        self._end()
        self._run.events.after(0.0, lambda: self._queue(checks=False))

    def _done(self) -> None:
        tally, now, pursuit = self._tally, self._run.events.now, self._pursuit
        tally.answered += 1
        tally.tokens += len(self._prompt.token_ids) + self._answer
        tally.first.append(self._first - self._came)
        if (asked := self._kind.objective) is not None:
            each = (now - self._first) / (self._answer - 1)
            met = self._first - self._came <= asked.first_token and each <= asked.each_token
            tally.met += met and not self._again
            tally.met_again += met and self._again
        if pursuit is not None:
            pursuit.ended(self._answer)
            pursuit.close()


async def measure(
    scenario: str, workers: int, warm: float, seconds: float, seed: int, *, told: bool
) -> dict[str, object]:
    """A row of figures."""
    tallies = await Run(SCENARIOS[scenario], workers, told=told, seed=seed).run(warm, seconds)
    row: dict[str, object] = {"scenario": scenario, "objectives": told}
    for name, tally in tallies.items():
        first = sorted(tally.first)
        row |= {
            f"{name}_met_share": round(tally.met / max(1, tally.came), 3),
            f"{name}_goodput": round(tally.met / seconds, 1),
            f"{name}_met_again_share": round(tally.met_again / max(1, tally.again), 3),
            f"{name}_answered": tally.answered,
            f"{name}_refused": tally.refused,
            f"{name}_preempted": tally.preempted,
            f"{name}_tokens_a_second": round(tally.tokens / seconds),
            f"{name}_ttft_s_p50": round(first[len(first) // 2], 2) if first else 0.0,
            f"{name}_ttft_s_p99": round(first[int(0.99 * len(first))], 2) if first else 0.0,
            f"{name}_told_s_p50": round(sorted(tally.told)[len(tally.told) // 2], 2) if tally.told else 0.0,
        }
    return row
