"""The settings of the router."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from sapwood_common.settings.compound import Compound, Switch
from sapwood_common.settings.config import ServiceConfig
from sapwood_common.settings.needs import Needs
from sapwood_common.settings.retired import retired_parts
from sapwood_router.routing.factory import policy_names
from sapwood_router.store.opening import FORMS, is_store
from sapwood_router.store.records import Retention
from sapwood_router.transport.backend.spec import BackendSpec, backend_at, has_credentials, parse_backend


def _is_policy(name: str) -> str:
    if name not in (names := policy_names()):
        raise ValueError(f"{name!r} is none of {', '.join(names)}")
    return name


NO_TOKENIZER = "none"
"""The address of a tokenizer that there is not."""
Disaggregate = Literal["auto", "always", "never"]
PolicyName = Annotated[str, AfterValidator(_is_policy)]


def _is_origin(origin: str) -> str:
    if re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[a-z0-9._~\[\]:-]+", origin) is None:
        raise ValueError(f"{origin!r} is no origin as browsers send it: scheme://host or scheme://host:port")
    return origin


_FORGETFUL = frozenset(
    (
        "round_robin",
        "random",
        "least_load",
        "least_tokens",
        "power_of_two",
        "prefix_hash",
        "consistent_hash",
        "session_affinity",
    )
)
"""Policies that use only load, chance or the request. Whether those that packages bring do so is not known here."""


class BackendSilence(Compound):
    """``--backend-silence``."""

    seconds: float = Field(default=60.0, gt=0)
    interval: float = Field(default=5.0, gt=0)


class WorkersDns(Compound):
    """``--workers-dns``."""

    name: str | None = None
    interval: float = Field(default=5.0, gt=0)


class FollowEvents(Switch):
    """``--kv-events``."""

    on: bool = True
    bytes: int = Field(default=256 * 1024 * 1024, ge=0)


class WorkerSilence(Compound):
    """``--worker-silence``."""

    seconds: float = Field(default=1.0, gt=0)
    heartbeat_ms: int = Field(default=200, ge=10)

    @model_validator(mode="after")
    def _outlasts_heartbeats(self) -> Self:
        heartbeat = self.heartbeat_ms / 1000
        if self.seconds < 2 * heartbeat:
            raise ValueError(
                f"workers that say something each {heartbeat:g} s would be lost: at least {2 * heartbeat:g}"
            )
        return self


class TokenizerGrace(Compound):
    """``--tokenizer-grace``."""

    seconds: float = Field(default=60.0, ge=0)
    interval: float = Field(default=1.0, gt=0)


class Resumptions(Compound):
    """``--most-resumptions``."""

    count: int = Field(default=3, ge=0)
    grace: float = Field(default=10.0, ge=0)


class Queue(Compound):
    """``--queue-size``."""

    size: int = Field(default=1024, ge=0)
    wait: float = Field(default=30.0, gt=0)


class Retries(Compound):
    """``--retry-attempts``."""

    attempts: int = Field(default=4, ge=1)
    budget: float = Field(default=0.2, ge=0)


class Breaker(Compound):
    """``--breaker-failures``."""

    failures: int = Field(default=5, ge=1)
    rate: float = Field(default=0.5, gt=0, le=1)
    open_seconds: float = Field(default=1.0, gt=0)


class Bodies(Compound):
    """``--max-body-bytes``."""

    bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    memory: int | None = Field(default=None, ge=1)
    pictures: int = Field(default=1024 * 1024 * 1024, ge=1)


class StoreSettings(Compound):
    """``--store``."""

    url: str = "sqlite"
    responses: int = Field(default=1000, ge=0)
    bytes: int | None = Field(default=None, ge=1)
    days: float = Field(default=30.0, ge=0)
    files: int | None = Field(default=None, ge=0)

    @field_validator("url")
    @classmethod
    def _is_store(cls, url: str) -> str:
        if not is_store(url):
            raise ValueError(f"it is none of {FORMS}")
        return url

    @property
    def retention(self) -> Retention:
        """What goes when."""
        return Retention(self.responses, self._most_bytes, int(self.days * 86400))

    @property
    def file_bytes(self) -> int:
        """``files``, or as many as there may be of the rest."""
        return self._most_bytes if self.files is None else self.files

    @property
    def _most_bytes(self) -> int:
        return self.bytes or (_IN_MEMORY if self.url == "memory" else _ON_DISK)


_IN_MEMORY, _ON_DISK = 64 * 1024 * 1024, 1024 * 1024 * 1024
"""Bytes of the store unless they are given."""


class Batches(Compound):
    """``--batches``."""

    concurrency: int = Field(default=16, ge=0)
    lines: int = Field(default=50_000, ge=1)
    hours: float = Field(default=168.0, gt=0)


class Sessions(Compound):
    """``--max-sessions``."""

    count: int = Field(default=64, ge=0)
    tokens: int = Field(default=65536, ge=1)
    ttl: float = Field(default=3600.0, gt=0)
    leases: int = Field(default=262_144, ge=0)
    lease_ttl: float = Field(default=3600.0, gt=0)


class RouterConfig(ServiceConfig):
    """Configuration of ``python -m sapwood_router``."""

    needs = (
        *ServiceConfig.needs,
        Needs(("admin_host",), lambda config: config.admin_port is not None, "without {admin_port}"),
        Needs(("peer_cert", "peer_key", "worker_name"), lambda config: config.peer_ca is not None, "without {peer_ca}"),
        Needs(("peer_cert",), lambda config: config.peer_key is not None, "without {peer_key}"),
        Needs(("peer_key",), lambda config: config.peer_cert is not None, "without {peer_cert}"),
        Needs(("workers_dns.interval",), lambda config: config.workers_dns.name is not None, "without a name"),
        Needs(
            ("cache_index_bytes", "kv_events", "kv_events.bytes"),
            lambda config: not _FORGETFUL.issuperset(config.policies),
            "where no {policy} goes by what workers hold, as cache_aware does",
        ),
        Needs(("kv_events.bytes",), lambda config: config.kv_events.on, "without {kv_events}"),
        Needs(
            ("shadow_policies",),
            lambda config: config.model_policies or set(config.shadow_policies) != {config.policy},
            "where it is the {policy} that decides",
        ),
        Needs(("decode_policy",), lambda config: config.disaggregate != "never", "with {disaggregate} never"),
        Needs(("queue_size.wait",), lambda config: config.queue_size.size > 0, "where {queue_size} is 0"),
        Needs(
            ("max_sessions.tokens", "max_sessions.ttl"),
            lambda config: config.max_sessions.count > 0,
            "where {max_sessions} is 0",
        ),
        Needs(
            ("max_sessions.lease_ttl",),
            lambda config: config.max_sessions.leases > 0,
            "where {max_sessions} has leases=0",
        ),
        Needs(
            ("retry_attempts.budget",),
            lambda config: config.retry_attempts.attempts > 1,
            "where {retry_attempts} is 1",
        ),
    )

    retired: ClassVar = {
        **ServiceConfig.retired,
        **retired_parts("backend_silence", backend_interval="interval"),
        **retired_parts("workers_dns", workers_dns_interval="interval"),
        **retired_parts("kv_events", block_index_bytes="bytes"),
        **retired_parts("worker_silence", heartbeat_ms="heartbeat_ms"),
        **retired_parts("tokenizer_grace", health_interval="interval"),
        **retired_parts("most_resumptions", resume_grace="grace"),
        **retired_parts("queue_size", queue_wait="wait"),
        **retired_parts("retry_attempts", retry_budget="budget"),
        **retired_parts("breaker_failures", breaker_failure_rate="rate", breaker_open_seconds="open_seconds"),
        **retired_parts("max_body_bytes", body_memory_bytes="memory"),
        **retired_parts("store", stored_response_bytes="bytes", stored_responses="responses"),
        **retired_parts("max_sessions", session_tokens="tokens", session_ttl="ttl"),
    }

    model_config = SettingsConfigDict(env_prefix="SAPWOOD_ROUTER_", extra="forbid", frozen=True)

    port: int = Field(50051, ge=0, le=65535, description="gRPC port; 0 takes a free one.")
    http_host: str | None = Field(None, description="Address the HTTP front listens on; as --host if not given.")
    http_port: int = Field(8000, ge=0, le=65535, description="HTTP port (OpenAI API); 0 takes a free one.")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="Port of /metrics; 0 takes a free one; none: it is on the HTTP port."
    )
    metrics_of: tuple[str, ...] = Field(
        (),
        description="Addresses of the /metrics of other services, whose metrics the router's page then shows as well.",
    )
    log_requests: Literal["off", "line", "parameters", "content"] = Field(
        "line",
        description="Facts logged of each generation: none (off), its id, counts, times and how it ended (line), also its "
        "sampling and other parameters (parameters), or also 2048 characters each of prompt and answer (content).",
    )
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="gRPC port of the methods for operators, which then are refused on --port; 0 takes a free one; none: "
        "they are on --port, or with --api-keys nowhere.",
    )
    admin_host: str = Field("127.0.0.1", description="Address that --admin-port listens on.")
    api_keys: Path | None = Field(
        None, description="File with the names and hashes of API keys (`sapwood key` makes them); none asks for no key."
    )
    peer_ca: Path | None = Field(
        None,
        description="PEM file with the CAs of the tokenizer's and the workers' certificates; turns TLS to them on.",
    )
    peer_cert: Path | None = Field(None, description="PEM file with the certificate shown to them (mTLS).")
    peer_key: Path | None = Field(None, description="PEM file with its private key.")
    worker_name: str | None = Field(
        None,
        description="Name that the workers' certificates must be for, such as one that all share; none: each worker's own "
        "host name or IP address.",
    )
    tokenizer: str = Field(
        "127.0.0.1:50052",
        min_length=1,
        description="Address of the tokenizer service, or of several replicas, separated by commas; none: there is none, so "
        "that only requests with token ids and without text are served. A host name stands for a replica at each address behind "
        "it and is looked up again each second.",
    )
    model_tokenizers: tuple[str, ...] = Field(
        (),
        description="MODEL=ADDRESS: a tokenizer service for that model, if its vocabulary or chat template differs from the "
        "others'; several replicas are separated by commas.",
    )
    workers: tuple[str, ...] = Field(
        ("127.0.0.1:50061",),
        description="Addresses of workers. More can come from --backends, --workers-file, --workers-dns and "
        "--kubernetes-service, or register; the default counts only if none of these flags is given.",
    )
    backends: tuple[str, ...] = Field(
        (),
        description="url=URL[,model=MODEL][,name=NAME][,api-key-env=VARIABLE]: servers that speak OpenAI's API over HTTP; MODEL "
        "is the server's name for the model (by default the only one that it lists), NAME the clients' (by default the same), "
        "VARIABLE holds the key. A server without name and key may also be among --workers: http://host:8000 or "
        "http://host:8000#MODEL.",
    )
    backend_silence: Annotated[BackendSilence, NoDecode] = Field(
        BackendSilence(),
        description="Seconds that a backend's stream may say nothing before it counts as broken. interval: seconds between two "
        "checks, in which a backend is asked for its models; after three without an answer it is down.",
    )
    workers_file: Path | None = Field(
        None, description="File of further workers, one host:port or URL a line; followed as it changes."
    )
    workers_dns: Annotated[WorkersDns, NoDecode] = Field(
        WorkersDns(),
        description="[http://]NAME:PORT[,interval=SECONDS]: each address of that name is a worker, such as those of a headless "
        "service; with http:// an HTTP worker. "
        "The name is looked up again after each interval. With --kubernetes-service it counts only while the API server does not "
        "answer.",
    )
    kubernetes_service: str | None = Field(
        None,
        description="[http://]NAMESPACE/NAME:PORT of a Kubernetes service whose endpoints are further workers, followed through "
        "the API server (EndpointSlices); PORT is the port's name or number; with http:// they are HTTP workers.",
    )
    policy: PolicyName = Field(
        "cache_aware",
        description="How a worker is chosen for a request: cache_aware, consistent_hash, least_load, least_tokens, "
        "power_of_two, prefix_hash, random, round_robin, session_affinity, or one that an installed package brings.",
    )
    model_policies: tuple[str, ...] = Field(
        (),
        description="MODEL=POLICY: another policy for requests to that model.",
    )
    shadow_policies: tuple[PolicyName, ...] = Field(
        (),
        description="Further policies that are asked at each selection, without effect; metrics count how often they agree with "
        "the one that decides.",
    )
    disaggregate: Disaggregate = Field(
        "auto",
        description="Whether a prefill worker computes a request's prompt and a decode worker generates, if there are such "
        "workers: if it costs least by measured times (auto), always, or never, which ignores the workers' roles.",
    )
    decode_policy: PolicyName | None = Field(
        None, description="How a decode worker is then chosen; none: as --policy says, which chooses prefill workers."
    )
    cache_index_bytes: int = Field(
        64 * 1024 * 1024, ge=0, description="Memory for the cache_aware policy's index of prefixes, in bytes."
    )
    kv_events: Annotated[FollowEvents, NoDecode] = Field(
        FollowEvents(),
        description="Follow the workers' KV events, so that the cache_aware policy knows what each worker holds. bytes: memory "
        "for the index that they fill.",
    )
    worker_silence: Annotated[WorkerSilence, NoDecode] = Field(
        WorkerSilence(),
        description="Seconds of silence after which a worker is lost; at least two heartbeats. Up to three times as long if its "
        "event loop or the router's has lately run late. heartbeat_ms: workers send something at least this often.",
    )
    most_resumptions: Annotated[Resumptions, NoDecode] = Field(
        Resumptions(),
        description="How many workers a request may lose, and continue on another each time, before it fails; workers that "
        "drained or were removed do not count. grace: seconds that a request whose worker was lost waits for "
        "another if there is none.",
    )
    requests_per_worker: int = Field(
        0,
        ge=0,
        description="Most requests that a worker is given at a time, others wait; 0: twice what it runs at once.",
    )
    queue_size: Annotated[Queue, NoDecode] = Field(
        Queue(),
        description="Requests that may wait for workers to have room. wait: seconds that a request may wait; one that would wait "
        "longer, or past its deadline, is refused.",
    )
    retry_attempts: Annotated[Retries, NoDecode] = Field(
        Retries(),
        description="How many workers are asked at most if workers refuse a request. budget: most retries of refused requests, "
        "as a share of all requests.",
    )
    breaker_failures: Annotated[Breaker, NoDecode] = Field(
        Breaker(),
        description="Failures in a row after which a worker gets no requests for a while. rate: share of failed requests in the "
        "last 10 s (of at least 10) that does the same. open_seconds: how long at first; each failed probe doubles it, up to 30.",
    )
    random_seed: int | None = Field(
        None,
        ge=0,
        lt=2**64,
        description="Makes runs repeatable: requests without a seed get seeds derived from this one, in the order in which they "
        "come; none: random seeds. Requests to HTTP backends are passed on as they are.",
    )
    request_timeout: float = Field(
        600.0, gt=0, description="Seconds that a request may take; a client's own deadline counts if it is earlier."
    )
    tokenizer_grace: Annotated[TokenizerGrace, NoDecode] = Field(
        TokenizerGrace(),
        description="Seconds that requests, within their deadlines, wait for a tokenizer that is gone before they fail "
        "UNAVAILABLE: at least as long as one takes until it listens. While a tokenizer says that it starts they keep waiting. "
        "interval: seconds between health checks.",
    )
    status_page: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Whether the HTTP port shows /status, a page on the workers and their load, to anybody, and whether /ui "
        "shows the fleet and routes (with API keys to clients with a key). auto: yes, unless there are API keys, an admin port "
        "or a metrics port.",
    )
    ui: bool = Field(
        True,
        description="Serve /ui on the HTTP port: a page to chat with the models and, if --status-page allows it, to look at the "
        "workers.",
    )
    strict_parameters: bool = Field(
        False,
        description="Refuse HTTP requests with parameters that no API here knows, or tools of kinds that nothing here runs. Else "
        "the request is answered without them; the header x-sapwood-ignored and the log name them.",
    )
    max_body_bytes: Annotated[Bodies, NoDecode] = Field(
        Bodies(),
        description="Largest HTTP request body and gRPC request, in bytes. memory: bytes for requests that have not come "
        "completely, for gRPC requests over 64 KiB that are being handled, and for answers that clients are slow to read. Beyond "
        "it the largest is refused. None: three times the largest body. pictures: bytes for prepared pictures of requests that "
        "run, fair between tenants; beyond it requests are refused with 429.",
    )
    store: Annotated[StoreSettings, NoDecode] = Field(
        StoreSettings(),
        description="Where responses, conversations, files and batches are kept, each for its tenant: sqlite:PATH, a file that "
        "several routers of this machine may share; postgresql://... or redis://..., which all may share; sqlite, a file under "
        "SAPWOOD_HOME for this port; memory, which ends with the router. responses: most responses and conversations of a "
        "tenant; 0 keeps none. bytes: most of all tenants; none: 64 MiB in memory, elsewhere 1 GiB. days: one that is unused for "
        "so long goes; 0: none does. files: bytes of files and batches that a tenant may have; none: as bytes says.",
    )
    mcp: Path | None = Field(
        None,
        description="YAML file with the MCP servers whose tools /v1/responses may use, and the hosts of those that requests may "
        "name (docs/agents.md); none: there are none.",
    )
    batches: Annotated[Batches, NoDecode] = Field(
        Batches(),
        description="Lines of batches that this router runs at a time, with the lowest priority; 0: it runs none. lines: most of "
        "a batch. hours: longest window in which a batch may be completed.",
    )
    max_sessions: Annotated[Sessions, NoDecode] = Field(
        Sessions(),
        description="Sessions that a tenant may have open; 0: there are none. tokens: how many a tenant's sessions may hold "
        "together; workers keep them cached. ttl: longest time in seconds that a session may live unused. leases: tokens of "
        "prompts that workers keep cached because a tenant's requests ask for it (prompt_cache_key, prompt_cache_retention, "
        "cache_control); 0: none. lease_ttl: longest time in seconds for that.",
    )
    cors_origins: tuple[Annotated[str, AfterValidator(_is_origin)], ...] = Field(
        (),
        description="Origins whose web pages may send requests over HTTP, such as https://chat.example:8443; * is all; none: "
        "only /ui may.",
    )
    max_http_connections: int = Field(
        16384,
        ge=1,
        description="Most HTTP connections at a time. A further one closes the connection that has been idle the longest, or is "
        "itself closed if none is idle.",
    )

    @property
    def body_memory(self) -> int:
        """``memory`` of ``max_body_bytes``, or three times the largest body; at least the largest body fits."""
        largest, memory = self.max_body_bytes.bytes, self.max_body_bytes.memory
        return max(largest, memory or 3 * largest)

    @property
    def named_workers(self) -> tuple[str, ...]:
        """The addresses in ``workers`` and of ``backends``; one on this machine where nothing else names any."""
        elsewhere = self.backends or self.workers_file or self.workers_dns.name or self.kubernetes_service
        workers = self.workers if "workers" in self.model_fields_set or not elsewhere else ()
        return tuple(dict.fromkeys((*(_without_credentials(worker) for worker in workers), *self.backends_by_address)))

    @property
    def backends_by_address(self) -> dict[str, BackendSpec]:
        """``backends``, and those of ``workers`` with credentials, by what names each in the fleet."""
        specs = [parse_backend(text, os.environ) for text in self.backends]
        specs += [backend_at(worker) for worker in self.workers if has_credentials(worker)]
        return {spec.address: spec for spec in specs}

    @field_validator("backends")
    @classmethod
    def _are_backends(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        addresses = [parse_backend(text, os.environ).address for text in given]
        for address in addresses:
            if addresses.count(address) > 1:
                raise ValueError(f"{address} is named twice")
        return given

    @property
    def policies(self) -> tuple[str, ...]:
        """All policies that decide for some model or are asked as shadows."""
        decode = () if self.decode_policy is None else (self.decode_policy,)
        return (self.policy, *self.policies_of_models.values(), *self.shadow_policies, *decode)

    @property
    def policies_of_models(self) -> dict[str, str]:
        """``model_policies`` by model."""
        return {model: name for model, _, name in (item.rpartition("=") for item in self.model_policies)}

    @field_validator("model_policies")
    @classmethod
    def _are_policies(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for item in given:
            model, _, name = item.rpartition("=")
            if not model or name not in policy_names():
                raise ValueError(f"{item!r} is not MODEL=POLICY with one of {', '.join(policy_names())}")
        return given

    @property
    def separates_operators(self) -> bool:
        """Whether operators' methods are kept off the public port: a client's key must not be one to the router itself."""
        return self.admin_port is not None or self.api_keys is not None

    @property
    def shows_status(self) -> bool:
        """Whether there is a status page: by itself only where nothing is kept from those who reach the HTTP port."""
        open_to_all = self.api_keys is None and self.admin_port is None and self.metrics_port is None
        return self.status_page == "on" or (self.status_page == "auto" and open_to_all)

    @property
    def tokenizers(self) -> tuple[str, ...]:
        """The addresses of the tokenizer's replicas, each once; empty: there is no tokenizer."""
        return () if self.tokenizer == NO_TOKENIZER else _addresses(self.tokenizer)

    @property
    def tokenizers_of_models(self) -> dict[str, tuple[str, ...]]:
        """``model_tokenizers`` by model: the addresses of each one's replicas, each once."""
        return {model: _addresses(where) for model, _, where in (i.partition("=") for i in self.model_tokenizers)}

    @field_validator("model_tokenizers")
    @classmethod
    def _are_addresses(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for item in given:
            model, _, where = item.partition("=")
            addresses = _addresses(where)
            if not model or not addresses or not all(address.rpartition(":")[2].isdigit() for address in addresses):
                raise ValueError(f"{item!r} is not MODEL=HOST:PORT")
        return given


def _without_credentials(worker: str) -> str:
    return backend_at(worker).address if has_credentials(worker) else worker


def _addresses(listed: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, (address.strip() for address in listed.split(",")))))
