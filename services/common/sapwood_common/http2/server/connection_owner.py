"""The server, as its connections know it."""

from __future__ import annotations

from typing import Protocol, TypeVar

from sapwood_common.http2.server.stream import ServerStream
from sapwood_common.http2.wire.frames import ConnectionFailedError
from sapwood_common.http2.wire.request_head import RequestHead

ConnectionT_contra = TypeVar("ConnectionT_contra", contravariant=True)


class ConnectionOwner(Protocol[ConnectionT_contra]):
    """Is told what happens on connections. Its methods raise only what they name."""

    def connection_made(self, connection: ConnectionT_contra) -> None:
        """The connection has begun. It never does if its TLS handshake fails."""

    def connection_lost(self, connection: ConnectionT_contra) -> None:
        """The connection is over."""

    def connection_failed(self, connection: ConnectionT_contra, error: ConnectionFailedError) -> None:
        """The client broke the protocol, or a rule: the connection ends."""

    def open_call(self, connection: ConnectionT_contra, stream: ServerStream, head: RequestHead) -> None:
        """Begins a call whose head is well formed: names the stream's receiver, or ends the stream.

        Raises:
            ConnectionFailedError: The client sends too many calls of this kind.
        """
