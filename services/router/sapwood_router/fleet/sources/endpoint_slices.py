"""Workers behind a Kubernetes service, from the API server's EndpointSlices, as they come and go.

A list, then a watch from its version on, then again: the API server ends watches at will, and a watch that is too old (410)
begins with a list again. The official client blocks, so it runs in a thread. Endpoints that are not ready count as well: the
router watches each worker's state itself. Terminating endpoints do not count: the router sends them no new requests and lets them
finish.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from sapwood_common.errors import ConfigError

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 60
_PAUSE = 2.0
_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 15.0
"""Within which a list begins to be answered, and beyond its own end a watch: a server that says nothing is one that fails."""


@dataclass(frozen=True, slots=True)
class ServiceName:
    """A service and the port of its endpoints that counts; ``scheme``: what stands before each address, for HTTP workers."""

    namespace: str
    name: str
    port: str
    scheme: str = ""


def parse_service(text: str) -> ServiceName:
    """``NAMESPACE/NAME:PORT``, where PORT is the port's name or number; for HTTP workers with ``http://`` before it.

    Raises:
        ConfigError: It is not.
    """
    scheme = "http://" if text.startswith("http://") else ""
    namespace, slash, rest = text.removeprefix(scheme).partition("/")
    name, colon, port = rest.partition(":")
    if not (slash and colon and namespace and name and port):
        raise ConfigError(f"--kubernetes-service: {text!r} is not [http://]NAMESPACE/NAME:PORT")
    return ServiceName(namespace, name, port, scheme)


def addresses_of(slices: Iterable[Any], port: str, scheme: str = "") -> frozenset[str]:
    """``host:port`` of every endpoint that does not terminate.

    Args:
        slices: The client's V1EndpointSlice objects.
        port: Name or number.
        scheme: Stands before each.
    """
    found = set()
    for item in slices:
        numbers = [entry.port for entry in item.ports or () if port in (entry.name, str(entry.port))]
        for endpoint in item.endpoints or ():
            conditions = endpoint.conditions
            if conditions is not None and conditions.terminating:
                continue
            host = endpoint.addresses[0]
            shown = f"[{host}]" if ":" in host else host
            found |= {f"{scheme}{shown}:{number}" for number in numbers}
    return frozenset(found)


def in_cluster_api() -> Any:
    """The discovery API with the pod's service account.

    Raises:
        ConfigError: The client is not installed, or this is no pod.
    """
    try:
        from kubernetes import client, config
    except ImportError as missing:
        raise ConfigError("--kubernetes-service needs: pip install 'sapwood[kubernetes]'") from missing
    try:
        config.load_incluster_config()  # type: ignore[no-untyped-call]
    except config.ConfigException as error:
        raise ConfigError(f"--kubernetes-service: {error}") from None
    configuration = client.Configuration.get_default_copy()
    configuration.retries = False  # the next question comes soon enough; each retry would hold up the fallback
    return client.DiscoveryV1Api(client.ApiClient(configuration))


async def follow_endpoint_slices(
    api: Any,
    service: ServiceName,
    name: Callable[[frozenset[str]], None],
    fallback: Callable[[], Coroutine[Any, Any, None]] | None = None,
    *,
    watch_seconds: int = _WATCH_SECONDS,
    answer_seconds: float = _ANSWER_SECONDS,
) -> None:
    """Tells ``name`` the addresses now and after each change, for ever; cancel it to stop.

    Args:
        api: A ``kubernetes.client.DiscoveryV1Api``.
        service: Whose endpoints.
        name: Called on the event loop.
        fallback: Another way to find the endpoints, used from a failure of the API server until it answers again.
        watch_seconds: Seconds after which the server is to end a watch.
        answer_seconds: Seconds without a word, beyond those, that are a failure.
    """
    loop = asyncio.get_running_loop()
    stop = threading.Event()

    standing_in: asyncio.Task[None] | None = None

    def answered(addresses: frozenset[str]) -> None:
        nonlocal standing_in
        if standing_in is not None:
            standing_in.cancel()
            standing_in = None
        name(addresses)

    def failed() -> None:
        nonlocal standing_in
        if standing_in is None and fallback is not None:
            standing_in = loop.create_task(fallback())

    def tell(addresses: frozenset[str] | None) -> None:
        if not stop.is_set():
            loop.call_soon_threadsafe(failed) if addresses is None else loop.call_soon_threadsafe(answered, addresses)

    # A thread of its own, not the loop's pool: a watch blocks for a minute, and the process must not wait for it at its end.
    asked = _Asked(api, service, watch_seconds, answer_seconds)
    threading.Thread(target=_follow, args=(asked, tell, stop), name="EndpointSlices", daemon=True).start()
    try:
        await asyncio.Event().wait()
    finally:
        stop.set()
        if standing_in is not None:
            standing_in.cancel()


@dataclass(frozen=True, slots=True)
class _Asked:
    """Whom to ask for what, and for how long to wait for it."""

    api: Any
    service: ServiceName
    watch_seconds: int
    answer_seconds: float


def _follow(asked: _Asked, tell: Callable[[frozenset[str] | None], None], stop: threading.Event) -> None:
    """Tells the addresses, and None when the API server fails."""
    known: frozenset[str] | None = None
    while not stop.is_set():
        try:
            for addresses in _changes(asked):
                if stop.is_set():
                    return
                if addresses != known:
                    known = addresses
                    tell(addresses)
        except Exception as error:  # the API server is away, or refuses: what is known stays, and it is asked again
            logger.warning("EndpointSlices of %s/%s: %s", asked.service.namespace, asked.service.name, error)
            known = None
            tell(None)
            time.sleep(_PAUSE)


def _changes(asked: _Asked) -> Iterable[frozenset[str]]:
    from kubernetes import watch

    service, slices_of = asked.service, asked.api.list_namespaced_endpoint_slice
    which = {"namespace": service.namespace, "label_selector": f"kubernetes.io/service-name={service.name}"}
    listed = slices_of(**which, _request_timeout=(_CONNECT_SECONDS, asked.answer_seconds))
    slices = {item.metadata.name: item for item in listed.items}
    yield addresses_of(slices.values(), service.port, service.scheme)
    follow: Any = watch.Watch()  # type: ignore[no-untyped-call]
    for event in follow.stream(
        slices_of,
        **which,
        resource_version=listed.metadata.resource_version,
        timeout_seconds=asked.watch_seconds,
        _request_timeout=(_CONNECT_SECONDS, asked.watch_seconds + asked.answer_seconds),
    ):
        item = event["object"]
        if event["type"] == "DELETED":
            slices.pop(item.metadata.name, None)
        else:
            slices[item.metadata.name] = item
        yield addresses_of(slices.values(), service.port, service.scheme)
