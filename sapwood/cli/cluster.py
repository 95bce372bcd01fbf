"""A local cluster: tokenizer, workers and router as child processes, started, watched and stopped in order."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sapwood.cli.child import Child
from sapwood.cli.errors import CliError
from sapwood.cli.restarts import Restarts

ResultT = TypeVar("ResultT")

_POLL_SECONDS = 0.1
_METRICS_OFFSET = 40_900
"""From a service's port down to that of its /metrics: 50052 has 9152, 50061 has 9161."""


@dataclass(frozen=True)
class Endpoints:
    """Where a cluster answers, each as ``host:port``."""

    grpc: str
    http: str
    tokenizer: str
    workers: tuple[str, ...]


@dataclass(frozen=True)
class ClusterOptions:
    """What a cluster is made of. Port 0 takes a free one.

    Attributes:
        model: ``demo``, a .gguf file or a Hugging Face directory.
        workers: How many.
        threads: Of each worker's computations.
        policy: The router's.
        host: The router listens there; the others on 127.0.0.1.
        port: The router's gRPC port.
        http_port: The router's HTTP port.
        tokenizer_port: The tokenizer's.
        worker_port: The first worker's; the others follow. 0: all free ones.
        log_level: Of all services.
        drain_timeout: Seconds that running requests get at the end.
    """

    model: str
    workers: int
    threads: int
    policy: str
    host: str
    port: int
    http_port: int
    tokenizer_port: int
    worker_port: int
    log_level: str
    drain_timeout: float


class DiedError(CliError):
    """A service ended by itself; the message has its exit code and last lines."""

    def __init__(self, child: Child) -> None:
        last = "".join(f"\n  {line}" for line in child.last_lines) or " (none)"
        super().__init__(f"{child.name} {_end_of(child)}; its last lines:{last}")


class Cluster:
    """Life cycle: construct, :meth:`start`, :meth:`watch` for as long as it shall run, :meth:`stop` in any case.

    Args:
        options: What to start.
        on_line: Gets name and text of each line a service logs.
        on_status: Gets a line about what is being waited for, several times a second, while starting or stopping.
    """

    def __init__(
        self, options: ClusterOptions, on_line: Callable[[str, str], None], on_status: Callable[[str], None]
    ) -> None:
        self._options = options
        self._on_line = on_line
        self._on_status = on_status
        self._tokenizer: Child | None = None
        self._workers: list[Child] = []
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
        """Starts workers that end anew, on their ports.

        Raises:
            DiedError: Another service ended, or a worker did so again and again.
        """
        await self._or_death(
            self._keep_all(), [child for child in (self._tokenizer, self._router) if child is not None]
        )

    async def _keep_all(self) -> None:
        await asyncio.gather(*(self._keep(index) for index in range(len(self._workers))))

    async def _keep(self, index: int) -> None:
        restarts = Restarts(time.monotonic)
        while True:
            worker = self._workers[index]
            await worker.exited.wait()
            worker.kill()  # what it may have left behind
            delay, address = restarts.next_delay(), await worker.address()
            if delay is None or address is None:
                raise DiedError(worker)
            self._on_line(worker.name, f"{worker.name} {_end_of(worker)}: it is started anew in {delay:g} s")
            await asyncio.sleep(delay)
            flags = self._worker_flags(int(address.rpartition(":")[2]))
            self._workers[index] = await self._child("worker", flags, worker.name)

    async def stop(self) -> None:
        """Drains: first the router, so that running requests still have their workers; then workers, then tokenizer."""
        for group in ([self._router], self._workers, [self._tokenizer]):
            running = [child for child in group if child is not None and not child.exited.is_set()]
            for child in running:
                child.signal(signal.SIGTERM)
            start = time.monotonic()
            while not all(child.exited.is_set() for child in running):
                names = ", ".join(child.name for child in running if not child.exited.is_set())
                self._on_status(f"stopping {names}: {time.monotonic() - start:.0f} s (Ctrl-C again kills)")
                # A service gives up on its requests after its own drain timeout; one that does not end then hangs.
                if time.monotonic() - start > self._options.drain_timeout + 10:
                    self.kill()
                await asyncio.sleep(_POLL_SECONDS)
        self.kill()
        self._on_status("")

    def kill(self) -> None:
        """Ends every process at once."""
        for child in self._children():
            child.kill()

    def _children(self) -> list[Child]:
        return [child for child in (self._tokenizer, *self._workers, self._router) if child is not None]

    async def _start(self) -> Endpoints:
        options = self._options
        common = self._common_flags()
        self._tokenizer = await self._child(
            "tokenizer", ["--model", options.model, *_ports(options.tokenizer_port), *common]
        )
        for index in range(options.workers):
            port = options.worker_port + index if options.worker_port else 0
            self._workers.append(await self._child("worker", self._worker_flags(port), f"worker-{index}"))
        backends = [self._tokenizer, *self._workers]
        tokenizer, *workers = await asyncio.gather(*(self._address(child) for child in backends))
        self._router = await self._child(
            "router",
            [
                *("--host", options.host, "--port", str(options.port), "--http-port", str(options.http_port)),
                *("--tokenizer", tokenizer, "--policy", options.policy, *common, "--workers", *workers),
            ],
        )
        # Only now, with all children started, is gRPC used here: it does not like a fork after it has threads.
        await asyncio.gather(*(self._healthy(child) for child in backends))
        grpc_address = _reachable(await self._address(self._router, "gRPC"))
        http_address = _reachable(await self._address(self._router, "HTTP"))
        await self._healthy(self._router, grpc_address)
        await self._joined(grpc_address, len(workers))
        return Endpoints(grpc_address, http_address, tokenizer, tuple(workers))

    def _common_flags(self) -> list[str]:
        return ["--log-level", self._options.log_level, "--drain-timeout", f"{self._options.drain_timeout:g}"]

    def _worker_flags(self, port: int) -> list[str]:
        options = self._options
        return ["--model", options.model, *_ports(port), "--threads", str(options.threads), *self._common_flags()]

    async def _child(self, service: str, flags: list[str], name: str | None = None) -> Child:
        name = name or service
        self._states[name] = "starting"
        return await Child.start(name, f"sapwood_{service}", flags, self._on_line)

    async def _address(self, child: Child, kind: str = "") -> str:
        address = await child.address(kind)
        if address is None:
            raise DiedError(child)
        self._states[child.name] = "loading"
        return address

    async def _healthy(self, child: Child, address: str | None = None) -> None:
        """Waits until the service reports SERVING; for how long, is the caller's matter."""
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        async with grpc.aio.insecure_channel(address or await self._address(child)) as channel:
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

    async def _joined(self, address: str, workers: int) -> None:
        """Waits until the router has found every worker healthy."""
        from sapwood.client import AsyncClient, SapwoodError

        async with AsyncClient(address, timeout=5) as client:
            while True:
                try:
                    known = await client.list_workers()
                    if sum(worker.healthy for worker in known) == workers:
                        return
                except SapwoodError:
                    pass
                await asyncio.sleep(_POLL_SECONDS)

    async def _or_death(self, work: Awaitable[ResultT], watched: Sequence[Child] | None = None) -> ResultT:
        """What ``work`` returns, unless a child ends first: one of ``watched``, or of all there are then."""
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


def _ports(port: int) -> tuple[str, ...]:
    """The flags for a service's port and that of its metrics; where that is none for ordinary users, a free one."""
    metrics = port - _METRICS_OFFSET
    return ("--port", str(port), "--metrics-port", str(metrics if metrics >= 1024 else 0))


def _end_of(child: Child) -> str:
    code = child.exit_code or 0
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _reachable(address: str) -> str:
    """An address to connect to from here, for one that is listened on."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]", "::") else address
