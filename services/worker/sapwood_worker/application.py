"""The whole worker: scheduler process, engine, gRPC front, and how they start and end together."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from sapwood.v1 import worker_pb2_grpc
from sapwood_common.errors import ConfigError
from sapwood_common.grammar.compiler import CompilerLimits
from sapwood_common.metrics import MetricSet, MetricsServer, metrics_port
from sapwood_common.model_files import model_name
from sapwood_common.rpc_telemetry import RpcTelemetry
from sapwood_common.server import ServiceServer, serve_until_stopped
from sapwood_common.telemetry import announce
from sapwood_common.tls import server_tls
from sapwood_common.tracing import start_tracing
from sapwood_worker.config import WorkerConfig
from sapwood_worker.engine import Engine
from sapwood_worker.grammar.front import RequestGrammars
from sapwood_worker.kv_event_publisher import KvEventPublisher
from sapwood_worker.launch import MODEL_RUNNER, SchedulerProcess
from sapwood_worker.model_info import ModelInfo
from sapwood_worker.observer import EngineObserver
from sapwood_worker.service import SERVICE, UNCOUNTED, ServedModel, WorkerService
from sapwood_worker.worker_metrics import WorkerMetrics

logger = logging.getLogger(__name__)

USUAL_METRICS_PORT = 9161

_LAST_WORDS_SECONDS = 1.0
"""What running calls get to say UNAVAILABLE when the scheduler is gone."""
_LAST_MESSAGE_SECONDS = 0.1
"""What sessions get to hand over their last outputs."""


async def serve(config: WorkerConfig, runner: str = MODEL_RUNNER) -> int:
    """Runs a worker until it is told to stop or its scheduler dies.

    It listens at once, but is healthy, and says that it is listening, when the model is loaded.

    Args:
        config: The configuration.
        runner: What makes the runner in the scheduler process.

    Returns:
        The exit code: 0 after a signal, 1 if the scheduler could not start or died.
    """
    try:
        name = config.served_model_name or model_name(config.model)
        scheduler = SchedulerProcess(config, runner)
        try:
            return await _serve(config, name, scheduler)
        finally:
            await scheduler.stop()
    except ConfigError as error:
        logger.error("%s", error)
        return 1


async def _serve(config: WorkerConfig, name: str, scheduler: SchedulerProcess) -> int:
    started = time.monotonic()
    await scheduler.start()
    metrics = MetricSet()
    tracing = start_tracing("sapwood-worker", config.trace_endpoint, config.trace_ratio)
    worker_metrics = WorkerMetrics(metrics)
    engine = Engine(scheduler.send, EngineObserver(worker_metrics, tracing))
    worker_metrics.watch(lambda: engine.load)
    server = ServiceServer(
        config.host,
        config.port,
        [SERVICE],
        uncounted=UNCOUNTED,
        telemetry=RpcTelemetry(metrics, tracing),
        tls=server_tls(config.tls_cert, config.tls_key, config.tls_client_ca),
    )
    exposed = MetricsServer(
        metrics.registry, config.host, metrics_port(config.metrics_port, USUAL_METRICS_PORT, config.port)
    )
    logger.info("metrics at http://%s:%d/metrics", config.host, exposed.port)
    service = WorkerService(engine, server.draining)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server.grpc)
    port = await server.start()
    starting = asyncio.ensure_future(scheduler.ready())
    serving = asyncio.ensure_future(
        serve_until_stopped(server, drain_timeout=config.drain_timeout, drained=service.wait_idle)
    )
    ends: set[asyncio.Future[Any]] = {starting, serving}
    grammars: RequestGrammars | None = None
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            await serving
            return 0
        info = await starting
        logger.info(
            "%s (%s, %s) loaded in %.1f s: %d pages of %d tokens",
            *(name, info.architecture, info.dtype, time.monotonic() - started, info.num_pages, info.page_size),
        )
        grammars = RequestGrammars(info, CompilerLimits(timeout=config.grammar_timeout))
        publisher = _publisher(config, engine, info)
        try:
            epoch = time.time_ns()
            engine.kv_events.begin(epoch)
            service.model = ServedModel(name, info, epoch, grammars, config.max_running)
            await server.set_serving(True)
            announce(logger, "listening on %s:%d", config.host, port)
            return await _until_the_end(scheduler, engine, server, serving, publisher)
        finally:
            if publisher is not None:
                publisher.close()
    finally:
        starting.cancel()
        serving.cancel()
        await server.stop()
        if grammars is not None:
            await grammars.close()
        await asyncio.to_thread(tracing.close)
        await asyncio.to_thread(exposed.close)


def _publisher(config: WorkerConfig, engine: Engine, info: ModelInfo) -> KvEventPublisher | None:
    """The ZeroMQ publisher of KV events, if one is asked for, subscribed to the engine's."""
    if config.kv_events_port is None:
        return None
    publisher = KvEventPublisher(
        config.host,
        config.kv_events_port,
        config.kv_events_replay_port,
        topic=config.kv_events_topic,
        keep=config.kv_events_keep,
        block_size=info.page_size,
    )
    engine.kv_events.listen(publisher.publish)
    announce(logger, "KV events on %s, replay on %s", publisher.address, publisher.replay_address or "no port")
    return publisher


async def _until_the_end(
    scheduler: SchedulerProcess,
    engine: Engine,
    server: ServiceServer,
    serving: asyncio.Future[None],
    publisher: KvEventPublisher | None,
) -> int:
    replays = asyncio.ensure_future(publisher.serve_replays()) if publisher is not None else None
    lost = asyncio.ensure_future(scheduler.run(engine.receive))
    ends: set[asyncio.Future[Any]] = {lost, serving}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving
            return 0
        reason = await lost
        logger.error("the scheduler process stopped: %s", reason)
        engine.scheduler_lost(reason)
        await server.drain(_LAST_WORDS_SECONDS)
        await asyncio.sleep(_LAST_MESSAGE_SECONDS)
        return 1
    finally:
        lost.cancel()
        if replays is not None:
            replays.cancel()
