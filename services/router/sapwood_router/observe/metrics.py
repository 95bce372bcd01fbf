"""The router's metrics; docs/metrics.md lists them."""

from __future__ import annotations

import http.client
import logging
import socket
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from sapwood_common.serving.rpc_telemetry import CODES
from sapwood_common.telemetry.metrics import AtMost, MetricSet, OneOf, Reading
from sapwood_common.telemetry.series import Counter, Histogram
from sapwood_net.pacing.loop_lag import LoopLag
from sapwood_net.sockets.unix_socket import is_unix
from sapwood_router.admission.control import AdmissionControl
from sapwood_router.fleet.circuit_breaker import BreakerState
from sapwood_router.fleet.connection import SilenceLimit
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.worker import Worker
from sapwood_router.request.objective import OUTCOMES, WAYS
from sapwood_router.routing.factory import policy_names
from sapwood_router.routing.index.blocks import BlockIndex

STAGES = ("prepare", "queue", "select", "acquire", "build", "dispatch", "execute", "respond")
LENGTHS = tuple(float(2**power) for power in range(18))
"""Buckets of lengths in tokens: 1 to 131072."""
_BREAKER_STATES = {BreakerState.CLOSED: 0.0, BreakerState.HALF_OPEN: 1.0, BreakerState.OPEN: 2.0}
_MOST_MODELS = 32
_MOST_REASONS = 32
_MOST_PRIORITIES = 32
_MOST_WORKERS = 256
_MOST_TENANTS = 64
_MOST_KNOWN = 1024
"""Combinations of labels whose series are kept at hand."""


class RouterMetrics:
    """Makes them.

    Args:
        metrics: Where they are made.
    """

    def __init__(self, metrics: MetricSet) -> None:
        self._metrics = metrics
        self._of_ends: dict[tuple[str, str, str], tuple[Counter, Histogram, Counter]] = {}
        self._of_lengths: dict[str, tuple[Histogram, Histogram]] = {}
        self._of_tokens: dict[tuple[str, str], tuple[Counter, Counter, Counter, Counter]] = {}
        self.requests_running = 0
        self.resumed = 0
        self._worker = AtMost(_MOST_WORKERS)  # of workers that are there now
        model = AtMost(_MOST_MODELS)  # of models that workers serve: an unknown name gets no metric
        self.requests = metrics.counter(
            "sapwood_router_requests_total", "Generations that ended, by gRPC status.", model=model, code=CODES
        )
        self.embeddings = metrics.counter(
            "sapwood_router_embed_requests_total",
            "Requests for embeddings or labels that ended.",
            model=model,
            code=CODES,
        )
        metrics.polled(
            "gauge",
            "sapwood_router_running_requests",
            "Generations under way.",
            lambda: [((), float(self.requests_running))],
        )
        self.first_token = metrics.histogram(
            "sapwood_router_time_to_first_token_seconds", "From the request to its first text.", model=model
        )
        self.inter_token = metrics.histogram(
            "sapwood_router_inter_token_seconds",
            "Between one delta and the next, divided by the tokens it carries.",
            model=model,
        )
        self.seconds = metrics.histogram(
            "sapwood_router_request_seconds", "From the request to its end.", model=model, code=CODES
        )
        self.stage = metrics.histogram(
            "sapwood_router_stage_seconds",
            "Time in each stage of the pipeline; queue is the wait before select, respond all of a request's deltas.",
            stage=OneOf(*STAGES),
        )
        self.stages = {stage: self.stage.at(stage=stage) for stage in STAGES}
        """The series of each, which are asked for many times a request."""
        self.prompt_tokens = metrics.counter(
            "sapwood_router_prompt_tokens_total", "Prompt tokens of generations that ended.", model=model
        )
        self.cached_tokens = metrics.counter(
            "sapwood_router_cached_tokens_total",
            "Prompt tokens of these generations that the worker had cached.",
            model=model,
        )
        self.completion_tokens = metrics.counter(
            "sapwood_router_completion_tokens_total", "Tokens generated.", model=model
        )
        self.prompt_length = metrics.histogram(
            "sapwood_router_prompt_length_tokens", "Tokens of a generation's prompt.", buckets=LENGTHS, model=model
        )
        self.completion_length = metrics.histogram(
            "sapwood_router_completion_length_tokens", "Tokens of a generation's answer.", buckets=LENGTHS, model=model
        )
        tenant = AtMost(_MOST_TENANTS)  # without API keys, clients name themselves
        self.tenant_requests = metrics.counter(
            "sapwood_router_tenant_requests_total",
            "Generations that ended, by tenant: the name of the API key, or x-tenant.",
            tenant=tenant,
            code=CODES,
        )
        self.tenant_tokens = metrics.counter(
            "sapwood_router_tenant_tokens_total", "Prompt and generated tokens, by tenant.", tenant=tenant
        )
        self.selections = metrics.counter(
            "sapwood_router_selections_total", "Workers chosen, by the policy's reason.", reason=AtMost(_MOST_REASONS)
        )
        self.shadow_choices = metrics.counter(
            "sapwood_router_shadow_choices_total",
            "Choices of shadow policies: the chosen worker (agree), or another one (differ).",
            policy=OneOf(*policy_names()),
            verdict=OneOf("agree", "differ"),
        )
        priority = AtMost(_MOST_PRIORITIES)
        self.objectives = metrics.counter(
            "sapwood_router_objectives_total",
            "Generations with an objective that ended: it was met or missed, or they were refused as it could not be met (shed).",
            priority=priority,
            outcome=OneOf(*OUTCOMES),
        )
        self.made_way = metrics.counter(
            "sapwood_router_made_way_total",
            "Generations that waited (held), or returned to the queue (preempted), for the objectives of higher priorities.",
            priority=priority,
            how=OneOf(*WAYS),
        )
        self.retries = metrics.counter(
            "sapwood_router_retries_total", "Further workers tried, by the status of the failed try.", code=CODES
        )
        self.resumptions = metrics.counter(
            "sapwood_router_resumptions_total", "Streams that continued on another worker after theirs was lost."
        )
        self.handoffs = metrics.counter(
            "sapwood_router_kv_transfers_total",
            "Prompts that one worker computed for another one to continue with.",
            was="sapwood_router_handoffs_total",
        )
        self.weighed = metrics.counter(
            "sapwood_router_disaggregation_weighed_total",
            "Requests for which --disaggregate auto weighed costs, by what cost least: a pair of workers, or one alone.",
            choice=OneOf("pair", "alone"),
        )
        self.pair = metrics.histogram(
            "sapwood_router_pair_seconds",
            "Times of requests on a pair of workers: to the first token (prefill), from there to the decode worker's first one "
            "(transfer), and from there to its last one (decode).",
            part=OneOf("prefill", "transfer", "decode"),
        )
        # There from the start, at 0: a chart of a fleet without pairs says 0, not that it has no data.
        for choice in ("pair", "alone"):
            self.weighed.at(choice=choice)
        for part in ("prefill", "transfer", "decode"):
            self.pair.at(part=part)
        self.session_prompt_tokens = metrics.counter(
            "sapwood_router_session_prompt_tokens_total",
            "Prompt tokens of sessions' requests, the sessions' earlier tokens included.",
        )
        self.session_cached_tokens = metrics.counter(
            "sapwood_router_session_cached_tokens_total",
            "Prompt tokens of sessions' requests that the worker had cached.",
        )
        self.session_moves = metrics.counter(
            "sapwood_router_session_moves_total", "Sessions that continued at another worker than before."
        )
        self.losses = metrics.counter(
            "sapwood_router_worker_losses_total",
            "Connections to a worker that broke or fell silent.",
            worker=self._worker,
        )
        self.drifts = metrics.counter(
            "sapwood_router_kv_event_drifts_total",
            "Times that a worker's KV events were found incomplete and asked for again.",
            worker=self._worker,
        )

    def worker_removed(self, address: str) -> None:
        """The worker is no longer one of them: its series end, and its label makes room."""
        self.losses.remove(worker=address)
        self.drifts.remove(worker=address)
        self._worker.forget(address)

    def of_end(self, model: str, tenant: str, code: str) -> tuple[Counter, Histogram, Counter]:
        """What a request's end is counted in: ``requests``, ``seconds`` and ``tenant_requests``, looked up together."""
        key = (model, tenant, code)
        if key not in self._of_ends:
            if len(self._of_ends) >= _MOST_KNOWN:
                self._of_ends.clear()
            self._of_ends[key] = (
                self.requests.at(model=model, code=code),
                self.seconds.at(model=model, code=code),
                self.tenant_requests.at(tenant=tenant, code=code),
            )
        return self._of_ends[key]

    def of_tokens(self, model: str, tenant: str) -> tuple[Counter, Counter, Counter, Counter]:
        """What a request's tokens are counted in: prompt, cached, completion and tenant's, looked up together."""
        key = (model, tenant)
        if key not in self._of_tokens:
            if len(self._of_tokens) >= _MOST_KNOWN:
                self._of_tokens.clear()
            self._of_tokens[key] = (
                self.prompt_tokens.at(model=model),
                self.cached_tokens.at(model=model),
                self.completion_tokens.at(model=model),
                self.tenant_tokens.at(tenant=tenant),
            )
        return self._of_tokens[key]

    def of_lengths(self, model: str) -> tuple[Histogram, Histogram]:
        """The same for ``prompt_length`` and ``completion_length``."""
        if model not in self._of_lengths:
            if len(self._of_lengths) >= _MOST_KNOWN:
                self._of_lengths.clear()
            self._of_lengths[model] = (self.prompt_length.at(model=model), self.completion_length.at(model=model))
        return self._of_lengths[model]

    def request_began(self) -> None:
        """A generation is under way."""
        self.requests_running += 1

    def request_ended(self) -> None:
        """It is no longer."""
        self.requests_running -= 1

    def stream_resumed(self) -> None:
        """A stream continues, on another worker."""
        self.resumed += 1
        self.resumptions.at().inc()

    def shadow_chose(self, policy: str, agrees: bool) -> None:
        """A shadow policy was asked."""
        self.shadow_choices.at(policy=policy, verdict="agree" if agrees else "differ").inc()

    def watch_index(self, blocks: BlockIndex) -> None:
        """Adds what is read from the exact index when it is asked for."""
        self._metrics.polled(
            "gauge",
            "sapwood_router_block_index_bytes",
            "Memory of the index of cached blocks, in bytes.",
            lambda: [((), blocks.bytes_used)],
        )
        self._metrics.polled(
            "counter",
            "sapwood_router_block_index_refused_pages_total",
            "Cached pages for which the index had no room.",
            lambda: [((), blocks.refused)],
        )

    def session_grew(self, prompt_tokens: int, cached_tokens: int, *, moved: bool) -> None:
        """A request of a session was answered."""
        self.session_prompt_tokens.at().inc(prompt_tokens)
        self.session_cached_tokens.at().inc(cached_tokens)
        if moved:
            self.session_moves.at().inc()

    def watch_sessions(self, count: Callable[[], int]) -> None:
        """Adds how many sessions there are."""
        self._metrics.polled(
            "gauge",
            "sapwood_router_sessions",
            "Sessions that are open, of those that this router has met.",
            lambda: [((), float(count()))],
        )

    def watch_lag(self, lag: LoopLag, limit: SilenceLimit, registry: Registry) -> None:
        """Adds what is read from the event loop's lag, and follows from it, when it is asked for."""
        self._metrics.polled(
            "gauge",
            "sapwood_router_loop_lag_seconds",
            "Delay of callbacks in the event loop: the recent maximum, halved every 10 s.",
            lambda: [((), lag.recent)],
        )
        self._metrics.polled(
            "gauge",
            "sapwood_router_worker_silence_limit_seconds",
            "How long the worker may be silent before it is lost: longer where router or worker run late.",
            lambda: [((worker.address,), limit.seconds(worker.loop_lag)) for worker in registry.all()],
            worker=self._worker,
        )

    def watch(self, registry: Registry, admission: AdmissionControl) -> None:
        """Adds what is read from registry and queue when it is asked for."""
        self._metrics.polled(
            "gauge",
            "sapwood_router_queued_requests",
            "Requests that wait for a worker with room.",
            lambda: [((), float(admission.waiting))],
        )

        self._metrics.polled(
            "gauge",
            "sapwood_router_available_workers",
            "Workers that can take requests.",
            lambda: [((), float(sum(worker.takes_new for worker in registry.all())))],
        )

        def polled(name: str, text: str, read: str) -> None:
            self._metrics.polled("gauge", name, text, lambda: _of_each(registry, read), worker=self._worker)

        polled("sapwood_router_worker_available", "1 if the worker can take requests.", "available")
        polled(
            "sapwood_router_worker_breaker_state",
            "The worker's circuit breaker: 0 closed, 1 half-open (one request tries the worker), 2 open (none is sent).",
            "breaker",
        )
        polled("sapwood_router_worker_in_flight_requests", "This router's requests on the worker.", "in_flight")
        polled("sapwood_router_worker_role_proposed", "1 if the load suggests another role for the worker.", "proposed")
        polled(
            "sapwood_router_worker_pending_tokens",
            "Prompt tokens that were sent to the worker and are not computed yet.",
            "pending_tokens",
        )
        polled(
            "sapwood_router_worker_used_page_share",
            "Share of the worker's KV pages that running requests hold.",
            "used_share",
        )


def _of_each(registry: Registry, what: str) -> Iterable[Reading]:
    for worker in registry.all():
        yield (worker.address,), _reading(worker, what)


def _reading(worker: Worker, what: str) -> float:
    load = worker.load
    match what:
        case "available":
            return float(worker.available)
        case "breaker":
            return _BREAKER_STATES[worker.breaker.state]
        case "proposed":
            return float(worker.proposed is not None)
        case "in_flight":
            return worker.in_flight
        case "pending_tokens":
            return worker.pending_tokens
        case _:
            return (load.used_pages - load.evictable_pages) / load.num_pages if load.num_pages else 0.0


logger = logging.getLogger(__name__)

_SECONDS = 2.0
"""For each of the services: the page waits for them one after the other."""
_PREFIXES = ("sapwood_tokenizer_", "sapwood_worker_")
"""What all services have (``process_``, ``sapwood_rpc_``) is the router's on its page."""


class JoinedMetrics(Collector):
    """For a registry: what a tokenizer and a worker show of themselves. One that does not answer is left out, and logged.

    Args:
        addresses: Where their /metrics are: ``host:port`` or ``unix:PREFIX:NUMBER``. The first of two workers is shown.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    def collect(self) -> Iterable[Metric]:
        """Asks them; blocks, so it is called in a thread."""
        families: dict[str, Metric] = {}
        for address in self._addresses:
            try:
                for family in text_string_to_metric_families(_page(address)):
                    if family.name.startswith(_PREFIXES):
                        families.setdefault(family.name, family)
            except (OSError, http.client.HTTPException, ValueError) as error:
                logger.warning("metrics of %s: %s", address, error)
        return families.values()


def _page(address: str) -> str:
    connection = _UnixConnection(address) if is_unix(address) else http.client.HTTPConnection(address, timeout=_SECONDS)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, address: str) -> None:
        super().__init__("localhost", timeout=_SECONDS)
        self._path = address.removeprefix("unix:")

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_SECONDS)
        self.sock.connect(self._path)
