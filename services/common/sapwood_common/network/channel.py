"""Client channels between services: keepalive, message sizes, request-id metadata."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from sapwood_common.telemetry.logs import REQUEST_ID_KEY, TRACEPARENT_KEY, traceparent_var
from sapwood_net.pacing.time_share import TimeShare
from sapwood_net.sockets.tls import Version, channel_credentials, client_context, version_of

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""The largest message a service sends or takes: a prompt of a few million tokens fits."""

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer that vanished without closing the connection is noticed within 10 + 5 seconds.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A service that restarts is found again within a second, not after grpc's default of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # In spite of its name, this limits one attempt to connect: a peer that is busy, or has just started, greets late.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # A service that comes back at another address is found as soon: by default grpc asks DNS at most twice a minute.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)


def open_channel(
    address: str,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    name: str | None = None,
) -> grpc.aio.Channel:
    """A channel to ``host:port`` (or any gRPC target, such as ``dns:///name:port``); it connects on first use.

    The caller closes it.

    Args:
        address: The target.
        credentials: For TLS; None is plain text.
        name: The host name in the peer's certificate; None: the target's host.
    """
    options: tuple[tuple[str, int | str], ...] = _OPTIONS
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    if name is not None:
        options += (("grpc.ssl_target_name_override", name),)
    return grpc.aio.secure_channel(address, credentials, options=options)


class Dialer:
    """Opens channels to peers with the TLS files of the configuration, read again for each.

    Args:
        ca: PEM file with the CAs that servers' certificates must come from; None is plain text.
        cert: PEM file with the certificate to show.
        key: PEM file with its key.
        name: The host name in the peers' certificates; None: the host at which each is reached.

    Attributes:
        share: The work for all data from its peers has one share of the event loop's time.

    Raises:
        ConfigError: A file is missing or cannot be read; :meth:`open` and :meth:`context` raise it, too.
    """

    def __init__(
        self, ca: Path | None = None, cert: Path | None = None, key: Path | None = None, name: str | None = None
    ) -> None:
        self._files = (ca, cert, key)
        self._name = name
        self.share = TimeShare()
        channel_credentials(*self._files)

    def expecting(self, name: str | None) -> Dialer:
        """A dialer with the same files, for peers whose certificates are for ``name``, whatever their addresses are."""
        dialer = Dialer(*self._files, name)
        dialer.share = self.share
        return dialer

    def version(self) -> Version | None:
        """Differs after any of the files has changed; None where there are none. Raises OSError if one is missing."""
        files = [file for file in self._files if file is not None]
        return version_of(files) if files else None

    def open(self, address: str) -> grpc.aio.Channel:
        """A channel as :func:`open_channel` makes it, with the credentials and name of the configuration."""
        credentials = channel_credentials(*self._files)
        return open_channel(address, credentials=credentials, name=self._name)

    def context(self) -> ssl.SSLContext | None:
        """The TLS context for HTTP/2 connections that are not grpcio's; None is plain text."""
        return client_context(*self._files)

    @property
    def name(self) -> str | None:
        """The host name in the peers' certificates; None: the host at which each is reached."""
        return self._name


def request_metadata(request_id: str) -> tuple[tuple[str, str], ...]:
    """The metadata that hands a request id, and the current task's trace context, on to the next service."""
    traceparent = traceparent_var.get()
    if traceparent is None:
        return ((REQUEST_ID_KEY, request_id),)
    return ((REQUEST_ID_KEY, request_id), (TRACEPARENT_KEY, traceparent))
