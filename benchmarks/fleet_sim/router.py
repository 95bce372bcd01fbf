"""A router's real parts, without its sockets: registry, admission, policy, indexes and the followers of KV events."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fleet_sim.events import Events
from fleet_sim.worker import EPOCH

from sapwood.v1 import worker_pb2
from sapwood_common.errors import ResourceExhaustedError
from sapwood_router.admission.control import AdmissionControl, Place
from sapwood_router.admission.fair_queue import AdmissionSettings
from sapwood_router.fleet.circuit_breaker import BreakerSettings, CircuitBreaker, Outcome
from sapwood_router.fleet.eligibility import Demand
from sapwood_router.fleet.kv_event_monitor import KvEventFollower
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.served_model import ServedModel
from sapwood_router.fleet.worker import Lease, Worker
from sapwood_router.flow.attempts import acquire
from sapwood_router.flow.select import choose
from sapwood_router.request.caller import NOBODY
from sapwood_router.routing.factory import PolicyParts, make_policy
from sapwood_router.routing.index.blocks import BlockIndex
from sapwood_router.routing.policies.base import PromptPages
from sapwood_router.routing.policy_book import Shadowed

MODEL = "m"


@dataclass(slots=True)
class Times:
    """CPU time of this thread for each request, in ns."""

    hash: list[int] = field(default_factory=list)
    select: list[int] = field(default_factory=list)
    acquire: list[int] = field(default_factory=list)
    finish: list[int] = field(default_factory=list)
    events: int = 0
    """For all events, in ns."""
    pages: int = 0
    """Pages that the events stored and removed."""


@dataclass(frozen=True, slots=True)
class Placement:
    address: str
    lease: Lease
    end: Callable[[], None]


class SimulatedRouter:
    """One router. Its exact index lives on from run to run; all else begins again."""

    def __init__(
        self,
        addresses: Sequence[str],
        page_size: int,
        pages: int,
        max_running: int,
        index_bytes: tuple[int, int],
        events: Events,
        seed: int,
    ) -> None:
        self.blocks = BlockIndex(index_bytes[1])
        self.times = Times()
        self.reads_events = False
        self._addresses = addresses
        self._page_size, self._pages, self._max_running = page_size, pages, max_running
        self._index_bytes = index_bytes[0]
        self._events = events
        self._rng = random.Random(seed)
        self._followers = {address: KvEventFollower(address, self.blocks) for address in addresses}

    def begin(self, policy: str) -> None:
        clock = self._events.clock
        self.times = Times()
        workers = [
            Worker(address, CircuitBreaker(BreakerSettings(), clock), clock, self._pump) for address in self._addresses
        ]
        self.registry = Registry(workers, most_requests=lambda model: 2 * model.max_running)
        self.admission = AdmissionControl(self.registry, AdmissionSettings(), clock, self._rng)
        made = make_policy(policy, PolicyParts(self._index_bytes, self._rng, clock, self.blocks))
        self.reads_events = made.reads_events
        self.policy = Shadowed(made, {}, lambda name, agrees: None)
        model = ServedModel(MODEL, 1 << 20, 1 << 20, self._page_size, self._pages, EPOCH, self._max_running)
        for worker in workers:
            made.reset(worker.address, self._pages)
        # One after the other each would make the list of all again: that is for joining, not for a start.
        for worker in workers[:-1]:
            worker.model, worker.available = model, True
            worker.most_requests = 2 * self._max_running
        self.registry.mark_up(workers[-1], model)

    def hear(self, address: str, raw: bytes) -> None:
        """A worker's KV event has arrived; it is read here, so that this router has a copy of its own."""
        begin = time.thread_time_ns()
        message = worker_pb2.SubscribeKvEventsResponse.FromString(raw)
        self._followers[address].apply(message)
        self.times.events += time.thread_time_ns() - begin
        self.times.pages += sum(
            len(each.block_stored.block_hashes) + len(each.block_removed.block_hashes) for each in message.events
        )

    def reserve(self, cost: int, deadline: float) -> Place | None:
        """None: the request is refused."""
        try:
            return self.admission.reserve(MODEL, NOBODY, cost, deadline)
        except ResourceExhaustedError:
            return None

    def place(self, prompt: PromptPages) -> Placement:
        """Stages 2 and 3 of the router's flow."""
        times = self.times
        begin = time.thread_time_ns()
        prompt.hashes(self._page_size)
        hashed = time.thread_time_ns()
        demand = Demand(MODEL, len(prompt.token_ids), "prompt")
        worker, choice = choose(demand, prompt, self.registry, self.policy)
        chosen = time.thread_time_ns()
        lease, permit = acquire(worker, choice, prompt, self.policy)
        end = time.thread_time_ns()
        times.hash.append(hashed - begin)
        times.select.append(chosen - hashed)
        times.acquire.append(end - chosen)
        return Placement(worker.address, lease, lambda: permit.end(Outcome.SUCCESS))

    def finished(self, placement: Placement, prompt: PromptPages, answer: list[int]) -> None:
        begin = time.thread_time_ns()
        placement.end()
        placement.lease.release()
        self.policy.finished(placement.address, self._page_size, prompt, answer)
        self.times.finish.append(time.thread_time_ns() - begin)

    def _pump(self) -> None:
        self.admission.pump()
