"""The scheduler's core in a deterministic simulation: seeded random traffic, every invariant checked after every step.

A seed decides everything; a failure names its seed and step, and the same seed fails there again. Checked after each step: the
ledger against tree and rows, page by page; locks; states. Checked for each request: its tokens, or its embedding, are those of
its own text and seed, it ends exactly once, in time if it has a deadline, and no later than the bound on its wait. Every other
seed runs with a tree that checks each of its answers against brute force.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from sapwood_common.contract.page_hash import cache_namespace
from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import ResourceExhaustedError
from sapwood_testing.drafts.chaining_runner import ChainingRunner
from sapwood_testing.drafts.scripted_drafter import ScriptedDrafter
from sapwood_testing.worker.checked_tree import CheckedTree
from sapwood_testing.worker.fake_runner import FakeRunner, FakeStep, continuation, pooled_prompt, random_windows
from sapwood_worker.core.scheduler.batch import StepInFlight
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.core.scheduler.speculation.model_drafter import DraftModel
from sapwood_worker.core.scheduler.speculation.speculation import Speculation
from sapwood_worker.records.kv_layout import StateSlots
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.output import Pooling, RequestOutput
from sapwood_worker.records.step import ModelOutput

VOCAB = 60
END = 59
POISON = 58
_POOLINGS: tuple[Pooling, ...] = ("mean", "last", "cls")


@dataclass
class Client:
    """What a request's client knows and expects."""

    request: Request
    expected: Iterator[int]
    longest: int
    ends: frozenset[int]
    expires: float | None
    pooled: float | None = None
    must_end_by: int | None = None
    received: list[int] = field(default_factory=list)


class Simulation:
    """One scheduler under one seed's traffic."""

    def __init__(self, seed: int, rounds: int = 300) -> None:
        self.rounds = rounds
        chance = self.chance = random.Random(seed)
        page_size = chance.choice([1, 2, 4, 16])
        context_length = chance.randint(12, 96)
        # From less than one longest request to three of them.
        num_pages = max(3, int(context_length * chance.uniform(0.8, 3) / page_size))
        # None: a tenant "z" with one request at a time, and ever new ones whose names sort before its, without a pause.
        self.tenants = chance.choice([[""], [""], ["a", "a", "a", "b"], ["a", "b", "c"], None])
        self.config = SchedulerConfig(
            page_size=page_size,
            num_pages=num_pages,
            context_length=context_length,
            eos_token_ids=frozenset({END}),
            max_running=1 if self.tenants is None else chance.choice([1, 4, 8, 16]),
            max_waiting=chance.randint(1, 8 if self.tenants is None else 60),
            max_step_tokens=chance.choice([1, 8, 32, 512]),
            policy=chance.choice(["fcfs", "lpm", "dfs-weight", "lof", "priority", "priority"]),
            starved_after=chance.choice([4, 30, 100]),
            prefix_cache=chance.random() < 0.85,
            eviction=chance.choice(["lru", "lfu", "fifo", "slru"]),
            conservativeness=chance.choice([0.0, 0.0, 1.0]),
            windows=random_windows(random.Random(seed), page_size, num_pages) if seed % 3 else (),
            states=StateSlots(random.Random(seed + 8).choice([0, 1, 3, 20])) if seed % 7 in (2, 3) else None,
            speculate=random.Random(seed + 1).choice(["off", "off", "prefix", "auto"]),
            micro_batches=random.Random(seed + 5).choice([2, 3, 4]) if seed % 4 < 2 else 1,
            micro_batches_from=random.Random(seed + 6).choice([1, 4]),
            chained=random.Random(seed + 7).random() < 0.7,
        )
        self.limit = min(self.config.context_length, num_pages * page_size)
        self.longest_wait = 0
        self.now = 0.0
        info = ModelInfo(
            architecture="fake",
            dtype="none",
            context_length=self.limit,
            vocab_size=VOCAB,
            eos_token_ids=(END,),
            page_size=page_size,
            num_pages=num_pages,
            windows=self.config.windows,
            states=self.config.states,
        )
        # Where requests are greedy, it drafts in chains, whose tokens are known late.
        self.temperature = float(random.Random(seed + 4).random() < 0.3)
        self.draft: ChainingRunner | None = None
        drafter: ScriptedDrafter | DraftModel = ScriptedDrafter(
            lambda request: continuation(request.token_ids[: request.prompt_length], request.sampling, VOCAB),
            random.Random(seed),
            right=0.8,
            vocab_size=VOCAB,
        )
        if random.Random(seed + 2).random() < 0.4:  # it agrees with the model
            alone = msgspec.structs.replace(info, windows=(), states=None)
            # Some compute nothing of the first position, as heads do, and are often wrong.
            first = int(random.Random(seed + 3).random() < 0.3)
            self.draft = ChainingRunner(alone)
            drafter = DraftModel(self.draft, self.limit - 3, max(self.config.max_running, 5), first=first)
        self.scheduler = Scheduler(self.config, clock=lambda: self.now, drafter=drafter)
        if (speculation := self.scheduler._speculation) is not None:
            speculation.took = self.counts_checked(speculation)  # type: ignore[method-assign]
        self.tree = CheckedTree(page_size, self.config.eviction) if seed % 2 else None
        if self.tree is not None:
            self.scheduler._cache._tree = self.scheduler._cache.pins._tree = self.tree
        # Whether steps are planned while others are in flight, and computed some time between launch and result.
        self.overlap = seed % 4 < 2
        self.runner = FakeRunner(info, poison=POISON, chance=random.Random(seed) if self.overlap else None)
        self.launched: deque[FakeStep] = deque()
        # How busy: from mostly idle to always full.
        self.arrival_rate = chance.choice([0.05, 0.3, 1.0])
        self.abort_rate = chance.choice([0.0, 0.02, 0.2])
        self.deadline_rate = chance.choice([0.0, 0.2])
        self.pin_rate = chance.choice([0.0, 0.05])
        self.pause_rate = chance.choice([0.0, 0.0, 0.01])
        self.lengths = chance.choice([[1, 2], [5, 20], [1, 20, 1000], [1000]])
        self.poison_rate = chance.choice([0.0, 0.0, 0.02])
        self.priorities = chance.choice([[0], [0, 0, 0, 5], [-3, 0, 3]])
        if self.tenants is None:
            self.arrival_rate, self.lengths, self.rounds = 1.0, [1, 2], 3 * rounds
        self.documents = [self._tokens(chance.randint(1, 1 + self.limit // 3)) for _ in range(chance.randint(1, 6))]
        self.embed_rate = chance.choice([0.0, 0.0, 0.2])
        # Some ask for several answers to one prompt.
        self.again = random.Random(seed + 9) if seed % 5 in (1, 4) else None
        self.asked: tuple[list[int], bytes] = [1], b""
        self.clients: dict[int, Client] = {}
        self.serial = 0
        self.step_number = 0
        self.trace = hashlib.sha256()
        self.counts = dict.fromkeys(
            (
                "finished",
                "aborted",
                "failed",
                "refused",
                "expired",
                "pinned",
                "paused",
                "overlapped",
                "side by side",
                "embedded",
                "drafted",
                "shared",
                "pages copied",
                "joined",
            ),
            0,
        )

    def run(self) -> None:
        """Lets traffic come for ``rounds`` steps, then waits for the last request and checks that nothing is left."""
        for _ in range(self.rounds):
            self.arrivals()
            self.step()
        while self.scheduler.has_work:
            self.step()
        assert not self.clients, "a request never ended"
        for name in "pq":
            self.scheduler.unpin(name)
        self.scheduler.flush_cache()
        assert self.scheduler.load().used_pages == 0
        if self.tree is not None:
            self.tree.compare()

    def arrivals(self) -> None:
        chance = self.chance
        while chance.random() < self.arrival_rate / (1 + self.arrival_rate):
            self.add()
        if chance.random() < self.abort_rate and self.clients:
            self.abort()
        if chance.random() < 0.01:
            self.scheduler.flush_cache()
        if chance.random() < self.pin_rate:
            self.pin()
        if chance.random() < self.pause_rate:
            self.pause()

    def add(self) -> None:
        chance = self.chance
        document = chance.choice(self.documents)
        prompt = list(document)  # asked for again as it is, or its beginning with something new
        if chance.random() < 0.7:
            prompt = prompt[: chance.randint(0, len(document))] + self._tokens(chance.randint(1, 8))
        prompt = prompt[: self.limit - 1]
        if chance.random() < self.poison_rate:
            prompt[0] = POISON
        sampling = SamplingParams(
            seed=chance.getrandbits(64),
            max_tokens=chance.choice(self.lengths),
            stop_token_ids=tuple(chance.sample(range(VOCAB), chance.randint(0, 2))) if chance.random() < 0.3 else (),
            ignore_eos=chance.random() < 0.5,
            temperature=self.temperature,
        )
        expires = self.now + chance.randint(0, 60) if chance.random() < self.deadline_rate else None
        pooling: Pooling = ""
        if self.embed_rate and chance.random() < self.embed_rate:
            pooling = chance.choice(_POOLINGS)
        namespace = chance.choice([b"", b"", cache_namespace("salt"), cache_namespace("", "lora")])
        if self.again is not None and self.again.random() < 0.8:
            prompt, namespace = self.asked
        self.asked = prompt, namespace
        serial, self.serial = self.serial, self.serial + 1
        request = Request(
            serial,
            f"r{serial}",
            prompt,
            sampling,
            namespace,
            priority=chance.choice(self.priorities),
            tenant=self.tenant(),
            deadline=expires,
            pooling=pooling,
        )
        try:
            self.scheduler.add(request)
        except ResourceExhaustedError:
            assert self.scheduler.load().waiting_requests >= self.config.max_waiting
            self.counts["refused"] += 1
            return
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.config.eos_token_ids)
        longest = len(prompt) if pooling else min(self.limit, len(prompt) + sampling.max_tokens)
        pooled = pooled_prompt(prompt, pooling) / (len(prompt) if pooling == "mean" else 1) if pooling else None
        self.clients[serial] = Client(request, continuation(prompt, sampling, VOCAB), longest, ends, expires, pooled)
        if self.config.policy == "fcfs" and self.tenants == [""]:
            # Half of each step's prompt tokens go to the shortest prompts until it has starved.
            self.clients[serial].must_end_by = 2 * self.bound(request) - self.step_number

    def tenant(self) -> str:
        if self.tenants is not None:
            return self.chance.choice(self.tenants)
        # One at a time: more would fill the queue and so keep the others out.
        is_there = any(client.request.tenant == "z" for client in self.clients.values())
        return f"a{self.serial:09}" if is_there else "z"

    def counts_checked(self, speculation: Speculation) -> Callable[[StepInFlight, ModelOutput, float], None]:
        """What notes a step's drafts, and then checks how many tokens were counted as accepted: all but each one's last."""
        note = speculation.took

        def took(step: StepInFlight, output: ModelOutput, now: float) -> None:
            before = speculation.accepted_tokens
            note(step, output, now)
            drafted = zip(step.decodes, step.drafts, output.token_ids, strict=False)
            accepted = sum(len(tokens) - 1 for request, draft, tokens in drafted if draft and not request.over)
            assert speculation.accepted_tokens - before == accepted

        return took

    def bound(self, starved: Request) -> int:
        """The step by which a request that nothing its tenant's policy prefers may overtake any more has ended.

        Were all that are older or have run before served one after another, each would take its length and a step or two. Of
        several tenants
        its own has a turn before all younger ones whenever none of it was admitted for a time; what runs by then must end.
        """
        steps = sum(
            client.longest + 2
            for client in self.clients.values()
            if client.request.arrival <= starved.arrival or client.request.cached is not None
        )
        if self.tenants != [""]:
            turns = sum(
                client.request.tenant == starved.tenant and client.request.arrival <= starved.arrival
                for client in self.clients.values()
            )
            steps += turns * (self.config.starved_after + self.config.max_running * (self.limit + 2))
        # All that run take turns where a step has fewer tokens than requests.
        steps *= -(-self.config.max_running // self.config.max_step_tokens)
        if self.config.states is not None:  # between a snapshot and the end of cached pages states are computed again
            steps *= 2
        if self.overlap:  # what is in flight may be in the way of each step
            steps *= max(2, self.scheduler.depth)
        if self.config.policy == "priority":
            # An older one that starves later may push it out, and its work is done again.
            steps *= 2
        return self.step_number + steps

    def abort(self) -> None:
        serial = self.chance.choice(list(self.clients))
        assert self.scheduler.abort(serial)
        assert not self.scheduler.abort(serial)
        del self.clients[serial]
        self.counts["aborted"] += 1

    def pin(self) -> None:
        name = self.chance.choice("pq")
        if self.chance.random() < 0.3:
            self.scheduler.unpin(name)
            return
        seconds = self.chance.choice([None, 20.0])
        try:
            self.counts["pinned"] += self.scheduler.pin(name, self.chance.choice(self.documents), b"", seconds) > 0
        except ResourceExhaustedError:
            self.counts["refused"] += 1

    def pause(self) -> None:
        self.take_results(0)
        self.scheduler.pause(retract=self.chance.random() < 0.5)
        self.scheduler.check()
        if self.clients and self.chance.random() < 0.5:
            self.abort()
        assert not len(self.scheduler.schedule().rows)
        self.scheduler.resume()
        self.counts["paused"] += 1

    def step(self) -> None:
        chance = self.chance
        for output in self.scheduler.expire():
            client = self.clients.pop(output.serial)
            assert output.finish_reason == "deadline" and client.expires is not None and client.expires <= self.now
            self.counts["expired"] += 1
        while self.launched and not self.scheduler.plans_ahead:
            self.take_results(len(self.launched) - 1)
        ahead = bool(self.launched)
        parts, sent_back = self.parts(), self.scheduler.num_retractions + self.scheduler.num_preemptions
        planned = self.scheduler.schedule()
        if len(planned.rows) and sent_back == self.scheduler.num_retractions + self.scheduler.num_preemptions:
            self.check_parts(parts)
        assert (len(planned.rows) > 0) == self.scheduler.has_work or ahead, "there is work, but the step is empty"
        if planned:
            self.counts["pages copied"] += len(planned.page_copies)
            self.counts["joined"] += len(planned.joins)
            decodes = int((planned.counts == 1).sum())
            self.counts["drafted"] += int((planned.samples > 1).sum())
            assert len(planned.token_ids) <= max(self.config.max_step_tokens, decodes + 1)
            assert len(planned.rows) <= self.config.max_running
            self.launched.append(self.runner.launch(planned))
            self.counts["overlapped"] += ahead
            self.counts["side by side"] += len(self.launched) > 2
            if chance.random() < self.abort_rate and self.clients:
                self.abort()
        more = len(planned.rows) and self.overlap and chance.random() < 0.9
        self.take_results(max(1, self.scheduler.depth - 1) if more else 0)
        self.scheduler.check()
        self.step_number += 1
        self.now += 1.0
        self.check_bounds()

    def parts(self) -> dict[str, int]:
        """Prompt tokens that each tenant's running requests have to compute; none where these rules do not hold alone."""
        running = self.scheduler._running.requests
        self.one_left = {each.serial for each in running if each.remaining == 1}
        starved = any(each.waited >= self.config.starved_after for each in running)
        if self.config.policy == "priority" or self.config.windows or starved:
            return {}
        wanted: dict[str, int] = {}
        for request in running:
            if not request.over and request.remaining > 1:
                wanted[request.tenant] = wanted.get(request.tenant, 0) + request.remaining
        return wanted

    def check_parts(self, wanted: dict[str, int]) -> None:
        """Each tenant whose prompts run has got its part of the step's prompt tokens, or all that it wants. A request that joins
        another's end counts as a token."""
        step = self.scheduler._in_flight[-1]
        last = [request for request, _ in step.chunks if request.serial in self.one_left]
        given: dict[str, int] = {}
        for request, count in [*step.chunks, *((join.request, 1) for join in step.joins)]:
            given[request.tenant] = given.get(request.tenant, 0) + count
        tenants = given.keys() | wanted.keys() | {each.tenant for each in self.scheduler._waiting}
        budget = max(1, self.config.max_step_tokens - len(step.decodes) - len(last))
        for tenant, tokens in wanted.items():
            got = given.get(tenant, 0)
            assert got >= min(tokens, budget // len(tenants)), f"{tenant} got {got} of {tokens} tokens, {given}"
        self.counts["shared"] += len(given) > 1

    def take_results(self, keep: int) -> None:
        while len(self.launched) > keep:
            try:
                result = self.launched.popleft().result()
            except RuntimeError:
                self.launched.clear()
                outputs = self.scheduler.fail_step("poison")
            else:
                outputs = self.scheduler.update(result)
            for output in outputs:
                self.take(output)

    def take(self, output: RequestOutput) -> None:
        client = self.clients[output.serial]  # it ended before, or was aborted, if it is not there
        for token in output.token_ids:
            assert token == next(client.expected), f"{client.request.request_id} got a wrong token"
            client.received.append(token)
        assert output.completion_tokens == len(client.received)
        full = client.request.prompt_length + len(client.received) >= client.longest
        if output.finish_reason == "error":
            self.counts["failed"] += 1
        elif client.pooled is not None:
            assert output.finish_reason == "stop" and not client.received
            assert np.frombuffer(output.embedding, np.float32).tolist() == [np.float32(client.pooled)]
            self.counts["embedded"] += 1
        else:
            ended = "stop" if client.received[-1] in client.ends else "length" if full else None
            assert output.finish_reason == ended, f"{client.request.request_id} ended wrongly"
            self.counts["finished"] += ended is not None
        if output.finish_reason is not None:
            del self.clients[output.serial]
            self.trace.update(f"{self.step_number} {output.serial} {client.received} {output.cached_tokens}".encode())

    def check_bounds(self) -> None:
        for client in self.clients.values():
            request = client.request
            assert client.expires is None or client.expires >= self.now - 1, (
                f"{request.request_id} outlives its deadline"
            )
            waited = request.waited + (self.scheduler._steps - request.queued_at if request.slot < 0 else 0)
            self.longest_wait = max(self.longest_wait, waited)
            if client.must_end_by is None:
                if waited >= self.config.starved_after:
                    client.must_end_by = self.bound(request)
            elif self.step_number > client.must_end_by:
                raise AssertionError(f"{request.request_id} starves")

    def _tokens(self, count: int) -> list[int]:
        return [self.chance.randrange(POISON) for _ in range(count)]


def simulate(seed: int) -> tuple[Simulation, int]:
    simulation = Simulation(seed)
    try:
        simulation.run()
    except Exception as error:
        raise AssertionError(f"seed {seed}, step {simulation.step_number}, {simulation.config}: {error!r}") from error
    return simulation, simulation.step_number


def run_seeds(first: int, steps: int) -> dict[str, int]:
    """Runs seeds from ``first`` on until so many steps are done; what happened in them."""
    totals: dict[str, int] = dict.fromkeys(
        ("steps", "retractions", "preemptions", "longest wait", "accepted", "rejected", "late"), 0
    )
    seed = first
    while totals["steps"] < steps:
        simulation, done = simulate(seed)
        totals["steps"] += done
        totals["retractions"] += simulation.scheduler.num_retractions
        totals["longest wait"] = max(totals["longest wait"], simulation.longest_wait)
        totals["preemptions"] += simulation.scheduler.num_preemptions
        load = simulation.scheduler.load()
        totals["accepted"] += load.accepted_tokens
        totals["rejected"] += load.drafted_tokens - load.accepted_tokens
        totals["late"] += 0 if simulation.draft is None else simulation.draft.awaited
        for name, count in simulation.counts.items():
            totals[name] = totals.get(name, 0) + count
        seed += 1
    return totals


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_any_traffic_gives_each_request_its_own_tokens_in_time_and_leaks_nothing(part: int) -> None:
    totals = run_seeds(part * 1_000_000, steps=(1 + part) * 15_000)
    print(totals)
    assert min(totals.values()) > 10, f"too little happened: the traffic is too tame: {totals}"


def test_a_draft_that_is_tried_has_no_more_positions_than_a_step() -> None:
    simulate(101_000_192)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(8))
def test_a_long_simulation(part: int) -> None:
    print(run_seeds(100_000_000 + part * 1_000_000, steps=120_000))


def test_ten_thousand_random_aborts_leave_no_page_behind() -> None:
    simulations = (Simulation(seed, rounds=200) for seed in range(0, 1_000_000, 2))
    aborted = 0
    while aborted < 10_000:
        simulation = next(simulations)
        simulation.abort_rate, simulation.arrival_rate, simulation.lengths = 1.0, 3.0, [5, 20]
        simulation.run()
        aborted += simulation.counts["aborted"]


def test_a_seed_replays_exactly() -> None:
    for seed in (7, 8, 9, 10):
        first, second = (simulate(seed)[0] for _ in range(2))
        assert first.trace.digest() == second.trace.digest()
        assert first.counts == second.counts
        assert (first.serial, first.step_number) == (second.serial, second.step_number)
        assert first.scheduler.load() == second.scheduler.load()
