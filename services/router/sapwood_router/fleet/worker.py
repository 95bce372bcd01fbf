"""One worker as the router sees it: address, model, health and load."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from sapwood_net.pacing.sliding_count import SlidingCount
from sapwood_router.fleet.circuit_breaker import CircuitBreaker
from sapwood_router.fleet.served_model import Role, ServedModel
from sapwood_router.fleet.session import WorkerSession
from sapwood_router.routing.worker_view import Load, WorkerView

if TYPE_CHECKING:  # its HTTP client takes 15 MB, also where there is no backend
    from sapwood_router.transport.backend.client import Backend

RATE_SECONDS = 10.0
"""Over how many seconds ``Worker.generated`` counts."""
PROMPT_SECONDS = 20.0
"""Over how many seconds ``Worker.prompted`` and ``Worker.prompts`` count."""
_HALF_LIFE = 60.0
"""Seconds after which work handed out counts half in ``recent_work``."""
_REQUEST_WORK = 256
"""The amount that a request adds to ``recent_work`` besides its prefill: an estimate for its answer."""


class Lease:
    """A request's share of its worker's load, from selection until it is released, whatever happens in between."""

    def __init__(self, worker: Worker, tokens: int, tenant: str, *, hands_off: bool, embeds: bool) -> None:
        self._worker = worker
        self._tenant = tenant
        self._running = worker.running
        self._running[tenant] = self._running.get(tenant, 0) + 1
        self._tokens = tokens
        self._hands_off = hands_off
        self._embeds = embeds
        self._held = True
        self._generating = False
        worker.in_flight += 1
        worker.handing_off += hands_off
        worker.embedding += embeds
        worker.pending_tokens += tokens

    def prefilled(self) -> None:
        """The first output came: nothing of the prompt is left to do. May be called again."""
        self._prompt_is_over()
        if self._held and not self._generating and not self._embeds:
            self._generating = True
            self._worker.generating += 1

    def release(self) -> None:
        """The request is over. May be called again."""
        if self._held:
            self._held = False
            worker = self._worker
            self._prompt_is_over()
            worker.generating -= self._generating
            worker.handing_off -= self._hands_off
            worker.embedding -= self._embeds
            worker.in_flight -= 1
            left = self._running[self._tenant] - 1
            if left:
                self._running[self._tenant] = left
            else:
                del self._running[self._tenant]
            worker.on_room()

    def _prompt_is_over(self) -> None:
        """It is computed, or given up with the request."""
        if self._tokens:
            self._worker.pending_tokens -= self._tokens
            self._worker.prompted.add(self._tokens)
            self._worker.prompts.add()
            self._tokens = 0


class Worker:
    """A worker, its session and this router's account of its load.

    Mutable; written by its connection (session, model, availability, load) and by leases, all on the one event loop.

    Args:
        address: ``host:port`` or any gRPC target; a backend's ``URL`` or ``URL#MODEL``.
        breaker: Its circuit breaker.
        clock: Seconds, monotonic.
        on_room: Called after a request has left it.
        backend: The client that calls it over HTTP; None: it is called over a session.
    """

    # A request looks at a dozen workers of a thousand, which no cache holds: what it reads of each lies in few places.
    __slots__ = (
        "_clock", "_foreign_requests", "_foreign_tokens", "_recent", "_recent_at", "_storage_id", "_used_share", "address",
        "available", "backend", "breaker", "draining", "embedding", "generated", "generating", "handing_off", "in_flight", "kept",
        "leaving", "load", "loop_lag", "model", "most_requests", "on_room", "pending_tokens", "problem", "prompted", "prompts",
        "proposed", "running", "session", "step_seconds",
    )  # fmt: skip

    def __init__(
        self,
        address: str,
        breaker: CircuitBreaker,
        clock: Callable[[], float],
        on_room: Callable[[], None] = lambda: None,
        backend: Backend | None = None,
    ) -> None:
        self.address = address
        self.backend = backend
        self.breaker = breaker
        self.session: WorkerSession | None = None
        self.model: ServedModel | None = None
        self.available = False
        """Whether it is connected and takes requests."""
        self.draining = False
        """Whether an operator wants it to get no new requests."""
        self.proposed: tuple[Role, str] | None = None
        """The role that its load suggests, and why; None: its present role."""
        self.leaving = False
        """True if no source names it any more: it finishes its requests."""
        self.problem: str | None = "not reached yet"
        self.most_requests = math.inf
        """The most requests that this router has running on it at a time."""
        self.kept = 0
        """How many of these places are for tenants who have few requests running."""
        self.running: dict[str, int] = {}
        """Requests running by tenant, on all workers of its model."""
        self.in_flight = 0
        self.pending_tokens = 0
        self.generating = 0
        """This router's requests on it that have their first token."""
        self.handing_off = 0
        """Requests in flight whose prompt it only computes: another worker will generate."""
        self.embedding = 0
        """Requests in flight that generate nothing."""
        self.prompted = SlidingCount(PROMPT_SECONDS, clock)
        """Prompt tokens that it has computed lately."""
        self.prompts = SlidingCount(PROMPT_SECONDS, clock)
        """Prompts that these tokens were of."""
        self.step_seconds = 0.0
        """Seconds that it has been at its current step, as last reported."""
        self.loop_lag = 0.0
        """Seconds by which its event loop has been late, as last reported."""
        self.load = Load()
        self.generated = SlidingCount(RATE_SECONDS, clock)
        """Tokens that came from it lately."""
        self.on_room = on_room
        self._clock = clock
        self._used_share = 0.0
        self._storage_id = ""
        self._foreign_requests = 0
        self._foreign_tokens = 0
        self._recent = 0.0
        self._recent_at = clock()

    @property
    def takes_new(self) -> bool:
        """Whether it may be given requests that are new."""
        asleep = self.model is not None and self.model.asleep
        return self.available and not (self.draining or self.leaving or asleep)

    @property
    def room(self) -> float:
        """How many more requests it may be given; not less than 0."""
        return max(0.0, self.most_requests - self.in_flight)

    @property
    def open_room(self) -> float:
        """How many more requests of tenants who have many running it may be given; not less than 0."""
        return max(0.0, self.most_requests - self.kept - self.in_flight)

    def report(self, load: Load) -> None:
        """Takes a pushed report. Its load beyond this router's own requests is other routers' work."""
        self.load = load
        self._used_share = (load.used_pages - load.evictable_pages) / load.num_pages if load.num_pages else 0.0
        self._storage_id = load.storage_id
        self._foreign_requests = max(0, load.running_requests + load.waiting_requests - self.in_flight)
        self._foreign_tokens = max(0, load.queued_tokens - self.pending_tokens)

    def lease(self, tokens: int, tenant: str = "", *, hands_off: bool = False, embeds: bool = False) -> Lease:
        """Counts a request with ``tokens`` prompt tokens to prefill. The caller releases it.

        Args:
            tokens: How many.
            tenant: Whose it is.
            hands_off: Whether another worker will generate.
            embeds: Whether nobody will.
        """
        now = self._clock()
        self._recent = self._recent * math.exp2((self._recent_at - now) / _HALF_LIFE) + tokens + _REQUEST_WORK
        self._recent_at = now
        return Lease(self, tokens, tenant, hands_off=hands_off, embeds=embeds)

    def view(self) -> WorkerView:
        """The worker at this moment, for a policy. Needs ``model``."""
        assert self.model is not None
        return WorkerView(
            self.address,
            self.model.page_size,
            self.in_flight + self._foreign_requests,
            self.pending_tokens + self._foreign_tokens,
            self._used_share,
            self._recent * math.exp2((self._recent_at - self._clock()) / _HALF_LIFE),
            self._storage_id,
        )
