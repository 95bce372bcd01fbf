"""The whole router: builds every part from the configuration, starts and stops it."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections.abc import Coroutine
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from sapwood.v1 import router_pb2_grpc
from sapwood_common.contract.seeds import Seeds
from sapwood_common.errors import ConfigError
from sapwood_common.host_names import listens_on_loopback
from sapwood_common.network.channel import Dialer
from sapwood_common.secret_file import warn_of_readers
from sapwood_common.serving.rpc_telemetry import RpcTelemetry
from sapwood_common.serving.server import READINESS, ServiceServer, serve_until_stopped
from sapwood_common.shared_bytes import SharedBytes
from sapwood_common.telemetry.logs import announce
from sapwood_common.telemetry.metrics import MetricSet, MetricsServer
from sapwood_common.telemetry.tracing_start import start_tracing
from sapwood_common.tenants.api_keys import ApiKeys
from sapwood_net.pacing.body_memory import BodyMemory
from sapwood_net.pacing.heavy_work import HeavyWork
from sapwood_net.pacing.loop_lag import LoopLag
from sapwood_net.pacing.memory_trim import MemoryTrim
from sapwood_net.sockets.tls import server_tls
from sapwood_router.admission.control import AdmissionControl
from sapwood_router.admission.fair_queue import AdmissionSettings
from sapwood_router.config import RouterConfig
from sapwood_router.edges.batches.api import ENDPOINTS
from sapwood_router.edges.batches.records import BatchStore
from sapwood_router.edges.batches.runner import BatchLimits, BatchRunner
from sapwood_router.edges.files.store import FileStore
from sapwood_router.edges.front import HttpFront
from sapwood_router.edges.gateway.endpoint_picker import SERVICE as PICKER_NAME
from sapwood_router.edges.gateway.endpoint_picker import EndpointPicker
from sapwood_router.edges.grpc.service import PUBLIC_METHODS, SERVICE_NAME, TRACED, RouterService
from sapwood_router.edges.guard import Guard
from sapwood_router.edges.http.origins import Origins
from sapwood_router.edges.http1.server import HttpServer
from sapwood_router.edges.responses.background import Background
from sapwood_router.edges.responses.store import ConversationStore, ResponseStore
from sapwood_router.edges.routes import Post
from sapwood_router.edges.table import DIALECTS, Kept, all_routes
from sapwood_router.edges.ui.observed import Observed
from sapwood_router.edges.ui.routes import ui_routes
from sapwood_router.edges.worker_names import WorkerNames
from sapwood_router.fleet.backends.probe import BackendProbe, served_by
from sapwood_router.fleet.circuit_breaker import BreakerSettings, BreakerState, CircuitBreaker
from sapwood_router.fleet.connection import SilenceLimit, WorkerConnection
from sapwood_router.fleet.control import FleetControl, WorkerPins
from sapwood_router.fleet.fleet import CONFIGURED, Fleet
from sapwood_router.fleet.kv_event_monitor import KvEventMonitor
from sapwood_router.fleet.lora_control import LoraControl
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.served_model import ServedModel
from sapwood_router.fleet.sources.endpoint_slices import follow_endpoint_slices, in_cluster_api, parse_service
from sapwood_router.fleet.sources.membership import follow_file, follow_leases
from sapwood_router.fleet.weights_control import WeightsControl
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.adapters import Adapters
from sapwood_router.flow.cache_leases import CacheLeases, LeaseLimits
from sapwood_router.flow.disaggregation.costs import Costs
from sapwood_router.flow.disaggregation.decision import Disaggregation
from sapwood_router.flow.disaggregation.proposals import RoleProposals, follow_proposals
from sapwood_router.flow.generation import Pipeline
from sapwood_router.flow.headroom import Headroom
from sapwood_router.flow.relay.pick import Endpoints, Picker
from sapwood_router.flow.retry import Failover, RetryPolicy, RetrySettings
from sapwood_router.flow.sessions import SessionLimits, SessionStore
from sapwood_router.flow.steering import Steering
from sapwood_router.flow.training import Training
from sapwood_router.observe.history import History
from sapwood_router.observe.metrics import JoinedMetrics, RouterMetrics
from sapwood_router.observe.observer import RequestLog, RequestObserver
from sapwood_router.observe.status import StatusBoard
from sapwood_router.observe.timelines import Timelines
from sapwood_router.routing.factory import PolicyParts, make_policy
from sapwood_router.routing.index.blocks import BlockIndex
from sapwood_router.routing.policy_book import PolicyBook
from sapwood_router.store.opening import follow_retention, open_store
from sapwood_router.tokenizer.client import TokenizerClient
from sapwood_router.tokenizer.replica import TokenizerReplicas
from sapwood_router.tokenizer.text_stream import TextStreams, Tokenizer, Tokenizers
from sapwood_router.tools.mcp_servers import McpServers
from sapwood_router.transport.backend.spec import backend_at, is_backend
from sapwood_router.transport.name_lookup import Lookup, addresses_behind, follow_name
from sapwood_text.output_parser import OutputParser
from sapwood_text.parsed_stream import MakeParser

if TYPE_CHECKING:  # it takes 15 MB, also where there is no backend
    from sapwood_router.transport.backend.client import HttpClient

logger = logging.getLogger(__name__)


class RouterApplication:
    """A router in this process and event loop.

    Life cycle: construct in a running loop, ``start``, then ``serve`` (until a signal) or ``stop``.

    Args:
        config: The configuration.
        lookup: Asks for the addresses behind a name.
        make_parser: Makes the parsers of outputs.
    """

    def __init__(
        self, config: RouterConfig, lookup: Lookup = addresses_behind, make_parser: MakeParser = OutputParser
    ) -> None:
        self._config = config
        self._metrics = MetricSet()
        self._tracing = start_tracing("sapwood-router", config.trace_endpoint.address, config.trace_endpoint.ratio)
        router_metrics = self._router_metrics = RouterMetrics(self._metrics)
        if config.metrics_of:
            self._metrics.registry.register(JoinedMetrics(config.metrics_of))
        self._dialer = Dialer(config.peer_ca, config.peer_cert, config.peer_key)
        if config.peer_key is not None:
            warn_of_readers(config.peer_key, "--peer-key")
        self._worker_dialer = self._dialer.expecting(config.worker_name)
        self._http_client: HttpClient | None = None
        self._backends = config.backends_by_address
        self._lookup = lookup
        self._make_parser = make_parser
        self._blocks = BlockIndex(config.kv_events.bytes)
        parts = PolicyParts(config.cache_index_bytes, random.Random(), time.monotonic, self._blocks)
        self._policies = PolicyBook(
            config.policy,
            config.policies_of_models,
            config.shadow_policies,
            lambda name: make_policy(name, parts),
            router_metrics.shadow_chose,
            config.decode_policy or "",
        )
        self._lag = LoopLag()
        self.heavy = HeavyWork()
        self._silence_limit = SilenceLimit(config.worker_silence.seconds, self._lag)
        self.registry = Registry([], self._registry_changed, self._worker_reset, self._most_requests)
        own = {model: self._make_tokenizer(where) for model, where in config.tokenizers_of_models.items()}
        self._tokenizers = Tokenizers(self._make_tokenizer(config.tokenizers), own, self.registry)
        settings = AdmissionSettings(most_waiting=config.queue_size.size, most_wait=config.queue_size.wait)
        loop_time = asyncio.get_running_loop().time
        headroom = Headroom(self.registry, loop_time, random.Random())
        self._admission = AdmissionControl(self.registry, settings, loop_time, random.Random(), headroom.floor)
        self._slices = (
            None if config.kubernetes_service is None else (in_cluster_api(), parse_service(config.kubernetes_service))
        )
        self._fleet = Fleet(
            self.registry,
            self._policies,
            self._make_worker,
            self._watch_worker,
            router_metrics.worker_removed,
            time.monotonic,
        )
        router_metrics.watch(self.registry, self._admission)
        router_metrics.watch_index(self._blocks)
        router_metrics.watch_lag(self._lag, self._silence_limit, self.registry)
        self.status = StatusBoard(self.registry, self._admission, router_metrics, self.problem, config.policy).snapshot
        self._history, timelines = History(self.status), Timelines()
        observer = RequestObserver(
            router_metrics, self._tracing, RequestLog(config.log_requests), timelines, self._history
        )
        retry = RetryPolicy(
            RetrySettings(attempts=config.retry_attempts.attempts, ratio=config.retry_attempts.budget),
            asyncio.get_running_loop().time,
            random.Random(),
        )
        retention = config.store.retention
        self._store = open_store(config.store.url, config.http_port, retention)
        sessions = self._sessions = SessionStore(
            SessionLimits(config.max_sessions.count, config.max_sessions.tokens, config.max_sessions.ttl),
            WorkerPins(self._worker_dialer),
            router_metrics.session_grew,
            asyncio.get_running_loop().time,
            self._store,
        )
        self._leases = CacheLeases(
            LeaseLimits(config.max_sessions.leases, config.max_sessions.lease_ttl),
            WorkerPins(self._worker_dialer),
            self.registry.page_size,
            asyncio.get_running_loop().time,
        )
        router_metrics.watch_sessions(lambda: len(sessions))
        costs = Costs(time.monotonic)
        self._proposals = RoleProposals(self.registry, costs, time.monotonic)
        pipeline = Pipeline(
            self._tokenizers,
            self.registry,
            self._admission,
            self._policies,
            retry,
            lambda: Failover(retry, config.most_resumptions.count),
            config.most_resumptions.grace,
            observer,
            sessions,
            self._leases,
            Disaggregation(config.disaggregate, self.registry, self._policies, costs),
            headroom,
            Seeds(config.random_seed),
            self.heavy,
            SharedBytes(config.max_body_bytes.pictures, "pictures"),
        )
        calls = RpcTelemetry(self._metrics, self._tracing, roots=TRACED)
        tls = server_tls(config.tls_cert, config.tls_key, config.tls_client_ca)
        self._keys = None if config.api_keys is None else ApiKeys(config.api_keys)
        guard = Guard(
            self._keys,
            public=PUBLIC_METHODS if config.separates_operators else None,
        )
        bodies = BodyMemory(config.body_memory, MemoryTrim().freed)
        self._server = ServiceServer(
            config.host,
            config.port,
            [SERVICE_NAME],
            telemetry=calls,
            tls=tls,
            gate=guard,
            max_request_bytes=config.max_body_bytes.bytes,
            memory=bodies,
            heavy=self.heavy,
            health_address=config.health_address,
            health_names=(PICKER_NAME, READINESS),
            implementation=config.grpc_server,
        )
        tokenizers = {*config.tokenizers, *chain.from_iterable(config.tokenizers_of_models.values())}
        self.worker_names = WorkerNames(
            secrets.token_bytes(16), lambda address: address in tokenizers or self.registry.find(address) is not None
        )
        steering = Steering(pipeline.running, FleetControl(self.registry, self._worker_dialer))
        self._loras = LoraControl(self.registry, self._worker_dialer)
        adapters = Adapters(self.registry.loras, self._loras)
        service = RouterService(
            pipeline, self._fleet, steering, config.request_timeout, self.status, self.worker_names, adapters
        )
        picker = EndpointPicker(
            Picker(pipeline, observer, Endpoints(lookup)),
            guard,
            self.worker_names,
            config.request_timeout,
            config.max_body_bytes.bytes,
            self.registry.longest_context,
            bodies,
            self.heavy,
        )
        router_pb2_grpc.add_RouterServicer_to_server(service, self._server.grpc)
        picker.add_to(self._server.grpc)
        self._admin: ServiceServer | None = None
        if config.admin_port is not None:
            self._admin = ServiceServer(
                config.admin_host,
                config.admin_port,
                [SERVICE_NAME],
                telemetry=calls,
                tls=tls,
                implementation=config.grpc_server,
            )
            router_pb2_grpc.add_RouterServicer_to_server(service, self._admin.grpc)
            picker.add_to(self._admin.grpc)
        origins = Origins(
            config.cors_origins,
            own_page=config.ui,
            any_name=config.api_keys is not None,
            local=listens_on_loopback(config.http_host or config.host),
        )
        shown = self.status if config.shows_status else None
        files, batches = FileStore(self._store, config.store.file_bytes), BatchStore(self._store)
        batches_wait = asyncio.Event()
        responses = ResponseStore(self._store, retention)
        self._background = Background(self._store, responses)
        kept = Kept(
            responses,
            ConversationStore(self._store),
            files,
            batches,
            config.batches.hours * 3600,
            batches_wait.set,
            McpServers(config.mcp),
            self._background,
        )
        for_clients = None if config.separates_operators else steering
        adapters_for_clients = None if config.separates_operators else adapters
        training: Training | None = None
        if config.api_keys is not None:
            training = Training(WeightsControl(self.registry, self._worker_dialer), pipeline.running)
        registry = self._metrics.registry if config.metrics_port is None else None
        routes = all_routes(
            pipeline,
            self.problem,
            kept,
            for_clients,
            adapters_for_clients,
            registry,
            shown,
            origins,
            training,
        )
        if config.ui:
            observed = Observed(self._history, timelines, self._policies, self._blocks, self._page_sizes)
            routes += ui_routes(pipeline, guard, origins, shown, observed)
        self._front = HttpFront(
            pipeline,
            routes,
            self._server.draining,
            request_timeout=config.request_timeout,
            max_body_bytes=config.max_body_bytes.bytes,
            tracing=self._tracing,
            guard=guard,
            origins=origins,
            strict=config.strict_parameters,
            dialects=DIALECTS,
            workers=self.worker_names,
        )
        self._batch_runner = BatchRunner(
            batches,
            files,
            {route.path: route for route in routes if isinstance(route, Post) and route.path in ENDPOINTS},
            self._front.answer_inner,
            None if self._keys is None else self._keys.named,
            self.heavy,
            BatchLimits(
                config.batches.concurrency,
                config.batches.lines,
                config.max_body_bytes.bytes,
                config.batches.hours * 3600,
            ),
            batches_wait,
            self._server.draining,
        )
        self._http = HttpServer(
            self._front.serve,
            config.http_host or config.host,
            config.http_port,
            guard.rank_request,
            tls,
            bodies=bodies,
            most_connections=config.max_http_connections,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self.grpc_port = 0
        self.http_port = 0
        self.admin_port = 0
        self._metrics_server: MetricsServer | None = None

    def problem(self) -> str | None:
        """Why requests cannot be served now; None if they can."""
        if self._server.draining.is_set():
            return "shutting down"
        tokenizes = any(worker.backend is None for worker in self.registry.all())
        if tokenizes and self._tokenizers.problem is not None:
            return self._tokenizers.problem
        if not self.registry.any_available():
            return "no worker is available: " + "; ".join(
                f"{worker.address}: {worker.problem}" for worker in self.registry.all()
            )
        return None

    async def start(self) -> None:
        """Listens and begins to look for the tokenizer and the workers.

        Raises:
            ConfigError: A port cannot be listened on.
        """
        self.grpc_port = await self._server.start()
        announce(logger, "gRPC listening on %s:%d", self._config.host, self.grpc_port)
        if self._admin is not None:
            self.admin_port = await self._admin.start()
            announce(logger, "admin listening on %s:%d", self._config.admin_host, self.admin_port)
        self.http_port = await self._http.start()
        announce(logger, "HTTP listening on %s:%d", self._http.host, self.http_port)
        if self._config.metrics_port is not None:
            self._metrics_server = MetricsServer(self._metrics.registry, self._config.host, self._config.metrics_port)
            announce(logger, "metrics at http://%s:%d/metrics", self._config.host, self._metrics_server.port)
        self._spawn(self._admission.run(), "admission")
        self._spawn(self._lag.run(), "loop lag")
        self._spawn(self._batch_runner.run(), "batches")
        tenants = None if self._keys is None else self._keys.named
        self._spawn(self._background.take_up(self._front.answer_inner, tenants), "responses in the background")
        self._spawn(follow_retention(self._store), "retention of the store")
        if self._keys is not None:
            self._spawn(self._keys.follow(), "file of API keys")
        for tokenizer in self._tokenizers.all():
            tokenizer.replicas.start()
            self._spawn(tokenizer.client.prefetch(), "vocabulary")
        self._fleet.name(CONFIGURED, self._config.named_workers)
        self._spawn(follow_proposals(self._proposals), "proposals of roles")
        self._spawn(self._loras.run(), "adapters")
        self._spawn(self._history.run(), "history")
        self._spawn(follow_leases(self._fleet), "leases of registered workers")
        if self._config.workers_file is not None:
            self._spawn(follow_file(self._config.workers_file, self._fleet), "workers file")
        dns = self._config.workers_dns.name or ""
        scheme = "http://" if dns.startswith("http://") else ""
        host, _, port = dns.removeprefix(scheme).rpartition(":")
        named = partial(self._fleet.name, "service discovery")
        interval = self._config.workers_dns.interval
        if self._config.workers_dns.name is not None and not (host and port.isdigit()):
            raise ConfigError(f"--workers-dns: {self._config.workers_dns.name!r} is not [http://]name:port")

        def name_dns(addresses: frozenset[str]) -> None:
            named(frozenset(scheme + each for each in addresses))

        lookups = partial(follow_name, host, int(port), name_dns, interval, self._lookup) if host else None
        if self._slices is not None:  # names in DNS are for when the API server does not answer
            self._spawn(follow_endpoint_slices(*self._slices, named, lookups), "EndpointSlices")
        elif lookups is not None:
            self._spawn(lookups(), "workers in DNS")

    async def serve(self) -> None:
        """Serves until SIGTERM or SIGINT, drains, and stops."""
        await serve_until_stopped(self._server, drain_timeout=self._config.drain_timeout, drained=self._front.wait_idle)
        await self.stop()

    async def stop(self) -> None:
        """Stops everything at once; running requests are cancelled."""
        self._server.draining.set()
        await self._http.stop()
        await self._server.stop()
        if self._admin is not None:
            await self._admin.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._sessions.stop()
        await self._leases.stop()
        await self._background.stop()
        await self._store.close()
        if self._http_client is not None:
            await self._http_client.close()
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.close)
        await asyncio.to_thread(self._tracing.close)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(_report_crash)
        self._tasks.append(task)
        return task

    def _readiness_changed(self) -> None:
        if not self._server.draining.is_set():
            self._spawn_once(self._server.set_serving(self.problem() is None))

    def _spawn_once(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks = [task for task in self._tasks if not task.done()]
        self._spawn(work, "set health")

    def _make_tokenizer(self, addresses: tuple[str, ...]) -> Tokenizer:
        config = self._config

        def lost() -> None:
            client.forget()

        replicas = TokenizerReplicas(
            addresses,
            self._dialer,
            config.tokenizer_grace.interval,
            self._readiness_changed,
            lost,
            self._spawn,
            self._lookup,
        )
        client = TokenizerClient(replicas.all, config.tokenizer_grace.seconds, self.heavy, absent=not addresses)
        return Tokenizer(replicas, client, TextStreams(client, self._make_parser))

    def _watch_worker(self, worker: Worker) -> list[asyncio.Task[None]]:
        config = self._config
        if (backend := worker.backend) is not None:
            probe = BackendProbe(worker, backend, self.registry, config.backend_silence.interval, self._worker_lost)
            return [self._spawn(probe.run(), f"probe of {worker.address}")]
        connection = WorkerConnection(
            worker,
            self.registry,
            config.worker_silence.heartbeat_ms,
            self._silence_limit,
            self._worker_lost,
            self._fleet.hand_over,
            time.monotonic,
            self._worker_dialer,
        )
        tasks = [self._spawn(connection.run(), f"connection to {worker.address}")]
        if config.kv_events.on and self._policies.reads_events:
            drifts = self._router_metrics.drifts.at(worker=worker.address)
            monitor = KvEventMonitor(worker, self._blocks, self._worker_dialer, drifts.inc).run()
            tasks.append(self._spawn(monitor, f"KV events of {worker.address}"))
        return tasks

    def _worker_reset(self, address: str, model: ServedModel) -> None:
        self._policies.reset(address, model.num_pages)

    def _worker_lost(self, worker: Worker) -> None:
        self._router_metrics.losses.at(worker=worker.address).inc()

    def _make_worker(self, address: str) -> Worker:
        config = self._config
        settings = BreakerSettings(
            consecutive=config.breaker_failures.failures,
            failure_rate=config.breaker_failures.rate,
            open_seconds=config.breaker_failures.open_seconds,
        )

        def on_change(state: BreakerState) -> None:
            logger.warning("worker %s: circuit breaker %s", address, state.value)

        breaker = CircuitBreaker(settings, time.monotonic, on_change)
        if not is_backend(address):
            return Worker(address, breaker, time.monotonic, self._worker_has_room)
        from sapwood_router.transport.backend.client import Backend, HttpClient

        spec = self._backends.get(address) or backend_at(address)
        self._http_client = self._http_client or HttpClient()
        backend = Backend(spec, self._http_client, config.backend_silence.seconds)
        worker = Worker(address, breaker, time.monotonic, self._worker_has_room, backend)
        if spec.name or spec.model:  # a model that is known, though nobody serves it yet
            worker.model = served_by(spec, None, epoch=0)
        return worker

    def _worker_has_room(self) -> None:
        self._admission.pump()

    def _most_requests(self, model: ServedModel) -> float:
        return self._config.requests_per_worker or 2 * model.max_running or math.inf

    def _registry_changed(self) -> None:
        self._admission.pump()
        self._readiness_changed()
        self._history.look()

    def _page_sizes(self) -> list[tuple[str, int]]:
        """Each worker whose model is known, and the tokens in a page of its cache."""
        return [(worker.address, worker.model.page_size) for worker in self.registry.all() if worker.model is not None]


def _report_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("%s stopped", task.get_name(), exc_info=task.exception())
