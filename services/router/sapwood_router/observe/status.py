"""How a router and its workers are at one moment: the one source of ``GetStatus``, ``sapwood router top`` and /status."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sapwood_router.admission.control import AdmissionControl
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.served_model import Role
from sapwood_router.fleet.worker import RATE_SECONDS
from sapwood_router.observe.metrics import RouterMetrics
from sapwood_router.routing.worker_view import Load


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker as the router sees it.

    Attributes:
        role: What it does of a request: "both", "prefill" or "decode".
        address, model: Its address and its model's name, which is empty while it is not known.
        state: "up", "draining" or "down".
        draining: Whether it is given nothing new, up or not.
        problem: Why it is down.
        breaker: "closed", "open" or "half_open".
        epoch: Its scheduler's epoch; 0 while that is not known.
        in_flight: This router's requests on it.
        load: Its last report.
        proposed_role: The role that its load suggests; empty: its present role.
        proposed_because: Why.
        tokens_per_second: That it generated for this router, over the last ten seconds.
        page_size, context_length: Of its model, in tokens; 0 while it is not known.
        weights: What its weights are called; empty: it does not say.
    """

    address: str
    model: str
    state: str
    draining: bool
    problem: str
    breaker: str
    epoch: int
    in_flight: int
    load: Load
    tokens_per_second: float
    role: str = "both"
    proposed_role: str = ""
    proposed_because: str = ""
    page_size: int = 0
    context_length: int = 0
    weights: str = ""

    @property
    def used_share(self) -> float | None:
        """Share of its pages that running requests hold."""
        load = self.load
        return (load.used_pages - load.evictable_pages) / load.num_pages if load.num_pages else None

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens since its start that it had cached."""
        return self.load.cached_tokens / self.load.prompt_tokens if self.load.prompt_tokens else None


@dataclass(frozen=True, slots=True)
class RouterState:
    """A router and its workers. Holds neither prompts nor keys nor names of tenants.

    Attributes:
        uptime: Seconds.
        running: Generations under way.
        queued: Requests that wait for a worker with room.
        resumptions: Streams that continued, on another worker, since the start.
        problem: Why it cannot serve; empty if it can.
        policy: The policy of models that have none of their own.
        workers: All of them.
    """

    uptime: float
    running: int
    queued: int
    resumptions: int
    problem: str
    policy: str
    workers: tuple[WorkerState, ...]

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all workers generate a second."""
        return sum(worker.tokens_per_second for worker in self.workers)


class StatusBoard:
    """Makes the snapshots.

    Args:
        registry: Knows the workers.
        admission: Knows who waits.
        metrics: Counts.
        problem: Says why requests cannot be served, or None.
        policy: The default policy's name.
    """

    def __init__(
        self,
        registry: Registry,
        admission: AdmissionControl,
        metrics: RouterMetrics,
        problem: Callable[[], str | None],
        policy: str,
    ) -> None:
        self._registry = registry
        self._admission = admission
        self._metrics = metrics
        self._problem = problem
        self._policy = policy
        self._started = time.monotonic()

    def snapshot(self) -> RouterState:
        """The router's state now. Changes nothing."""
        return RouterState(
            uptime=time.monotonic() - self._started,
            running=self._metrics.requests_running,
            queued=self._admission.waiting,
            resumptions=self._metrics.resumed,
            problem=self._problem() or "",
            policy=self._policy,
            workers=tuple(
                WorkerState(
                    address=worker.address,
                    model=worker.model.model if worker.model is not None else "",
                    state="down" if not worker.available else "up" if worker.takes_new else "draining",
                    draining=worker.draining or worker.leaving,
                    problem="" if worker.available else worker.problem or "",
                    breaker=worker.breaker.state.value,
                    epoch=worker.model.epoch if worker.model is not None else 0,
                    in_flight=worker.in_flight,
                    load=worker.load,
                    tokens_per_second=worker.generated.total() / RATE_SECONDS,
                    role=(worker.model.role if worker.model is not None else Role.BOTH).value,
                    proposed_role="" if worker.proposed is None else worker.proposed[0].value,
                    proposed_because="" if worker.proposed is None else worker.proposed[1],
                    page_size=worker.model.page_size if worker.model is not None else 0,
                    context_length=worker.model.context_length if worker.model is not None else 0,
                    weights=worker.model.weight_version if worker.model is not None else "",
                )
                for worker in self._registry.all()
            ),
        )
