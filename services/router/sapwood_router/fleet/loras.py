"""The adapters (LoRA) of all workers: which there are, where they come from, and which workers their requests go to.

What there is, workers report: each adapter's name, path, version and digest. The latest version counts. So every router knows the
adapters that any of them, or an operator at a worker, had loaded, and places them on other workers by the path that was reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from sapwood_common.errors import InvalidArgumentError, NotFoundError
from sapwood_router.fleet.served_model import Role, ServedModel
from sapwood_router.routing.lora_placement import LoraPlacement


class WorkerLora(msgspec.Struct, frozen=True):
    """An adapter as a worker reports it; fields as in ``LoraState`` of ``worker.proto``.

    Attributes:
        loaded: Whether it is in the worker's memory.
    """

    name: str
    path: str
    version: int
    digest: bytes
    loaded: bool


@dataclass(frozen=True, slots=True)
class FleetLora:
    """An adapter, in its latest version.

    Attributes:
        model: The model that it changes.
        name: Its name.
        path: Where it can be loaded from.
        version: When that was asked for.
        digest: Of the weights; empty: no worker has loaded them.
        workers: Addresses of the workers that have this version in memory.
    """

    model: str
    name: str
    path: str
    version: int
    digest: bytes
    workers: frozenset[str]


class FleetLoras:
    """The adapters. Lives on one event loop.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reports: dict[str, tuple[str, dict[str, WorkerLora]]] = {}
        self._known: dict[str, dict[str, FleetLora]] = {}
        self._models_of: dict[str, tuple[str, ...]] = {}
        # By model and role.
        self._places: dict[tuple[str, Role], LoraPlacement] = {}
        self._slots: dict[tuple[str, Role], dict[str, int]] = {}
        self._in_flight: dict[tuple[str, str], int] = {}

    # What there is.

    def report(self, address: str, model: str, loras: Iterable[WorkerLora]) -> None:
        """A worker says which adapters it has."""
        before, report = self._reports.get(address), (model, {each.name: each for each in loras})
        if before != report:
            self._reports[address] = report
            self._settle(model)

    def add(self, address: str, model: str, lora: WorkerLora) -> None:
        """A worker has just loaded an adapter; its next report says so, too."""
        if address in self._reports:
            self.report(
                address, model, [*(each for each in self._reports[address][1].values() if each.name != lora.name), lora]
            )
        else:
            self.report(address, model, [lora])

    def forget_worker(self, address: str) -> None:
        """The worker is down or gone: nothing is known of its adapters."""
        report = self._reports.pop(address, None)
        if report is not None:
            self._settle(report[0])

    def unloaded(self, model: str, name: str) -> None:
        """The adapter was unloaded everywhere: it is not known any more, whatever late reports say of it meanwhile."""
        for own, loras in self._reports.values():
            if own == model:
                loras.pop(name, None)
        self._settle(model)
        for (own, _), placement in self._places.items():
            if own == model:
                placement.forget(name)

    def known(self, model: str) -> Mapping[str, FleetLora]:
        """A model's adapters, by name."""
        return self._known.get(model, {})

    def all(self) -> list[FleetLora]:
        """All adapters, by model and name."""
        return [self._known[model][name] for model in sorted(self._known) for name in sorted(self._known[model])]

    def find(self, model: str, name: str) -> FleetLora | None:
        """An adapter of a model; None: no worker knows it."""
        return self._known.get(model, {}).get(name)

    def meant(self, text: str, models: Mapping[str, object], resolving: Iterable[str]) -> tuple[str, str] | None:
        """The model and the adapter that a text means, ``MODEL:NAME`` or ``NAME``; None: it can mean none.

        Args:
            text: What a request calls its model; not the name of a model.
            models: The models that there are.
            resolving: Models whose workers look for adapters that they do not know.

        Raises:
            InvalidArgumentError: Several models have an adapter of this name.
            NotFoundError: The model has no such adapter.
        """
        model, colon, name = text.rpartition(":")
        if colon and model in models:
            if name in self.known(model) or model in resolving:
                return model, name
            raise NotFoundError(f"the model {model!r} has no adapter {name[:100]!r}", field="model")
        owners = self._models_of.get(text, ())
        if len(owners) > 1:
            named = ", ".join(f"{each}:{text}" for each in owners)
            raise InvalidArgumentError(f"several models have an adapter {text!r}: name one of {named}", field="model")
        if owners:
            return owners[0], text
        found = tuple(resolving)
        return (found[0], text) if len(found) == 1 and ":" not in text else None

    # Where its requests go.

    def workers_are(self, model: str, workers: Iterable[tuple[str, ServedModel]]) -> None:
        """These are the available workers of a model now, by address. Those of each role have places for all adapters."""
        slots: dict[Role, dict[str, int]] = {}
        for address, served in workers:
            if served.lora_slots:
                slots.setdefault(served.role, {})[address] = served.lora_slots
        for role in Role:
            if slots.get(role, {}) != self._slots.get((model, role), {}):
                self._slots[model, role] = slots.get(role, {})

    def holders(self, model: str, name: str) -> list[str]:
        """Addresses of the workers that an adapter's requests go to, of each role the preferred one first; empty: no worker has
        slots."""
        return [
            address
            for (own, role), slots in self._slots.items()
            if own == model and slots
            for address in self._placement(model, role).holders(name, slots)
        ]

    def places(self, model: str, name: str) -> list[str]:
        """What :meth:`holders` named last; empty: nobody has asked for the adapter lately."""
        return [
            address
            for (own, _), placement in self._places.items()
            if own == model
            for address in placement.places(name)
        ]

    def asked(self, model: str, name: str) -> None:
        """A request for an adapter has come."""
        for (own, role), slots in self._slots.items():
            if own == model and slots:
                self._placement(model, role).asked(name)

    def begun(self, model: str, name: str, change: int) -> None:
        """A request for an adapter has begun (1) or ended (-1) at a worker."""
        count = self._in_flight.get((model, name), 0) + change
        if count:
            self._in_flight[model, name] = count
        else:
            self._in_flight.pop((model, name), None)

    def in_flight(self, model: str, name: str) -> int:
        """An adapter's requests that run at workers for this router."""
        return self._in_flight.get((model, name), 0)

    def per_minute(self, model: str, name: str) -> float:
        """About how many requests a minute an adapter has had lately."""
        return max(
            (placement.per_minute(name) for (own, _), placement in self._places.items() if own == model), default=0.0
        )

    def missing(self) -> list[tuple[str, FleetLora]]:
        """Workers that should have an adapter and do not, each with the adapter; those that requests go to, or went to lately."""
        found = []
        for (model, role), placement in self._places.items():
            placement.lapse()
            slots = self._slots.get((model, role), {})
            for name in placement.names():
                lora = self.find(model, name)
                if lora is not None and lora.path and slots:
                    held = placement.holders(name, slots)
                    found += [(address, lora) for address in held if address not in lora.workers]
        return found

    def _placement(self, model: str, role: Role) -> LoraPlacement:
        found = self._places.get((model, role))
        if found is None:
            found = self._places[model, role] = LoraPlacement(self._clock)
        return found

    def _settle(self, model: str) -> None:
        """Works out a model's adapters again. O(reports of its workers)."""
        latest: dict[str, WorkerLora] = {}
        holders: dict[str, set[str]] = {}
        for address, (own, loras) in self._reports.items():
            if own != model:
                continue
            for name, lora in loras.items():
                best = latest.get(name)
                if best is None or (lora.version, lora.loaded) > (best.version, best.loaded):
                    if best is None or lora.version > best.version:
                        holders[name] = set()
                    latest[name] = lora
                if lora.loaded and lora.version == latest[name].version:
                    holders[name].add(address)
        self._known[model] = {
            name: FleetLora(model, name, each.path, each.version, each.digest, frozenset(holders[name]))
            for name, each in latest.items()
        }
        owners: dict[str, list[str]] = {}
        for each, known in self._known.items():
            for name in known:
                owners.setdefault(name, []).append(each)
        self._models_of = {name: tuple(sorted(models)) for name, models in owners.items()}
