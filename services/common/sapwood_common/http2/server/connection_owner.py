"""What a connection tells its server."""

from __future__ import annotations

from typing import Protocol, TypeVar

from sapwood_common.http2.server.stream import ServerStream
from sapwood_common.http2.wire.frames import ConnectionFailedError
from sapwood_common.http2.wire.request_head import RequestHead

ConnectionT_contra = TypeVar("ConnectionT_contra", contravariant=True)


class ConnectionOwner(Protocol[ConnectionT_contra]):
    """The server. Raises nothing but where that is said."""

    def connection_made(self, connection: ConnectionT_contra) -> None:
        """It has begun, which after a failed TLS handshake it never does."""

    def connection_lost(self, connection: ConnectionT_contra) -> None:
        """It is over."""

    def connection_failed(self, connection: ConnectionT_contra, error: ConnectionFailedError) -> bool:
        """The client broke the protocol, or a rule: the connection ends. Returns whether there is room to let it linger."""
        ...

    def open_call(self, connection: ConnectionT_contra, stream: ServerStream, head: RequestHead) -> None:
        """A call that is well formed: names the stream's receiver, or ends the stream.

        Raises:
            ConnectionFailedError: There are too many of its kind.
        """
