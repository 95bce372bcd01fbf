"""Has workers load and unload adapters (LoRA): as operators ask, and where requests go whose workers have not loaded theirs."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc

from sapwood.v1 import worker_pb2, worker_pb2_grpc
from sapwood_common.errors import InvalidArgumentError, NotFoundError, SapwoodError, UnavailableError
from sapwood_common.network.channel import Dialer
from sapwood_common.settings.flags import service_flag
from sapwood_common.status import from_rpc_error
from sapwood_common.telemetry.shown_text import without_credentials
from sapwood_router.fleet.loras import FleetLora, WorkerLora
from sapwood_router.fleet.registry import Registry

logger = logging.getLogger(__name__)

_LOAD_SECONDS = 600.0
_SECONDS = 30.0
_INTERVAL = 0.25
"""Seconds between two looks at which workers lack adapters."""
_AT_ONCE = 2
"""Adapters that one worker loads at a time."""
_PAUSE = 10.0
"""Seconds after which a load that failed is tried again."""


class LoraControl:
    """Tells workers. Lives on one event loop.

    Args:
        registry: Knows the workers and their adapters.
        dialer: Connects to workers.
    """

    def __init__(self, registry: Registry, dialer: Dialer) -> None:
        self._registry = registry
        self._dialer = dialer
        self._loading: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._failed: dict[tuple[str, str], tuple[int, float]] = {}

    # As operators ask.

    async def load(self, name: str, path: str, model: str | None, *, pinned: bool = False) -> FleetLora:
        """Loads an adapter on the workers that its requests will go to, and in the place of an older one of its name everywhere.

        Args:
            name: Its name.
            path: Where it is, on the workers' machines.
            model: The model that it changes; None: the only one there is.
            pinned: Whether it stays in the workers' memory.

        Raises:
            InvalidArgumentError: It is wrong, or so is its name.
            UnavailableError: No worker has slots for adapters.
            SapwoodError: A worker has refused it. If it was the first one, nothing has changed.
        """
        model = self._registry.resolve(model)
        if name in self._registry.models():
            raise InvalidArgumentError(f"{name!r} is the name of a model", field="name")
        loras = self._registry.loras
        before = loras.find(model, name)
        if not path and before is None:
            raise InvalidArgumentError("path is missing: there is no such adapter yet", field="path")
        path = path or (before.path if before is not None else "")
        places = loras.holders(model, name)
        if not places:
            flag = service_flag("worker", "lora-slots")
            raise UnavailableError(f"no worker of {model!r} has slots for adapters: {flag} gives some", retry_after=1.0)
        version = time.time_ns()
        request = worker_pb2.LoadLoraRequest(name=name, path=path, pinned=pinned, version=version)
        first, *others = places
        try:
            await self._load_on(first, model, request)
            workers = [each for each in self._registry.available(model) if each.model and each.model.lora_slots]
            replacing = worker_pb2.LoadLoraRequest(name=name, path=path, version=version, only_replace=True)
            await asyncio.gather(
                *(self._load_on(address, model, request) for address in others),
                *(self._load_on(each.address, model, replacing) for each in workers if each.address not in places),
            )
        except SapwoodError:
            if loras.find(model, name) is None:
                loras.unloaded(model, name)
            raise
        found = loras.find(model, name)
        assert found is not None
        return found

    async def unload(self, name: str, *, abort: bool = False) -> int:
        """Unloads an adapter from all workers of all models; returns how many requests still run with it.

        Args:
            name: Its name, or ``MODEL:NAME``.
            abort: Whether they end now.

        Raises:
            NotFoundError: No worker knows it.
            SapwoodError: A worker did not do so.
        """
        found = [each for each in self._registry.loras.all() if name in (each.name, f"{each.model}:{each.name}")]
        if not found:
            raise NotFoundError(f"there is no adapter {name[:100]!r}", field="name")
        running = 0
        for lora in found:
            for key in [key for key in self._loading if key[1] == lora.name]:
                self._loading.pop(key).cancel()
            self._registry.loras.unloaded(lora.model, lora.name)
            workers = [each for each in self._registry.available(lora.model) if each.backend is None]
            request = worker_pb2.UnloadLoraRequest(name=lora.name, abort_requests=abort)
            running += sum(
                await asyncio.gather(
                    *(
                        self._unload_on(each.address, request)
                        for each in workers
                        if each.model and each.model.lora_slots
                    )
                )
            )
        return running

    async def _load_on(self, address: str, model: str, request: worker_pb2.LoadLoraRequest) -> None:
        """Has a worker load an adapter, and notes that it has."""
        channel = self._dialer.open(address)
        try:
            answer = await worker_pb2_grpc.WorkerStub(channel).LoadLora(request, timeout=_LOAD_SECONDS)
            state = answer.lora.state
            if answer.HasField("lora") and state.version == request.version:
                lora = WorkerLora(state.name, request.path, state.version, state.digest, True)
                self._registry.loras.add(address, model, lora)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            await channel.close()

    async def _unload_on(self, address: str, request: worker_pb2.UnloadLoraRequest) -> int:
        channel = self._dialer.open(address)
        try:
            answer = await worker_pb2_grpc.WorkerStub(channel).UnloadLora(request, timeout=_SECONDS)
            return int(answer.running_requests)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return 0  # this one had never loaded it
            raise from_rpc_error(error) from error
        finally:
            await channel.close()

    # Where requests go.

    async def run(self) -> None:
        """Has workers load what they lack, for ever; cancel it to stop."""
        try:
            while True:
                await asyncio.sleep(_INTERVAL)
                self.fill()
        finally:
            for task in self._loading.values():
                task.cancel()

    def fill(self) -> None:
        """Begins the loads that are due."""
        now = time.monotonic()
        missing = self._registry.loras.missing()
        self._failed = {key: failed for key, failed in self._failed.items() if failed[1] > now}
        for address, lora in missing:
            key = (address, lora.name)
            failed = self._failed.get(key)
            if key in self._loading or (failed is not None and failed[0] == lora.version):
                continue
            if sum(other == address for other, _ in self._loading) < _AT_ONCE:
                self._loading[key] = asyncio.create_task(self._fill(key, lora))

    async def _fill(self, key: tuple[str, str], lora: FleetLora) -> None:
        address, name = key
        request = worker_pb2.LoadLoraRequest(name=name, path=lora.path, version=lora.version)
        try:
            await self._load_on(address, lora.model, request)
        except SapwoodError as error:
            self._failed[key] = lora.version, time.monotonic() + _PAUSE
            logger.warning(
                "worker %s did not load adapter %s from %s: %s",
                *(address, name, without_credentials(lora.path), error.message),
            )
        finally:
            if self._loading.get(key) is asyncio.current_task():
                del self._loading[key]
