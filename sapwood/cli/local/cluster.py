"""A local cluster: tokenizer, workers and router as child processes, started, watched and stopped in order."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from sapwood.cli.errors import CliError
from sapwood.cli.local.child import Child
from sapwood.cli.local.gpus import VISIBLE
from sapwood.cli.services import Service, Services
from sapwood_net.sockets.unix_socket import is_unix

ResultT = TypeVar("ResultT")

_POLL_SECONDS = 0.1
_METRICS_OFFSET = 40_900
"""A service's port less that of its /metrics: 50052 has 9152, 50061 has 9161."""


@dataclass(frozen=True)
class Endpoints:
    """The addresses of a cluster, each as ``host:port``."""

    grpc: str
    http: str
    tokenizer: str
    workers: tuple[str, ...]


class DiedError(CliError):
    """A service ended by itself; the message has its exit code and last lines.

    Attributes:
        what: The first part of the message, for those who have seen the lines.
    """

    def __init__(self, child: Child) -> None:
        last = "".join(f"\n  {line}" for line in child.last_lines) or " (none)"
        self.what = f"{child.name} {_end_of(child)}"
        super().__init__(f"{self.what}; its last lines:{last}")


class Cluster:
    """Life cycle: construct, :meth:`start`, :meth:`watch` for as long as it shall run, :meth:`stop` in any case.

    Args:
        services: The services to start.
        on_line: Gets name and text of each line a service logs.
        on_status: Gets a line about what is being waited for, several times a second, while starting or stopping.
    """

    def __init__(
        self, services: Services, on_line: Callable[[str, str], None], on_status: Callable[[str], None]
    ) -> None:
        self._services = services
        self._on_line = on_line
        self._on_status = on_status
        self._tokenizer: Child | None = None
        self._workers: dict[int, Child] = {}
        self._router: Child | None = None
        self._states: dict[str, str] = {}

    async def start(self) -> Endpoints:
        """Starts everything and returns once the router has every worker and all are healthy.

        Raises:
            DiedError: A service ended meanwhile.
        """
        status = asyncio.create_task(self._show_states())
        try:
            return await self._or_death(self._start())
        finally:
            status.cancel()
            self._on_status("")

    async def watch(self) -> None:
        """Starts the tokenizer and workers that end again, on their ports.

        Raises:
            DiedError: The router ended, or another service did so again and again.
        """
        await self._or_death(self._keep_all(), [child for child in (self._router,) if child is not None])

    async def _keep_all(self) -> None:
        assert self._tokenizer is not None
        workers = (self._keep(child, partial(self._start_worker, index)) for index, child in self._workers.items())
        await asyncio.gather(self._keep(self._tokenizer, self._start_tokenizer), *workers)

    async def _keep(self, child: Child, start: Callable[[int], Awaitable[Child]]) -> None:
        restarts, address = Restarts(time.monotonic), await self._address(child)
        while True:
            await child.exited.wait()
            child.kill()  # ends processes that it may have left behind
            delay = restarts.next_delay()
            if delay is None:
                raise DiedError(child)
            self._on_line(child.name, f"{child.name} {_end_of(child)}: it is started again in {delay:g} s")
            await asyncio.sleep(delay)
            child = await start(int(address.rpartition(":")[2]))

    async def stop(self) -> None:
        """Drains: first the router, so that running requests still have their workers; then workers, then tokenizer."""
        for group in ([self._router], [*self._workers.values()], [self._tokenizer]):
            running = [child for child in group if child is not None and not child.exited.is_set()]
            for child in running:
                child.signal(signal.SIGTERM)
            start = time.monotonic()
            while not all(child.exited.is_set() for child in running):
                names = ", ".join(child.name for child in running if not child.exited.is_set())
                self._on_status(f"stopping {names}: {time.monotonic() - start:.0f} s (Ctrl-C again kills)")
                # A service ends its requests after its own drain timeout; one that does not exit then hangs.
                if time.monotonic() - start > self._services.drain_timeout + 10:
                    self.kill()
                await asyncio.sleep(_POLL_SECONDS)
        self.kill()
        self._on_status("")

    def kill(self) -> None:
        """Ends every process at once."""
        for child in self._children():
            child.kill()

    def _children(self) -> list[Child]:
        return [child for child in (self._tokenizer, *self._workers.values(), self._router) if child is not None]

    async def _start(self) -> Endpoints:
        services = self._services
        backends = [await self._start_tokenizer()]
        for index in range(services.workers):
            backends.append(await self._start_worker(index))  # noqa: PERF401 - one that fails to start ends those before
        # Each logs its address once it is ready.
        addresses = [await self._address(child) for child in backends]
        tokenizer, *workers = map(_reachable, addresses)
        self._router = await self._child(services.router, services.front, self._of_router(tokenizer, workers))
        # gRPC is used here only once all children are started: it does not support a fork once it has threads.
        grpc_address = _reachable(await self._address(self._router, "gRPC"))
        http_address = _reachable(await self._address(self._router, "HTTP"))
        has_tls = services.router.config.tls_cert is not None
        await self._healthy(self._router, await self._address(self._router, "health") if has_tls else grpc_address)
        operators = await self._operators_address(self._router, grpc_address)
        if operators is not None:
            await self._joined(operators, set(workers))
        return Endpoints(grpc_address, http_address, tokenizer, tuple(workers))

    async def _start_tokenizer(self, port: int | None = None) -> Child:
        """Starts the tokenizer, on ``port`` (its own before a restart) or on the configured one."""
        tokenizer = self._services.tokenizer
        self._tokenizer = await self._child(tokenizer, "tokenizer", _ports(tokenizer, 0, port))
        return self._tokenizer

    async def _start_worker(self, index: int, port: int | None = None) -> Child:
        """Starts a worker, on ``port`` (its own before a restart) or on the configured one."""
        worker = self._services.worker
        roles, gpus = self._services.roles, self._services.gpus
        changes = _ports(worker, index, port) | ({"role": roles[index]} if roles else {})
        self._workers[index] = await self._child(
            worker, f"worker-{index}", changes, {VISIBLE: gpus[index]} if gpus else None
        )
        return self._workers[index]

    def _of_router(self, tokenizer: str, workers: list[str]) -> dict[str, Any]:
        """The router's settings that depend on the other services, besides those given by flags."""
        router = self._services.router
        settings: dict[str, Any] = {
            "tokenizer": ",".join([tokenizer, *filter(None, [router.given.get("tokenizer")])]),
            "workers": [*workers, *router.given.get("workers", ())],
        }
        if router.config.tls_cert is not None and router.config.health_port.port is None:
            settings["health_port"] = 0  # only this port answers without certificates
        return settings

    async def _operators_address(self, router: Child, grpc_address: str) -> str | None:
        """The address at which the router lists its workers without a key; None: there is none."""
        config = self._services.router.config
        if config.tls_cert is not None:
            return None
        if config.admin_port is not None:
            return _reachable(await self._address(router, "admin"))
        return None if config.separates_operators else grpc_address

    async def _child(
        self, service: Service[Any], name: str, changes: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> Child:
        self._states[name] = "starting"
        flags = service.command_line(changes)
        variables = service.environment(changes) | dict(environment or {})
        return await Child.start(name, f"sapwood_{service.name}", flags, self._on_line, service.reworded, variables)

    async def _address(self, child: Child, kind: str = "") -> str:
        address = await child.address(kind)
        if address is None:
            raise DiedError(child)
        self._states[child.name] = "ready" if child is not self._router else "waiting"
        return address

    async def _healthy(self, child: Child, address: str) -> None:
        """Waits until the service reports SERVING, without a time limit."""
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                try:
                    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        break
                except grpc.aio.AioRpcError:
                    pass
                await asyncio.sleep(_POLL_SECONDS)
        self._states[child.name] = "ready"

    async def _joined(self, address: str, workers: set[str]) -> None:
        """Waits until the router has found each of these workers healthy."""
        from sapwood.client import AsyncClient, SapwoodError

        async with AsyncClient(address, timeout=5) as client:
            while True:
                try:
                    known = await client.list_workers()
                    if workers <= {worker.address for worker in known if worker.healthy}:
                        return
                except SapwoodError:
                    pass
                await asyncio.sleep(_POLL_SECONDS)

    async def _or_death(self, work: Awaitable[ResultT], watched: Sequence[Child] | None = None) -> ResultT:
        """Returns the result of ``work``. Raises DiedError if a child of ``watched`` (None: of all) ends first."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_POLL_SECONDS)
                dead = next((child for child in watched or self._children() if child.exited.is_set()), None)
                if dead is not None:
                    raise DiedError(dead)
            return task.result()
        finally:
            task.cancel()

    async def _show_states(self) -> None:
        start = time.monotonic()
        while True:
            states = "  ".join(f"{name} {state}" for name, state in self._states.items()) or "starting"
            self._on_status(f"{states}  {time.monotonic() - start:.0f} s")
            await asyncio.sleep(_POLL_SECONDS)


def _ports(service: Service[Any], further: int = 0, port: int | None = None) -> dict[str, int]:
    """A service's ports, with ``port`` in place of its own if it has one already.

    The port of its metrics is derived from its own, or a free one where ordinary users may not use that.
    """
    ports = service.ports(further)
    if is_unix(service.config.host):  # any number is free in a folder of one's own
        return ports if port is None else ports | {"port": port}
    beside = ports["port"] - _METRICS_OFFSET
    ports.setdefault("metrics_port", beside if beside >= 1024 else 0)
    return ports if port is None else ports | {"port": port}


def _end_of(child: Child) -> str:
    code = child.exit_code or 0
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _reachable(address: str) -> str:
    """The address to connect to, for a listening address such as 0.0.0.0."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]", "::") else address


# Decides whether and when to restart a process that ended: with growing pauses, a limited number of times.
MOST = 5
WINDOW = 600.0
_FIRST_DELAY = 0.5
_LONGEST_DELAY = 30.0


class Restarts:
    """The restarts of one process: at most MOST in WINDOW seconds, each after twice the pause before the last one.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: deque[float] = deque()

    def next_delay(self) -> float | None:
        """Seconds until the restart, which is counted; None if there have been too many."""
        now = self._clock()
        while self._times and self._times[0] <= now - WINDOW:
            self._times.popleft()
        if len(self._times) >= MOST:
            return None
        delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** len(self._times))
        self._times.append(now)
        return delay
