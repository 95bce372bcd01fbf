"""Which workers the router knows: named by several sources, added, drained and removed while it runs.

A worker is there as long as some source names it: the configuration, a watched file, a DNS name, or its registration, which
lapses unless it is renewed in time. When no source names it any more, it drains: it gets nothing new, its requests finish, and
it is removed once it is idle or gone. (Kubernetes stops naming a pod when its grace period begins, not when it is over.) When
an operator removes it, it is gone at once, and its requests continue on another worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from sapwood_common.errors import InvalidArgumentError, NotFoundError
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.worker import Worker
from sapwood_router.routing.policy_book import PolicyBook
from sapwood_router.transport.backend.spec import has_credentials

logger = logging.getLogger(__name__)

CONFIGURED = "configuration"
_REGISTERED = "registration "


class Fleet:
    """Adds and removes workers. All on one event loop.

    Args:
        registry: Where the workers are.
        policies: Called for workers that are gone.
        make: Makes a worker.
        watch: Starts what follows a worker; the tasks are cancelled when it is removed.
        on_removed: Called with the address of a worker that is gone.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        registry: Registry,
        policies: PolicyBook,
        make: Callable[[str], Worker],
        watch: Callable[[Worker], Iterable[asyncio.Task[None]]],
        on_removed: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._policies = policies
        self._make = make
        self._watch = watch
        self._on_removed = on_removed
        self._clock = clock
        self._sources: dict[str, frozenset[str]] = {}
        self._leases: dict[str, float] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}

    def name(self, source: str, addresses: Iterable[str]) -> None:
        """A source names these workers now, and no others."""
        self._sources[source] = frozenset(addresses)
        self._reconcile()

    def register(self, address: str, lease: float | None) -> None:
        """A worker is announced; again before ``lease`` seconds are over, or it is removed. None: for good.

        Raises:
            InvalidArgumentError: Its address is a URL with credentials, and addresses are shown.
        """
        if has_credentials(address):
            raise InvalidArgumentError("an address is shown: credentials belong in --backends", field="address")
        if lease is not None:
            self._leases[address] = self._clock() + lease
        else:
            self._leases.pop(address, None)
        self.name(_REGISTERED + address, [address])

    def drain(self, address: str, draining: bool) -> int:
        """Stops giving the worker new requests, or begins again; what runs on it finishes.

        Returns how many requests run on it.

        Raises:
            NotFoundError: There is no such worker.
        """
        worker = self._find(address)
        if draining and not worker.draining:
            self.hand_over(worker)
        self._registry.set_draining(worker, draining)
        return worker.in_flight

    def hand_over(self, worker: Worker) -> None:
        """Notes that the worker drains: its recent prefixes go to workers that serve the same model."""
        if worker.model is not None:
            heirs = [other.address for other in self._registry.available(worker.model.model) if other is not worker]
            self._policies.drained(worker.address, heirs)

    def remove(self, address: str) -> None:
        """Forgets a worker at once, from whatever source it came; the configuration, file or DNS name names it again only when it
        changes.

        Raises:
            NotFoundError: There is no such worker.
        """
        worker = self._find(address)
        self._leases.pop(address, None)
        for source, addresses in self._sources.items():
            self._sources[source] = addresses - {address}
        self._forget(worker)

    def lapse(self) -> None:
        """Ends registrations whose lease is over, and removes workers that no source names and on which nothing runs.

        To be called now and then.
        """
        now = self._clock()
        for address in [address for address, until in self._leases.items() if until <= now]:
            del self._leases[address]
            logger.warning("worker %s did not renew its registration", address)
            self.name(_REGISTERED + address, [])
        for worker in self._registry.all():
            gone = worker.backend is None and worker.session is None
            if worker.leaving and (worker.in_flight == 0 or gone):
                self._forget(worker)

    def _find(self, address: str) -> Worker:
        for worker in self._registry.all():
            if worker.address == address:
                return worker
        raise NotFoundError(f"there is no worker {address!r}", field="address")

    def _reconcile(self) -> None:
        wanted = frozenset().union(*self._sources.values())
        self._sources = {source: named for source, named in self._sources.items() if named}
        present = {worker.address: worker for worker in self._registry.all()}
        for address in sorted(wanted - set(present)):
            worker = self._make(address)
            self._registry.add(worker)
            self._tasks[address] = list(self._watch(worker))
            logger.info("worker %s added", address)
        for worker in present.values():
            if worker.leaving != (worker.address not in wanted):
                self._set_leaving(worker, not worker.leaving)

    def _set_leaving(self, worker: Worker, leaving: bool) -> None:
        logger.info("worker %s is %s", worker.address, "no longer named: it drains" if leaving else "named again")
        if leaving and worker.takes_new:
            self.hand_over(worker)
        self._registry.set_leaving(worker, leaving)

    def _forget(self, worker: Worker) -> None:
        self._registry.remove(worker)
        for task in self._tasks.pop(worker.address, []):
            task.cancel()
        self._policies.reset(worker.address, 0)
        self._on_removed(worker.address)
        logger.info("worker %s removed", worker.address)
