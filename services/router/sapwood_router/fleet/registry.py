"""Which workers there are and which of them can take a request."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from sapwood_common.errors import InvalidArgumentError, NotFoundError, UnavailableError
from sapwood_common.telemetry.shown_text import shown
from sapwood_router.fleet.loras import FleetLoras
from sapwood_router.fleet.served_model import Role, ServedModel
from sapwood_router.fleet.worker import Worker
from sapwood_router.request.embed_request import Labels
from sapwood_router.routing.worker_view import Load

RETRY_AFTER = 1.0
"""Seconds that a client should wait when nobody can take its request: about when a restarted worker is found again."""
_LONGEST_NAME = 512
"""Characters of a model's name."""
_SHARERS = 4
"""How many tenants the kept places are enough for: one tenant may have at most this fraction of them."""
_KEPT = 1 / 16
"""The share of a worker's places that is kept for tenants who have few requests running."""


def is_name(model: str) -> bool:
    """Whether a model's name is one that clients can use, and that can be shown as it is."""
    return 0 < len(model) <= _LONGEST_NAME and shown(model, _LONGEST_NAME) == model


class Registry:
    """All workers, and for each model the available ones, in a tuple that is made again only when something changes.

    Args:
        workers: The workers, in the order they were configured.
        on_change: Called after each change of availability.
        on_reset: Called with a worker's address and its model when what it had cached is gone: it restarted (or was
            first seen).
        most_requests: How many requests at a time a worker that serves this is given.
        loras: The workers' adapters.

    Attributes:
        loras: The argument.
    """

    def __init__(
        self,
        workers: Iterable[Worker],
        on_change: Callable[[], None] = lambda: None,
        on_reset: Callable[[str, ServedModel], None] = lambda address, model: None,
        most_requests: Callable[[ServedModel], float] = lambda model: math.inf,
        loras: FleetLoras | None = None,
    ) -> None:
        self.loras = FleetLoras() if loras is None else loras
        self._resolving: frozenset[str] = frozenset()
        """Models whose workers look for adapters that they do not know."""
        self._workers = {worker.address: worker for worker in workers}
        self._available: dict[str, tuple[Worker, ...]] = {}
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._weights: dict[str, bytes] = {}
        self._kinds: dict[str, frozenset[tuple[Role, int]]] = {}
        self._mixed: frozenset[str] = frozenset()
        """Models whose available workers have several roles."""
        self._models: dict[str, tuple[Worker, ...]] = {}
        self._relayed: frozenset[str] = frozenset()
        self._on_change = on_change
        self._on_reset = on_reset
        self._most_requests = most_requests
        self._kept: dict[str, int] = {}
        """Places that the available workers of each model keep, all together."""
        self._running: dict[str, dict[str, int]] = {}
        """Model -> tenant -> its running requests."""
        self._changed = asyncio.Event()

    def all(self) -> tuple[Worker, ...]:
        """Every worker, available or not."""
        return tuple(self._workers.values())

    def add(self, worker: Worker) -> None:
        """There is one more worker; it is down until it is marked up."""
        self._workers[worker.address] = worker

    def remove(self, worker: Worker) -> None:
        """The worker is no longer one of them."""
        del self._workers[worker.address]
        self.loras.forget_worker(worker.address)
        worker.available = False
        worker.problem = "it was removed"
        self._refresh()

    def set_draining(self, worker: Worker, draining: bool) -> None:
        """An operator wants the worker to get no new requests, or no longer wants so."""
        worker.draining = draining
        self._refresh()

    def set_leaving(self, worker: Worker, leaving: bool) -> None:
        """No source names the worker any more, or one does again."""
        worker.leaving = leaving
        self._refresh()

    def models(self) -> dict[str, tuple[Worker, ...]]:
        """Every model that a worker has served so far, with its available workers."""
        return dict(self._models)

    def page_size(self, address: str) -> int:
        """The tokens of a page of a worker's cache; 0: there is no such worker, or it has no cache of ours."""
        worker = self.find(address)
        return 0 if worker is None or worker.model is None or worker.backend is not None else worker.model.page_size

    def context_lengths(self) -> dict[str, int]:
        """The longest context of every model that a worker has served so far, in tokens."""
        return {model: self.context_length(model) for model in self._models}

    def context_length(self, model: str) -> int:
        """The longest context that any worker of a known model has, in tokens."""
        served = (worker.model for worker in self._workers.values() if worker.model is not None)
        return max(item.context_length for item in served if item.model == model)

    def longest_context(self) -> int:
        """The longest context of any model, in tokens; 0 while none is known."""
        served = (worker.model for worker in self._workers.values() if worker.model is not None)
        return max((item.context_length for item in served), default=0)

    def sampling_defaults(self, model: str) -> Mapping[str, float]:
        """Settings of sampling that a model's files give, for requests that do not set them."""
        served = (worker.model for worker in self._workers.values() if worker.model is not None)
        return next((item.sampling_defaults for item in served if item.model == model), {})

    def labels(self, model: str) -> Labels | None:
        """The labels of a known model with a head that classifies; None: it has no such head."""
        served = (worker.model for worker in self._workers.values() if worker.model is not None)
        return next((item.labels for item in served if item.model == model), None)

    def embeds(self, model: str) -> bool:
        """Whether a worker makes embeddings with a known model."""
        served = (worker.model for worker in self._workers.values() if worker.model is not None)
        return any(item.embedding_size for item in served if item.model == model)

    @property
    def has_backends(self) -> bool:
        """Whether there is a model that only backends have now."""
        return bool(self._relayed)

    def relays(self, model: str | None) -> bool:
        """Whether requests for a model go to backends, because no available worker has it."""
        if not self._relayed:
            return False
        if not model:
            return len(self._models) == 1 == len(self._relayed)
        return model in self._relayed

    def resolve(self, model: str | None, field: str = "model") -> str:
        """The model a request means: the one it names, or the only one there is; an empty name is none.

        Raises:
            NotFoundError: No worker serves it.
            InvalidArgumentError: None was named and there are several; or only backends have it, which take no tokens.
            UnavailableError: No worker has been reached yet, so nothing is known.
        """
        if model in self._models and model not in self._relayed:
            return model  # the usual case
        resolved = self.resolve_any(model, field)
        if resolved in self._relayed:
            raise InvalidArgumentError(
                f"model {resolved!r} is a backend's: only POST /v1/chat/completions and /v1/completions ask it",
                field=field,
            )
        return resolved

    def resolve_any(self, model: str | None, field: str = "model") -> str:
        """The same, also for a model that only backends have. Raises as :meth:`resolve`."""
        known = self._models
        if not known:
            raise UnavailableError("no worker is available", retry_after=RETRY_AFTER)
        if not model:
            if len(known) > 1:
                raise InvalidArgumentError(f"name a model: there are {', '.join(sorted(known))}", field=field)
            return next(iter(known))
        if model not in known:
            meant = self.loras.meant(model, known, self._resolving)
            if meant is not None:
                return meant[0]
            raise NotFoundError(f"there is no model {model[:100]!r}; there is {', '.join(sorted(known))}", field=field)
        return model

    def lora_of(self, model: str | None) -> str:
        """The adapter that a request names as its model, ``MODEL:NAME`` or ``NAME``; empty: it names none.

        Raises:
            NotFoundError, InvalidArgumentError: As :meth:`resolve_any`.
        """
        if not model or model in self._models or not self._models:
            return ""
        meant = self.loras.meant(model, self._models, self._resolving)
        return "" if meant is None else meant[1]

    def check_lora(self, model: str, name: str, field: str = "lora_name") -> None:
        """Raises NotFoundError if no worker of a model knows an adapter, and none would look for it."""
        if model not in self._resolving and self.loras.find(model, name) is None:
            raise NotFoundError(f"the model {model!r} has no adapter {name[:100]!r}", field=field)

    def available(self, model: str) -> tuple[Worker, ...]:
        """The workers that can take a request for a model now; the tuple never changes."""
        return self._available.get(model, ())

    def addresses(self, model: str) -> tuple[str, ...]:
        """Those of :meth:`available`, in the same order; the same tuple until a worker comes or goes."""
        return self._addresses.get(model, ())

    def has_roles(self, model: str) -> bool:
        """Whether the available workers of a model have several roles."""
        return model in self._mixed

    def weights_of(self, model: str) -> bytes:
        """What stands for the weights of most available workers of a model in the names of pages; empty: those of the start."""
        return self._weights.get(model, b"")

    def page_sizes(self, model: str) -> tuple[int, ...]:
        """The sizes of the pages that available workers of a model have, each once; not those of backends."""
        return tuple({size for _, size in self._kinds.get(model, ())})

    def has_few(self, model: str, tenant: str, more: int = 0) -> bool:
        """True if a tenant has so few requests running that it may use the places that workers keep for such tenants.

        Args:
            model: Whose workers.
            tenant: Who.
            more: How many of the tenant's requests are about to choose a worker.
        """
        running = self._running.get(model, {}).get(tenant, 0) + more
        return not running or running < self._kept.get(model, 0) // _SHARERS

    def find(self, address: str) -> Worker | None:
        """The worker of an address."""
        return self._workers.get(address)

    def any_available(self) -> bool:
        """Whether some worker can take a request."""
        return bool(self._available)

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change of availability; there is a new one after each."""
        return self._changed

    def mark_up(self, worker: Worker, model: ServedModel) -> None:
        """The worker answered and serves ``model``. Does nothing for one that was removed.

        A model whose name clients could not use, and that logs and lists could not show, leaves its worker down.
        """
        if self._workers.get(worker.address) is not worker:
            return
        if not is_name(model.model):
            self.mark_down(worker, f"the name of its model is none that clients could use: {model.model[:80]!r}")
            return
        if worker.available and worker.model == model:
            return
        restarted = worker.model is None or worker.model.epoch != model.epoch
        worker.model = model
        worker.most_requests = self._most_requests(model)
        worker.kept = _kept(worker.most_requests, model.max_running)
        worker.running = self._running.setdefault(model.model, {})
        worker.problem = None
        worker.available = True
        if restarted:
            worker.report(Load())
            worker.breaker.reset()
            self._on_reset(worker.address, model)
        self._refresh()

    def mark_down(self, worker: Worker, problem: str) -> None:
        """The worker cannot take requests until it is marked up again."""
        worker.problem = problem
        if worker.available:
            worker.available = False
            self.loras.forget_worker(worker.address)
            self._refresh()

    def _refresh(self) -> None:
        grouped: dict[str, list[Worker]] = {}
        for worker in self._workers.values():
            if worker.takes_new and worker.model is not None:
                grouped.setdefault(worker.model.model, []).append(worker)
        self._available = {model: tuple(workers) for model, workers in grouped.items()}
        self._kept = {model: sum(each.kept for each in workers) for model, workers in grouped.items()}
        self._weights = {
            model: Counter(each.model.weights for each in workers if each.model is not None).most_common(1)[0][0]
            for model, workers in grouped.items()
        }
        self._addresses = {model: tuple(each.address for each in workers) for model, workers in grouped.items()}
        self._kinds = {
            model: frozenset(
                (each.model.role, each.model.page_size)
                for each in workers
                if each.model is not None and not each.backend
            )
            for model, workers in grouped.items()
        }
        self._mixed = frozenset(model for model, kinds in self._kinds.items() if len({role for role, _ in kinds}) > 1)
        known: dict[str, tuple[Worker, ...]] = {
            worker.model.model: () for worker in self._workers.values() if worker.model is not None
        }
        self._models = known | self._available
        for model in self._models:
            available = self._available.get(model, ())
            self.loras.workers_are(model, [(each.address, each.model) for each in available if each.model is not None])
        self._resolving = frozenset(
            model
            for model, workers in self._available.items()
            if any(each.model is not None and each.model.resolves_loras for each in workers)
        )
        self._relayed = frozenset(_relayed(self._workers.values()))
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()


def _kept(most: float, max_running: int) -> int:
    """Places of a worker that are kept for tenants who have few requests running: no more than it has beyond those that run."""
    if not max_running or most == math.inf:
        return 0
    return int(max(0.0, min(most * _KEPT, most - max_running)))


def _relayed(workers: Iterable[Worker]) -> set[str]:
    """The models that backends have and no worker serves now."""
    backends, served = set(), set()
    for worker in workers:
        if worker.model is not None:
            if worker.backend is not None:
                backends.add(worker.model.model)
            elif worker.takes_new:
                served.add(worker.model.model)
    return backends - served
