"""``GET /ui/fleet``, asked each second: the models and, where that is open to clients, how router and workers are."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from sapwood_common.models.packaged import model_hint
from sapwood_router.edges.guard import Guard
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.origins import Origins
from sapwood_router.flow.adapters import adapter_states
from sapwood_router.flow.generation import Pipeline
from sapwood_router.observe.status import RouterState, WorkerState

_HEADERS = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))


class ModelView(msgspec.Struct):
    """A model that can be asked for, as ``ListModels`` shows it to every client, and what a newcomer should know of it."""

    id: str
    context_length: int
    workers: int
    hint: str


class LoraView(msgspec.Struct):
    """An adapter, as ``ListModels`` shows it to every client, and this router's requests with it that are running."""

    name: str
    model: str
    workers: int
    running: int


class WorkerRow(msgspec.Struct):
    """A worker: as ``ListWorkers`` tells operators. Shares are 0 to 1, None where there is nothing to share."""

    address: str
    model: str
    state: str
    problem: str
    breaker: str
    running: int
    waiting: int
    queued_tokens: int
    cache_used: float | None
    hit_rate: float | None
    tokens_per_second: float
    role: str
    host_used: float | None
    cache_tokens: int
    context_length: int
    weights: str


class RouterView(msgspec.Struct):
    """The router and its workers: as ``GetStatus`` tells operators; ``uptime`` in seconds."""

    uptime: float
    policy: str
    problem: str
    running: int
    queued: int
    resumptions: int
    tokens_per_second: float
    workers: list[WorkerRow]


class FleetAnswer(msgspec.Struct):
    """The answer; ``router`` is None where workers are shown to operators only."""

    models: list[ModelView]
    router: RouterView | None
    loras: list[LoraView]


class FleetPage:
    """Answers the page.

    Args:
        pipeline: Knows the models.
        guard: Asks for a key, if the router asks for keys; takes nothing from its rate.
        origins: Under which names the page may be.
        status: How the router and its workers are; None: that is for operators.
    """

    def __init__(
        self, pipeline: Pipeline, guard: Guard, origins: Origins, status: Callable[[], RouterState] | None
    ) -> None:
        self._registry = pipeline.registry
        self._guard = guard
        self._origins = origins
        self._status = status

    async def show(self, exchange: Exchange) -> None:
        """Sends the present state.

        Raises:
            HttpError: The page is of an origin, or under a name, that may not ask: 403.
            UnauthenticatedError: There is no key, or it is not known.
        """
        self._origins.check(exchange.headers)
        self._origins.check_host(exchange.headers)
        self._guard.recognise(exchange.headers)
        models = [
            ModelView(model, self._registry.context_length(model), len(workers), model_hint(model))
            for model, workers in sorted(self._registry.models().items())
        ]
        router = None if self._status is None else _view(self._status())
        loras = [
            LoraView(each.name, each.model, len(each.workers), each.in_flight)
            for each in adapter_states(self._registry.loras)
        ]
        await exchange.send_body(200, msgspec.json.encode(FleetAnswer(models, router, loras)), _HEADERS)


def _view(state: RouterState) -> RouterView:
    return RouterView(
        uptime=state.uptime,
        policy=state.policy,
        problem=state.problem,
        running=state.running,
        queued=state.queued,
        resumptions=state.resumptions,
        tokens_per_second=state.tokens_per_second,
        workers=[_row(worker) for worker in state.workers],
    )


def _row(worker: WorkerState) -> WorkerRow:
    load = worker.load
    return WorkerRow(
        address=worker.address,
        model=worker.model,
        state=worker.state,
        problem=worker.problem,
        breaker=worker.breaker,
        running=worker.load.running_requests,
        waiting=worker.load.waiting_requests,
        queued_tokens=worker.load.queued_tokens,
        cache_used=worker.used_share,
        hit_rate=worker.hit_rate,
        tokens_per_second=worker.tokens_per_second,
        role=worker.role,
        host_used=load.host_used_pages / load.host_num_pages if load.host_num_pages else None,
        cache_tokens=load.num_pages * worker.page_size,
        context_length=worker.context_length,
        weights=worker.weights,
    )
