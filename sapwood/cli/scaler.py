"""`sapwood scaler`: looks at a router, plans how many workers there should be, and starts and stops them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sapwood.cli.errors import REFUSED, CliError
from sapwood.cli.router import add_router_verb, router_stub
from sapwood.cli.scale.drivers import Driver, KubernetesDriver, LocalDriver, NoDriver, kubernetes_api
from sapwood.cli.scale.objective import FirstTokens
from sapwood.cli.terminal import one_line
from sapwood.scaler.plan import Bounds, Plan
from sapwood_common.settings.flags import number, whole_number

if TYPE_CHECKING:
    from sapwood.v1 import router_pb2, router_pb2_grpc

logger = logging.getLogger(__name__)

_ROLES = ("both", "prefill", "decode")
_TIMEOUT = 10.0
_LEASE = 4
"""Looks after which a router forgets a worker that is not registered again."""


def configure(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser = add_router_verb(verbs, "scaler", "plan workers for a router's load, and start and stop them", _run)
    add = parser.add_argument
    add(
        "--per-worker", nargs="+", required=True, metavar="[ROLE=]REQUESTS", type=_of_role(_positive),
        help="Requests at a time with which a worker keeps the objective (`sapwood bench` finds it), for each role that is "
        "scaled: both, prefill, decode. [default role: both]",
    )  # fmt: skip
    add("--min", type=_count, default=1, metavar="WORKERS", help="Least workers of a role. [default: 1]")
    add("--max", type=_count, default=64, metavar="WORKERS", help="Most workers of a role. [default: 64]")
    add(
        "--start", type=_positive, default=60.0, metavar="SECONDS",
        help="Until a new worker takes requests: load is forecast so far ahead. [default: 60]",
    )  # fmt: skip
    add(
        "--patience", type=_positive, default=300.0, metavar="SECONDS",
        help="For which a worker is not needed before it goes. [default: 300]",
    )  # fmt: skip
    add("--interval", type=_positive, default=15.0, metavar="SECONDS", help="Between two looks. [default: 15]")
    add(
        "--objective", metavar="SECONDS,URL",
        help="99 %% of the first tokens are to come within these seconds by the router's /metrics at this URL; while they do "
        "not, a worker is believed to do less. [default: only the load counts]",
    )  # fmt: skip
    add(
        "--kubernetes", nargs="+", default=[], metavar="[ROLE=]NAMESPACE/KIND/NAME", type=_of_role(str),
        help="The statefulset or deployment whose replicas are set. [default: nothing is]",
    )  # fmt: skip
    add(
        "--metrics", metavar="HOST:PORT",
        help="Where /metrics is served with sapwood_scaler_wanted_workers, for KEDA and others who scale. [default: nowhere]",
    )  # fmt: skip
    add(
        "worker", nargs="*", metavar="-- WORKER FLAG",
        help="flags of `python -m sapwood_worker`: workers of the role both are started on this machine",
    )  # fmt: skip


def _positive(text: str) -> float:
    value = number(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _count(text: str) -> int:
    value = whole_number()(text)
    if not 0 <= value <= 65_535:
        raise argparse.ArgumentTypeError(f"{text} is not 0 to 65535")
    return value


def _of_role(parse: Callable[[str], Any]) -> Callable[[str], tuple[str, Any]]:
    """Reads ``ROLE=VALUE``, or a value for the role both."""

    def read(text: str) -> tuple[str, Any]:
        role, equals, value = text.partition("=")
        if not equals:
            role, value = "both", text
        if role not in _ROLES:
            raise argparse.ArgumentTypeError(f"{role!r} is none of {', '.join(_ROLES)}")
        try:
            return role, parse(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{value!r} is no number") from None

    return read


class _Router:
    """Asks the router; each call in a thread of its own."""

    def __init__(self, stub: router_pb2_grpc.RouterStub, interval: float) -> None:
        from sapwood.v1 import router_pb2

        self._stub = stub
        self._pb = router_pb2
        self._lease = _LEASE * interval + _TIMEOUT

    async def status(self) -> router_pb2.GetStatusResponse:
        """How it is."""
        found: router_pb2.GetStatusResponse = await self._ask("GetStatus", self._pb.GetStatusRequest())
        return found

    async def register(self, address: str) -> None:
        """See :class:`Operators`."""
        await self._ask("RegisterWorker", self._pb.RegisterWorkerRequest(address=address, lease_seconds=self._lease))

    async def drain(self, address: str, *, undo: bool = False) -> None:
        """See :class:`Operators`."""
        await self._ask("DrainWorker", self._pb.DrainWorkerRequest(address=address, undo=undo))

    async def remove(self, address: str) -> None:
        """See :class:`Operators`."""
        await self._ask("RemoveWorker", self._pb.RemoveWorkerRequest(address=address))

    async def _ask(self, method: str, request: Any) -> Any:
        return await asyncio.to_thread(getattr(self._stub, method), request, timeout=_TIMEOUT)


def requests_of(
    status: router_pb2.GetStatusResponse, role: str, roles: list[str]
) -> tuple[float, list[str], list[str]]:
    """The requests that run and wait for workers of a role, its workers that take requests, and those that have some.

    Requests that wait in the router are counted for the role where they begin.

    Args:
        status: The router's.
        role: Which.
        roles: All roles that are scaled.
    """
    from sapwood.generation import role_name

    requests, serving, busy = 0.0, [], []
    for worker in status.workers:
        if role_name(worker.role) != role:
            continue
        here = max(worker.in_flight, worker.load.running_requests + worker.load.waiting_requests)
        requests += here
        if worker.healthy and not worker.draining:
            serving.append(worker.address)
        if here:
            busy.append(worker.address)
    begins = "prefill" if "prefill" in roles else "both" if "both" in roles else roles[0]
    return requests + (status.queued_requests if role == begins else 0), serving, busy


def _drivers(arguments: argparse.Namespace, router: _Router) -> dict[str, Driver]:
    roles = dict(arguments.per_worker)
    if len(roles) < len(arguments.per_worker):
        raise CliError("--per-worker names a role twice", REFUSED)
    if arguments.min > arguments.max:
        raise CliError("--min is more than --max", REFUSED)
    drivers: dict[str, Driver] = {role: NoDriver() for role in roles}
    if arguments.kubernetes:
        api = kubernetes_api()
        for role, target in arguments.kubernetes:
            if role not in roles:
                raise CliError(f"--kubernetes: --per-worker has no role {role}", REFUSED)
            drivers[role] = KubernetesDriver(api, target)
    if arguments.worker:
        if arguments.kubernetes or list(roles) != ["both"]:
            raise CliError("workers on this machine have the role both, and nothing else is scaled then", REFUSED)
        drivers["both"] = LocalDriver(router, arguments.worker, lambda name, line: print(f"{name} | {one_line(line)}"))
    if arguments.metrics is None and not arguments.kubernetes and not arguments.worker:
        raise CliError("name who scales: --kubernetes, --metrics, or -- and flags of workers", REFUSED)
    return drivers


def _objective(text: str | None) -> FirstTokens | None:
    if text is None:
        return None
    seconds, comma, url = text.partition(",")
    try:
        late = _positive(seconds)
    except (ValueError, argparse.ArgumentTypeError):
        late = 0.0
    if not comma or not late or not url.startswith(("http://", "https://")):
        raise CliError(f"--objective: {text!r} is not SECONDS,URL", REFUSED)
    return FirstTokens(url, late)


def _run(arguments: argparse.Namespace) -> int:
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    with router_stub(arguments) as stub:
        router = _Router(stub, arguments.interval)
        drivers = _drivers(arguments, router)
        objective = _objective(arguments.objective)
        asyncio.run(_scale(arguments, router, drivers, objective))
    return 0


async def _scale(
    arguments: argparse.Namespace, router: _Router, drivers: dict[str, Driver], objective: FirstTokens | None
) -> None:
    stop = asyncio.Event()
    for ending in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(ending, stop.set)
    plans = {
        role: Plan(Bounds(per_worker, arguments.min, arguments.max, arguments.start, arguments.patience))
        for role, per_worker in arguments.per_worker
    }
    show = _gauges(arguments.metrics)
    shown: dict[str, tuple[int, int]] = {}
    try:
        while not stop.is_set():
            with contextlib.suppress(_MissedError):
                status, in_time = await _look(router, objective)
                for role, plan in plans.items():
                    requests, serving, busy = requests_of(status, role, list(plans))
                    wanted = plan.look(time.monotonic(), requests, len(serving), in_time)
                    show(role, wanted, plan.believed)
                    if shown.get(role) != (wanted, len(serving)):
                        shown[role] = wanted, len(serving)
                        logger.info("%s: %.0f requests, %d workers, %d wanted", role, requests, len(serving), wanted)
                    await _drive(drivers[role], wanted, serving, busy)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), arguments.interval)
    finally:
        for driver in drivers.values():
            await driver.close()


class _MissedError(Exception):
    """The router did not answer: the next look is soon enough."""


async def _look(router: _Router, objective: FirstTokens | None) -> tuple[router_pb2.GetStatusResponse, float | None]:
    import grpc

    try:
        status = await router.status()
    except grpc.RpcError as error:
        logger.warning("the router does not answer: %s", one_line(error.details() or error.code().name))
        raise _MissedError from None
    try:
        in_time = None if objective is None else await asyncio.to_thread(objective.in_time)
    except OSError as error:
        logger.warning("no metrics of first tokens: %s", one_line(str(error)))
        in_time = None
    return status, in_time


async def _drive(driver: Driver, wanted: int, serving: list[str], busy: list[str]) -> None:
    import grpc

    try:
        await driver.scale(wanted, serving, busy)
    except grpc.RpcError as error:
        logger.warning("the router does not answer: %s", one_line(error.details() or error.code().name))


def _gauges(address: str | None) -> Callable[[str, int, float], None]:
    """Serves the plan as metrics, if an address is given; returns what sets them."""
    if address is None:
        return lambda role, wanted, believed: None
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65_535:
        raise CliError(f"--metrics: {address!r} is not HOST:PORT", REFUSED)
    from prometheus_client import CollectorRegistry, Gauge

    from sapwood_common.errors import ConfigError
    from sapwood_common.telemetry.metrics import MetricsServer

    registry = CollectorRegistry()
    wanted_workers = Gauge(
        "sapwood_scaler_wanted_workers", "Workers that there should be.", ["role"], registry=registry
    )
    per_worker = Gauge(
        "sapwood_scaler_requests_per_worker",
        "Requests at a time that a worker is believed to do within the objective.",
        ["role"],
        registry=registry,
    )
    try:
        server = MetricsServer(registry, host, int(port))
    except ConfigError as error:
        raise CliError(str(error), REFUSED) from None
    logger.info("metrics at http://%s:%d/metrics", host, server.port)

    def show(role: str, wanted: int, believed: float) -> None:
        wanted_workers.labels(role).set(wanted)
        per_worker.labels(role).set(believed)

    return show
