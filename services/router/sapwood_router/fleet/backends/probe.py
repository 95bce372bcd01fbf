"""Asks a backend for its models, again and again, and for its metrics. One that answers is healthy: OpenAI's API has no call for
health itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from sapwood_common.errors import NotFoundError, ResourceExhaustedError, SapwoodError
from sapwood_router.fleet.backends.server_load import load_of
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.served_model import ServedModel
from sapwood_router.fleet.worker import Worker
from sapwood_router.routing.worker_view import Load
from sapwood_router.transport.backend.spec import BackendSpec

if TYPE_CHECKING:
    from sapwood_router.transport.backend.client import Backend, ListedModel

logger = logging.getLogger(__name__)

_MOST_MISSES = 3
"""Probes in a row that may fail: a backend that computes may be slow to list its models."""
_PAGE_SIZE, _NUM_PAGES = 16, 65_536
"""A backend's cache is assumed to have pages of 64 bytes of text and to hold the last 4 MB that it was sent."""
_MOST_NAMED = 5
_SKIPPED = 12
"""Probes without a question for the load after one that a server did not answer."""


def served_by(spec: BackendSpec, listed: ListedModel | None, epoch: int) -> ServedModel:
    """A backend's models, as far as it lists them."""
    name = spec.name or spec.model or (listed.id if listed is not None else "")
    length = 0 if listed is None else listed.context_length
    return ServedModel(name, length, vocab_size=0, page_size=_PAGE_SIZE, num_pages=_NUM_PAGES, epoch=epoch)


class BackendProbe:
    """Keeps one backend's entry in the registry true.

    Args:
        worker: The backend as a member of the fleet.
        backend: The client that asks it.
        registry: Where it is marked up and down.
        interval: Seconds between two probes, and most seconds that each waits for an answer.
        on_loss: Called when it went down.
    """

    def __init__(
        self, worker: Worker, backend: Backend, registry: Registry, interval: float, on_loss: Callable[[Worker], None]
    ) -> None:
        self._worker = worker
        self._backend = backend
        self._registry = registry
        self._interval = interval
        self._on_loss = on_loss
        self._misses = 0
        self._epoch = 0
        self._skipped = 0
        """Probes until it is asked for its load again."""

    async def run(self) -> None:
        """Asks for ever; cancel it to stop."""
        while True:
            await self.ask()
            await asyncio.sleep(self._interval)

    async def ask(self) -> None:
        """Asks once."""
        backend = self._backend
        try:
            listed = await backend.models(self._interval)
        except (NotFoundError, ResourceExhaustedError) as error:
            if backend.model:  # it lists none, or has enough to do: its answers will tell
                self._up(None)
            else:
                self._failed(error.message)
        except SapwoodError as error:
            self._failed(error.message)
        else:
            self._found(listed)
        if self._worker.available:
            await self._ask_load()

    async def _ask_load(self) -> None:
        """Asks for its load, which has other routers' and clients' requests, too. Not every server says anything; one with a key,
        such as a vendor's, is not asked.
        """
        if self._backend.spec.authorization:
            return
        if self._skipped:
            self._skipped -= 1
            return
        try:
            load = load_of(await self._backend.metrics(self._interval))
        except SapwoodError:
            load = None
        if load is None:
            self._skipped = _SKIPPED
        self._worker.report(load or Load())

    def _found(self, listed: list[ListedModel]) -> None:
        wanted = self._backend.spec.model
        if wanted:
            # One that is not listed may be there all the same: vendors list neither aliases nor all that an account has.
            self._up(next((model for model in listed if model.id == wanted), None))
        elif len(listed) == 1:
            self._backend.model = listed[0].id
            self._up(listed[0])
        else:
            names = ", ".join(model.id for model in listed[:_MOST_NAMED]) + ", ..." * (len(listed) > _MOST_NAMED)
            self._down(f"it lists {len(listed)} models ({names}): name one")

    def _up(self, listed: ListedModel | None) -> None:
        worker, backend = self._worker, self._backend
        self._misses = 0
        backend.gone.clear()
        if listed is not None:
            backend.owner = listed.owner
        if not worker.available:
            self._epoch += 1
            self._registry.mark_up(worker, served_by(backend.spec, listed, self._epoch))
            if worker.available:
                logger.info("backend %s is up", worker.address)

    def _failed(self, problem: str) -> None:
        self._misses += 1
        if self._misses >= _MOST_MISSES or not self._worker.available:
            self._down(problem)

    def _down(self, problem: str) -> None:
        worker = self._worker
        if worker.available:
            logger.warning("backend %s is down: %s", worker.address, problem)
            self._on_loss(worker)
        self._backend.gone.set()
        self._registry.mark_down(worker, problem)
