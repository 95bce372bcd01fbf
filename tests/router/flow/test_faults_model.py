"""Breaker, retry, queue and registry together, through random orders of events on a clock of its own, compared with a plain
model of what must hold.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sapwood_common import errors
from sapwood_router.admission.fair_queue import Admission, AdmissionSettings, Ticket
from sapwood_router.fleet.circuit_breaker import (
    BreakerSettings,
    CircuitBreaker,
    Outcome,
    Permit,
    WorkerLeftError,
    WorkerLostError,
    outcome_of,
)
from sapwood_router.fleet.eligibility import Demand
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.served_model import ServedModel
from sapwood_router.fleet.worker import Lease, Worker
from sapwood_router.flow.attempts import acquire
from sapwood_router.flow.retry import Failover, RetryPolicy, RetrySettings
from sapwood_router.flow.select import choose
from sapwood_router.routing.policies.base import PromptPages
from sapwood_router.routing.policies.least_load import LeastLoad
from sapwood_testing.clock import Clock

# The share of faults never opens it here: its window is known to a tenth only, and is tested by itself.
BREAKER = BreakerSettings(consecutive=3, least_requests=10**9, open_seconds=1.0, most_open_seconds=4.0)
RETRY = RetrySettings(attempts=3, base=0.0, ratio=0.0, reserve=5, window=10.0)
MOST_LOSSES, ROOM, QUEUE = 2, 2, 3
NAMES = "abc"

KINDS = {
    "fault": errors.UnavailableError,
    "internal": errors.InternalError,
    "busy": errors.ResourceExhaustedError,
    "client": errors.InvalidArgumentError,
    "lost": WorkerLostError,
}


@dataclass
class PlainBreaker:
    """What a breaker must do, in as few words as possible."""

    faults: int = 0
    open_until: float | None = None
    seconds: float = 1.0
    probe: object = None

    def admits(self, now: float) -> bool:
        return self.open_until is None or (now >= self.open_until and self.probe is None)

    def fault(self, now: float) -> None:
        if self.open_until is None:
            self.faults += 1
            if self.faults == 3:
                self.open_until = now + self.seconds
        elif now >= self.open_until:
            self.reopen(now)

    def reopen(self, now: float) -> None:
        self.probe = None
        self.seconds = min(4.0, 2 * self.seconds)
        self.open_until = now + self.seconds

    def reset(self) -> None:
        self.faults, self.open_until, self.seconds, self.probe = 0, None, 1.0, None


@dataclass(eq=False)
class Request:
    """A request of the model's."""

    failover: Failover
    deadline: float
    worker: Worker | None = None
    lease: Lease | None = None
    permit: Permit | None = None
    begun: PlainBreaker | None = None
    tries: list[str] = field(default_factory=list)
    losses: int = 0
    moves: int = 0
    end: str | None = None


class Faults(RuleBasedStateMachine):
    """One model, three workers."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.workers = {name: Worker(name, CircuitBreaker(BREAKER, self.clock), self.clock) for name in NAMES}
        self.plain = {name: PlainBreaker() for name in NAMES}
        self.epochs = dict.fromkeys(NAMES, 1)
        self.drained: set[str] = set()
        self.registry = Registry(self.workers.values(), most_requests=lambda model: ROOM)
        for name in NAMES:
            self.up(name)
        self.retry = RetryPolicy(RETRY, self.clock, random.Random(1))
        self.queue = Admission(AdmissionSettings(most_waiting=QUEUE, most_wait=1e9), self.clock, random.Random(2))
        self.requests: list[Request] = []
        self.retries: list[float] = []

    def up(self, name: str) -> None:
        self.registry.mark_up(self.workers[name], ServedModel("m", 100, 10, 4, 50, self.epochs[name]))

    def running(self) -> list[Request]:
        return [request for request in self.requests if request.worker is not None]

    def open_workers(self) -> list[Worker]:
        return [
            worker
            for name, worker in self.workers.items()
            if worker.available and name not in self.drained and self.plain[name].admits(self.clock.now)
        ]

    def place(self, request: Request) -> None:
        """Stages 2 and 3, as the pipeline does them."""
        prompt = PromptPages([1, 2, 3])
        try:
            demand = Demand("m", len(prompt.token_ids), "prompt", refused_by=request.failover.refused_by)
            worker, choice = choose(demand, prompt, self.registry, LeastLoad())
        except errors.UnavailableError:
            assert not [w for w in self.open_workers() if w.address not in request.failover.refused_by]
            request.end = "unavailable"
            return
        plain = self.plain[worker.address]
        assert worker in self.open_workers()
        assert worker.address not in request.failover.refused_by
        request.lease, request.permit = acquire(worker, choice, prompt, LeastLoad())
        assert request.permit.is_probe == (plain.open_until is not None)
        if request.permit.is_probe:
            plain.probe = request
        request.worker, request.begun = worker, PlainBreaker(plain.faults, plain.open_until, plain.seconds)
        request.tries.append(worker.address)

    def room(self) -> int:
        return sum(int(worker.room) for worker in self.open_workers())

    def pump(self) -> None:
        while self.queue.waiting and (self.room() or not self.open_workers()) and self.queue.release():
            pass

    @rule(tenant=st.sampled_from("xy"), priority=st.integers(0, 1))
    def arrive(self, tenant: str, priority: int) -> None:
        request = Request(Failover(self.retry, MOST_LOSSES), self.clock.now + 50)
        self.requests.append(request)
        if not self.queue.waiting and (self.room() or not self.open_workers()):
            self.place(request)
            return

        def refuse(error: errors.ResourceExhaustedError) -> None:
            request.end = "refused"

        ticket = Ticket(tenant, priority, 1.0, request.deadline, lambda: self.place(request), refuse)
        try:
            self.queue.enter(ticket)
        except errors.ResourceExhaustedError as error:
            assert error.retry_after is not None
            request.end = "refused"

    @precondition(lambda self: self.running())
    @rule(data=st.data(), how=st.sampled_from(["first", "finish", "fault", "internal", "busy", "client", "leave"]))
    def event(self, data, how: str) -> None:
        request = data.draw(st.sampled_from(self.running()))
        name = request.worker.address
        if how == "first":
            self.end_permit(request, Outcome.SUCCESS)
        elif how == "finish":
            self.end_permit(request, Outcome.SUCCESS)
            self.over(request, "ok")
        elif how == "leave":
            self.end_permit(request, Outcome.NEUTRAL)
            self.over(request, "left")
        else:
            self.failed(request, KINDS[how]("x"), name)
        self.pump()

    @rule(name=st.sampled_from(NAMES), restart=st.booleans())
    def lose(self, name: str, restart: bool) -> None:
        worker = self.workers[name]
        if not worker.available:
            self.epochs[name] += restart
            self.up(name)
            if restart:
                self.plain[name].reset()
            self.pump()
            return
        self.registry.mark_down(worker, "gone")
        worker.breaker.fault()
        self.plain[name].fault(self.clock.now)
        for request in [request for request in self.running() if request.worker is worker]:
            self.failed(request, WorkerLostError("gone"), name)
        self.pump()

    @rule(name=st.sampled_from(NAMES))
    def drain_or_undrain(self, name: str) -> None:
        self.drained ^= {name}
        self.registry.set_draining(self.workers[name], name in self.drained)
        self.pump()

    @rule(name=st.sampled_from(NAMES))
    def replace(self, name: str) -> None:
        """The worker is removed, what runs on it continues on another worker, and another is named that is yet to come up."""
        worker = self.workers[name]
        self.registry.remove(worker)
        for request in [request for request in self.running() if request.worker is worker]:
            self.failed(request, WorkerLeftError("removed"), name)
        self.drained.discard(name)
        self.workers[name] = Worker(name, CircuitBreaker(BREAKER, self.clock), self.clock)
        self.plain[name] = PlainBreaker()
        self.registry.add(self.workers[name])
        self.pump()

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 3.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.pump()

    def end_permit(self, request: Request, outcome: Outcome) -> None:
        plain, now = self.plain[request.worker.address], self.clock.now
        if request.permit is None:
            return
        stale = plain.probe is not request and (plain.open_until is not None or request.begun.open_until is not None)
        before = request.worker.breaker.state
        request.permit.end(outcome)
        permit, request.permit = request.permit, None
        if permit.is_probe and plain.probe is request:
            plain.probe = None
            if outcome is Outcome.SUCCESS:
                plain.reset()
            elif outcome is Outcome.SERVER_FAULT:
                plain.reopen(now)
        elif stale or permit.is_probe:
            assert request.worker.breaker.state is before
        elif outcome is Outcome.SUCCESS:
            plain.faults = 0
        elif outcome is Outcome.SERVER_FAULT:
            plain.fault(now)

    def failed(self, request: Request, error: errors.SapwoodError, name: str) -> None:
        had_permit = request.permit is not None
        if had_permit:
            self.end_permit(request, outcome_of(error))
        self.leave_worker(request)
        request.losses += isinstance(error, WorkerLostError) and not isinstance(error, WorkerLeftError)
        request.moves += isinstance(error, WorkerLeftError)
        delay = request.failover.after(error, name, request.deadline)
        if isinstance(error, WorkerLostError):
            assert (delay is not None) == (request.losses <= MOST_LOSSES)
        elif isinstance(error, errors.InvalidArgumentError):
            assert delay is None
        elif delay is not None:
            self.retries.append(self.clock.now)
            assert self.clock.now < request.deadline
        if delay is None:
            request.end = "failed"
        else:
            self.place(request)

    def over(self, request: Request, how: str) -> None:
        self.leave_worker(request)
        request.end = how

    def leave_worker(self, request: Request) -> None:
        request.lease.release()
        request.lease.release()
        request.worker = request.lease = request.permit = None

    @invariant()
    def loads_are_what_runs(self) -> None:
        for worker in self.workers.values():
            here = [request for request in self.running() if request.worker is worker]
            assert worker.in_flight == len(here)
            assert worker.pending_tokens == sum(3 for _ in here)

    @invariant()
    def the_registry_offers_what_is_up_and_not_drained(self) -> None:
        up = [worker for name, worker in self.workers.items() if worker.available and name not in self.drained]
        assert set(self.registry.available("m")) == set(up)
        assert {worker.address for worker in self.registry.all()} == set(NAMES)

    @invariant()
    def breakers_are_where_the_plain_ones_are(self) -> None:
        for name, worker in self.workers.items():
            assert worker.breaker.admits() == self.plain[name].admits(self.clock.now), name

    @invariant()
    def each_request_is_in_one_place(self) -> None:
        waiting = sum(request.worker is None and request.end is None for request in self.requests)
        assert waiting == self.queue.waiting <= QUEUE
        assert not any(request.worker is not None and request.end is not None for request in self.requests)

    @invariant()
    def retries_are_bounded(self) -> None:
        assert sum(at > self.clock.now - 9.0 for at in self.retries) <= RETRY.reserve
        for request in self.requests:
            assert len(request.tries) <= RETRY.attempts + MOST_LOSSES + request.moves


Faults.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestFaults = Faults.TestCase
