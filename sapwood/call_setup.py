"""The settings of clients' calls (address, key, trace context, sizes), and the classes of their errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import grpc

from sapwood.errors import from_rpc_error

DEFAULT_ADDRESS = "127.0.0.1:50051"
"""The router's default address."""

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # A router that vanished without closing the connection is noticed within 30 + 10 seconds, while a call runs.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
"""Options of the channel to the router."""


_SCHEMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:", "xds:")
"""How gRPC's other names for servers begin."""


def router_address(address: str | None) -> str:
    """``address``, or the one in SAPWOOD_ROUTER, or :data:`DEFAULT_ADDRESS`.

    Raises:
        TypeError: It is no text.
        ValueError: It is the URL of an HTTP port, or its port is no number of a port.
    """
    if address is not None and not isinstance(address, str):
        raise TypeError(f"address: {address!r:.60} is no text; this takes the router's gRPC address, HOST:PORT")
    found = address or os.environ.get("SAPWOOD_ROUTER") or DEFAULT_ADDRESS
    if found.startswith(("http://", "https://")):
        raise ValueError(f"address: {found} is a URL; this takes the router's gRPC address, HOST:PORT")
    host, colon, port = found.rpartition(":")
    if not ("://" in found or found.startswith(_SCHEMES)) and (
        not (colon and host) or not (port.isdecimal() and 0 < int(port) < 65536)
    ):
        raise ValueError(f"address: {found!r:.80} is not HOST:PORT, such as {DEFAULT_ADDRESS}")
    return found


def call_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata with ``api_key``, or the key in SAPWOOD_API_KEY; empty without either."""
    key = api_key or os.environ.get("SAPWOOD_API_KEY")
    return (("authorization", f"Bearer {key}"),) if key else ()


def with_trace(metadata: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Adds the current span's context, in a program that uses OpenTelemetry."""
    if "opentelemetry.trace" not in sys.modules:
        return metadata
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return metadata + tuple(carrier.items())


def request_id_of(metadata: Iterable[Any] | None) -> str | None:
    """The request id in the router's initial metadata; None if it is not there."""
    return next((str(value) for key, value in metadata or () if key == "x-request-id"), None)


class Calls:
    """The settings of each call of a client.

    Attributes:
        address: The router's.
    """

    def __init__(self, address: str | None, timeout: float | None, api_key: str | None) -> None:
        self.address = router_address(address)
        self._timeout = timeout
        self._metadata = call_metadata(api_key)

    def _settings(self) -> dict[str, Any]:
        return {"timeout": self._timeout, "metadata": with_trace(self._metadata)}


@contextmanager
def sapwood_errors() -> Iterator[None]:
    """Turns the error of a call into a SapwoodError."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(cast(grpc.Call, error)) from None
