"""The official client against an API server of the test's own, which lists, streams changes, and breaks off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sapwood_common.errors import ConfigError
from sapwood_router.fleet.sources.endpoint_slices import follow_endpoint_slices, parse_service


def endpoint_slice(name: str, *addresses: str, terminating: tuple[str, ...] = (), port: int = 50061) -> dict:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "worker"}},
        "addressType": "IPv4",
        "endpoints": [
            {"addresses": [address], "conditions": {"ready": False, "terminating": address in terminating}}
            for address in (*addresses, *terminating)
        ],
        "ports": [{"name": "grpc", "port": port, "protocol": "TCP"}, {"name": "metrics", "port": 9161}],
    }


class ApiServer:
    """Keeps slices and tells watchers of changes."""

    def __init__(self) -> None:
        self.slices: dict[str, dict] = {}
        self.version = 1
        self.queries: list[dict[str, list[str]]] = []
        self.events: list[tuple[int, str, dict]] = []
        self.changed = threading.Condition()
        self.breaks = 0
        self.watches = 0
        """How many have begun; :meth:`break_watches` ends these."""
        self.refusing = False
        self.answers = threading.Event()
        """Cleared: it takes connections and says nothing."""
        self.answers.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def chunk(self, data: bytes) -> None:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.flush()

            def do_GET(self) -> None:
                query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
                outer.answers.wait()
                if outer.refusing:
                    self.send_error(503)
                    return
                outer.queries.append({"path": [urllib.parse.urlsplit(self.path).path], **query})
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    if "watch" in query:
                        outer.stream(self, int(query["resourceVersion"][0]))
                    else:
                        with outer.changed:
                            body = {
                                "apiVersion": "discovery.k8s.io/v1",
                                "kind": "EndpointSliceList",
                                "metadata": {"resourceVersion": str(outer.version)},
                                "items": list(outer.slices.values()),
                            }
                        self.chunk(json.dumps(body).encode())
                    self.chunk(b"")

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stream(self, handler, version: int) -> None:
        broken = self.breaks
        self.watches += 1
        while self.breaks == broken:
            with self.changed:
                self.changed.wait(timeout=0.1)
                due = [event for event in self.events if event[0] > version]
                version = self.version
            for _, kind, item in due:
                handler.chunk(json.dumps({"type": kind, "object": item}).encode() + b"\n")

    def put(self, item: dict) -> None:
        with self.changed:
            name = item["metadata"]["name"]
            self.version += 1
            self.events.append((self.version, "MODIFIED" if name in self.slices else "ADDED", item))
            self.slices[name] = item
            self.changed.notify_all()

    def delete(self, name: str) -> None:
        with self.changed:
            self.version += 1
            self.events.append((self.version, "DELETED", self.slices.pop(name)))
            self.changed.notify_all()

    def break_watches(self) -> None:
        with self.changed:
            self.breaks += 1
            self.changed.notify_all()


@pytest.fixture
def api_server():
    server = ApiServer()
    yield server
    server.answers.set()
    server.break_watches()
    server.server.shutdown()
    server.server.server_close()


def client_of(api_server: ApiServer) -> Any:
    """The official client, which tries nothing again by itself."""
    from kubernetes import client  # takes seconds

    configuration = client.Configuration()
    configuration.host = f"http://127.0.0.1:{api_server.server.server_port}"
    configuration.proxy = None
    configuration.retries = False
    return client.DiscoveryV1Api(client.ApiClient(configuration))


async def test_workers_come_and_go_with_the_slices(api_server: ApiServer, wait_until) -> None:
    api_server.put(endpoint_slice("a", "10.0.0.1", "10.0.0.2"))
    api = client_of(api_server)
    named: list[frozenset[str]] = []
    following = asyncio.create_task(follow_endpoint_slices(api, parse_service("prod/worker:grpc"), named.append))

    async def becomes(*hosts: str) -> None:
        wanted = frozenset(f"{host}:50061" for host in hosts)
        await wait_until(lambda: bool(named) and named[-1] == wanted)

    await becomes("10.0.0.1", "10.0.0.2")
    api_server.put(endpoint_slice("b", "10.0.0.3"))
    await becomes("10.0.0.1", "10.0.0.2", "10.0.0.3")
    api_server.put(endpoint_slice("a", "10.0.0.2", terminating=("10.0.0.1",)))
    await becomes("10.0.0.2", "10.0.0.3")
    api_server.delete("b")
    await becomes("10.0.0.2")
    before = len(api_server.queries)
    api_server.break_watches()
    await wait_until(lambda: len(api_server.queries) >= before + 2)
    api_server.put(endpoint_slice("c", "10.0.0.4"))
    await becomes("10.0.0.2", "10.0.0.4")
    assert all("/namespaces/prod/" in query["path"][0] for query in api_server.queries)
    assert all(query["labelSelector"] == ["kubernetes.io/service-name=worker"] for query in api_server.queries)
    following.cancel()


async def test_the_port_may_be_a_number(api_server: ApiServer, wait_until) -> None:
    api_server.put(endpoint_slice("a", "10.0.0.1"))
    api = client_of(api_server)
    named: list[frozenset[str]] = []
    following = asyncio.create_task(follow_endpoint_slices(api, parse_service("prod/worker:9161"), named.append))
    await wait_until(lambda: named == [frozenset({"10.0.0.1:9161"})])
    following.cancel()


async def test_http_workers_behind_a_service_are_named_as_urls(api_server: ApiServer, wait_until) -> None:
    api_server.put(endpoint_slice("a", "10.0.0.1"))
    named: list[frozenset[str]] = []
    service = parse_service("http://prod/worker:9161")
    following = asyncio.create_task(follow_endpoint_slices(client_of(api_server), service, named.append))
    await wait_until(lambda: named == [frozenset({"http://10.0.0.1:9161"})])
    following.cancel()


async def test_while_the_api_server_does_not_answer_something_else_stands_in(api_server: ApiServer, wait_until) -> None:
    api = client_of(api_server)
    named: list[frozenset[str]] = []
    lives: list[str] = []

    async def dns() -> None:
        lives.append("begun")
        try:
            named.append(frozenset({"10.9.9.9:50061"}))
            await asyncio.Event().wait()
        finally:
            lives.append("ended")

    api_server.refusing = True
    following = asyncio.create_task(follow_endpoint_slices(api, parse_service("prod/worker:grpc"), named.append, dns))
    await wait_until(lambda: lives == ["begun"])
    api_server.put(endpoint_slice("a", "10.0.0.1"))
    api_server.refusing = False
    await wait_until(lambda: named == [frozenset({"10.9.9.9:50061"}), frozenset({"10.0.0.1:50061"})])
    await wait_until(lambda: lives == ["begun", "ended"])  # in the turn of the loop after
    await wait_until(lambda: api_server.watches)
    api_server.refusing = True
    api_server.break_watches()
    await wait_until(lambda: lives == ["begun", "ended", "begun"])
    following.cancel()
    await wait_until(lambda: lives == ["begun", "ended"] * 2)


async def test_an_api_server_that_says_nothing_is_one_that_fails(api_server: ApiServer, wait_until) -> None:
    api = client_of(api_server)
    named: list[frozenset[str]] = []
    lives: list[str] = []

    async def dns() -> None:
        lives.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            lives.append("ended")

    api_server.put(endpoint_slice("a", "10.0.0.1"))
    api_server.answers.clear()
    following = asyncio.create_task(
        follow_endpoint_slices(
            api, parse_service("prod/worker:grpc"), named.append, dns, watch_seconds=0, answer_seconds=0.5
        )
    )
    await wait_until(lambda: lives == ["begun"])  # it did not answer the list
    api_server.answers.set()
    # It may be asked again before this looks.
    await wait_until(lambda: set(named) == {frozenset({"10.0.0.1:50061"})})
    await wait_until(lambda: lives[:3] == ["begun", "ended", "begun"])  # a watch that it does not end
    following.cancel()


@pytest.mark.parametrize("text", ["worker", "prod/worker", "/worker:grpc", "prod/:grpc", "prod/worker:"])
def test_a_name_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="NAMESPACE/NAME:PORT"):
        parse_service(text)
