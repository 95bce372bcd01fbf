"""The whole worker: scheduler process, engine, gRPC front, and how they start and end together."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Coroutine
from ipaddress import ip_address
from typing import Any, NoReturn

from sapwood.v1 import worker_pb2_grpc
from sapwood_common.contract.seeds import Seeds
from sapwood_common.errors import ConfigError, SapwoodError
from sapwood_common.grammar.compiler import CompilerLimits
from sapwood_common.models.adapters import find_adapter
from sapwood_common.models.model_files import model_name
from sapwood_common.serving.rpc_telemetry import RpcTelemetry
from sapwood_common.serving.server import ServiceServer, serve_until_stopped
from sapwood_common.telemetry.logs import announce
from sapwood_common.telemetry.metrics import MetricSet, MetricsServer, metrics_port
from sapwood_common.telemetry.tracing_start import start_tracing
from sapwood_net.sockets.tls import server_tls
from sapwood_worker.config import WorkerConfig
from sapwood_worker.front.engine import Engine
from sapwood_worker.front.kv_event_publisher import KvEventPublisher
from sapwood_worker.front.lora_resolvers import make_resolver
from sapwood_worker.front.loras import Loras
from sapwood_worker.front.metrics import EngineObserver, WorkerMetrics
from sapwood_worker.front.served_model import RequestGrammars, ServedModel
from sapwood_worker.front.service import SERVICE, UNCOUNTED, WorkerService
from sapwood_worker.ipc.liveness import Liveness
from sapwood_worker.ipc.messages import staged_receive, staged_send, stages_are_logged
from sapwood_worker.ipc.nodes import Nodes, serve_node
from sapwood_worker.ipc.supervisor import MODEL_RUNNER, SchedulerProcess, Supervisor
from sapwood_worker.records.model_info import ModelInfo, SumChoices
from sapwood_worker.settings import named_loras

logger = logging.getLogger(__name__)

USUAL_METRICS_PORT = 9161


async def serve(config: WorkerConfig, runner: str = MODEL_RUNNER) -> int:
    """Runs a worker until it is stopped; on a host other than the first of its group, runs the ranks there.

    It listens at once, but is healthy, and says that it is listening, when the model is loaded. A scheduler that dies is started
    again, after a pause if that happens again and again.

    Args:
        config: The configuration.
        runner: What makes the runner in the scheduler process.

    Returns:
        The exit code: 0 after a signal, 1 if the scheduler could not start.
    """
    try:
        if config.nnodes > 1 and config.meeting_place and config.node_rank:
            return await serve_node(config, runner)
        name = config.served_model_name or model_name(config.model)
        nodes = Nodes(config) if config.nnodes > 1 else None
        scheduler = Supervisor(
            lambda: SchedulerProcess(config, runner, nodes),
            config.watchdog_timeout.seconds,
            config.watchdog_timeout.restart,
        )
        try:
            if nodes is not None:
                await nodes.start()
            return await _serve(config, name, scheduler)
        finally:
            await scheduler.stop()
            if nodes is not None:
                await nodes.close()
    except ConfigError as error:
        logger.error("%s", error)
        return 1


async def _serve(config: WorkerConfig, name: str, scheduler: Supervisor) -> int:
    await scheduler.start()
    metrics = MetricSet()
    tracing = start_tracing("sapwood-worker", config.trace_endpoint.address, config.trace_endpoint.ratio)
    worker_metrics = WorkerMetrics(metrics)
    telemetry = RpcTelemetry(metrics, tracing)
    sglang = _sglang() if config.sglang.on else None
    server = ServiceServer(
        config.host,
        config.port,
        [SERVICE] if sglang is None else [SERVICE, sglang.SERVICE],
        uncounted=UNCOUNTED if sglang is None else UNCOUNTED | sglang.UNCOUNTED,
        telemetry=telemetry,
        tls=server_tls(config.tls_cert, config.tls_key, config.tls_client_ca),
        health_address=config.health_address,
        implementation=config.grpc_server,
    )
    send = staged_send(scheduler.send) if stages_are_logged() else scheduler.send
    engine = Engine(send, EngineObserver(worker_metrics, tracing), config.role, config.max_waiting)
    slots = config.lora_slots
    loras = Loras(
        engine, find_adapter, int(slots.host_gb * 2**30), named_loras(config.lora), make_resolver(slots.resolver)
    )
    loras.reserved = frozenset({name})
    loras.loads, loras.on_change = lambda: engine.load.loras, engine.news
    health = _Health(server, engine.liveness)
    worker_metrics.watch(lambda: engine.load)
    worker_metrics.watch_loras(loras)
    worker_metrics.watch_experts(
        lambda: engine.experts, lambda: 0 if service.model is None else service.model.info.expert_tile_sizes
    )
    worker_metrics.watch_sums(
        lambda: engine.sums, lambda: SumChoices() if service.model is None else service.model.info.all_reduce
    )
    worker_metrics.watch_pictures(lambda: engine.picture_use)
    worker_metrics.watch_liveness(engine.liveness)
    exposed = MetricsServer(
        metrics.registry, config.host, metrics_port(config.metrics_port, USUAL_METRICS_PORT, config.port)
    )
    logger.info("metrics at http://%s:%d/metrics", config.host, exposed.port)
    service = WorkerService(engine, server.draining, health.drain, telemetry, Seeds(config.random_seed), loras)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server.grpc)
    if sglang is not None:
        sglang.add_to(server.grpc, service, engine, config, server.draining)
    running: asyncio.Future[NoReturn] | None = None
    serving: asyncio.Future[None] | None = None
    lagging = asyncio.ensure_future(engine.liveness.lag.run())
    try:
        port = await server.start()
        serving = asyncio.ensure_future(
            serve_until_stopped(server, drain_timeout=config.drain_timeout, drained=service.wait_idle)
        )
        running = asyncio.ensure_future(_run(config, name, port, scheduler, engine, service, server, health, loras))
        ends: set[asyncio.Future[Any]] = {running, serving}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving
            return 0
        await running
    finally:
        if running is not None:
            running.cancel()
            await asyncio.wait({running})
        if serving is not None:
            serving.cancel()
        lagging.cancel()
        await server.stop()
        await asyncio.to_thread(tracing.close)
        await asyncio.to_thread(exposed.close)


async def _run(
    config: WorkerConfig,
    name: str,
    port: int,
    scheduler: Supervisor,
    engine: Engine,
    service: WorkerService,
    server: ServiceServer,
    health: _Health,
    loras: Loras,
) -> NoReturn:
    """Serves one scheduler process after the other. Raises ConfigError if the first cannot start."""
    grammars: RequestGrammars | None = None
    publishers: list[KvEventPublisher] = []
    running: asyncio.Future[str] | None = None

    try:
        while True:
            started = time.monotonic()
            info = await scheduler.ready()
            logger.info(
                "%s (%s, %s) loaded in %.1f s: %d pages of %d tokens",
                *(name, info.architecture, info.dtype, time.monotonic() - started, info.num_pages, info.page_size),
            )
            first = grammars is None
            if grammars is None:
                grammars = RequestGrammars(info, CompilerLimits(timeout=config.structured_output.timeout))
                publishers = _publishers(config, engine, info)
            epoch = time.time_ns()
            engine.scheduler_started(epoch)
            receive = staged_receive(engine.receive) if stages_are_logged() else engine.receive
            running = asyncio.ensure_future(scheduler.run(receive, engine.liveness, health.changed))
            loras.slots = info.lora_slots
            service.sleeper.started()
            if not first:
                await _restored(service.weights.started(), running)
            await _load_pinned(loras, running, first=first)
            gc.freeze()  # collections then skip what is loaded: they take 80 ms of the event loop with it
            service.model = ServedModel(
                name, info, epoch, grammars, info.attention_ranks * (config.max_running or 0) or info.max_running
            )
            await health.loaded(True)
            announce(logger, "listening on %s:%d", config.host, port)
            reason = await running
            logger.error("the scheduler process stopped: %s", reason)
            service.model = None
            engine.scheduler_lost(reason)
            loras.lost()
            await health.loaded(False)
            await scheduler.start()
    finally:
        if running is not None:
            running.cancel()
            await asyncio.wait({running})
        for publisher in publishers:
            publisher.close()
        if grammars is not None:
            await grammars.close()


async def _restored(work: Coroutine[Any, Any, None], running: asyncio.Future[str]) -> None:
    """Waits until weights are read again, or the scheduler process has ended."""
    restoring = asyncio.ensure_future(work)
    ends: set[asyncio.Future[Any]] = {restoring, running}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        restoring.cancel()
        await asyncio.wait({restoring})


async def _load_pinned(loras: Loras, running: asyncio.Future[str], *, first: bool) -> None:
    """Loads the adapters that stay in memory, unless the scheduler process ends meanwhile.

    Args:
        loras: All adapters.
        running: Ends with the scheduler process.
        first: Whether it is the worker's start.

    Raises:
        ConfigError: At the start, one cannot be loaded. Later only the log says so.
    """
    loading = asyncio.ensure_future(loras.started())
    ends: set[asyncio.Future[Any]] = {loading, running}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            await loading
    except SapwoodError as error:
        if first:
            raise ConfigError(f"--lora: {error.message}") from error
        logger.error("--lora: %s", error.message)
    finally:
        loading.cancel()
        await asyncio.wait({loading})


class _Health:
    """What grpc.health says: healthy while a scheduler is ready and well and nobody drains the worker."""

    def __init__(self, server: ServiceServer, liveness: Liveness) -> None:
        self._server = server
        self._liveness = liveness
        self._is_loaded = False
        self._telling: asyncio.Future[None] | None = None

    async def loaded(self, is_loaded: bool) -> None:
        """Notes that a scheduler is ready, or has ended."""
        self._is_loaded = is_loaded
        await self._tell()

    def changed(self) -> None:
        """Notes that the scheduler process got well, or no longer is."""
        self._telling = asyncio.ensure_future(self._tell())

    async def drain(self) -> None:
        """Turns unhealthy, so that nothing new comes."""
        self._server.draining.set()
        await self._tell()

    async def _tell(self) -> None:
        draining = self._server.draining.is_set()
        await self._server.set_serving(self._is_loaded and self._liveness.well and not draining)


def _sglang() -> Any:
    """The module that speaks SGLang's protocol; its messages are a package of their own."""
    try:
        from sapwood_worker.front.sglang import service
    except ImportError as error:
        raise ConfigError(
            f"--sglang needs the package smg-grpc-proto: pip install 'sapwood[sglang]' ({error})"
        ) from error
    return service


def _publishers(config: WorkerConfig, engine: Engine, info: ModelInfo) -> list[KvEventPublisher]:
    """The ZeroMQ publishers of KV events, one for each prefix cache; none if the configuration asks for none."""
    publishers: list[KvEventPublisher] = []
    if config.kv_events_port is None:
        return publishers
    host = config.kv_events.host or ("127.0.0.1" if config.kv_events.key_folder is None else config.host)
    if config.kv_events.key_folder is None and not is_loopback(host):
        logger.warning(
            "--kv-events %s without key_folder: everybody who reaches the ports gets the tokens of all prompts",
            host,
        )
    ranks = info.attention_ranks
    for rank, stream in enumerate(engine.cache_streams(ranks)):
        publisher = KvEventPublisher(
            host,
            _port_of(rank, config.kv_events_port),
            None if config.kv_events_replay_port is None else _port_of(rank, config.kv_events_replay_port),
            topic=config.kv_events.topic,
            keep=config.kv_events.keep,
            block_size=info.page_size,
            rank=rank,
            form=config.kv_events.format,
            keys=config.kv_events.key_folder,
        )
        publishers.append(publisher)
        stream.listen(publisher.publish)
        whose = f" of rank {rank}" if ranks > 1 else ""
        announce(
            logger, "KV events%s on %s, replay on %s", whose, publisher.address, publisher.replay_address or "no port"
        )
    return publishers


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _port_of(rank: int, first: int) -> int:
    return first + rank if first else 0
