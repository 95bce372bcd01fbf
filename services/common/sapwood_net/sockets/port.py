"""A server's listening socket, its TLS, and its acceptor of connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from sapwood_net.pacing.tarpit import HELD_SECONDS
from sapwood_net.sockets.acceptor import Acceptor
from sapwood_net.sockets.encryption import Encryption
from sapwood_net.sockets.listen import listen
from sapwood_net.sockets.tls import ServerContext, ServerTls
from sapwood_net.sockets.unix_socket import port_of


class Port:
    """An address to listen on.

    Args:
        host: Address or name, or ``unix:PREFIX``.
        number: 0 takes a free one.
        tls: Certificate, key and the clients' CA, taken up again when the files change; None is plain text.
        alpn: Protocols to agree on with clients, over TLS.
        reuse: Whether other processes listen on the same port; each takes some of the connections.
        handshake: Seconds for a TLS handshake.
        shutdown: Seconds for the end of a connection over TLS.
        held: Seconds for which the connection of a client whose TLS is wrong is held.
    """

    def __init__(
        self,
        host: str,
        number: int,
        tls: ServerTls | None = None,
        *,
        alpn: Sequence[str] = (),
        reuse: bool = False,
        handshake: float = 10.0,
        shutdown: float = 10.0,
        held: float = HELD_SECONDS,
    ) -> None:
        self.host = host
        self.number = number
        self.tls = tls
        self.reuse = reuse
        self.handshake = handshake
        self._shutdown = shutdown
        self._held = held
        self._context = None if tls is None else ServerContext(tls, alpn)
        self._acceptor: Acceptor | None = None

    def open(self, make: Callable[[], asyncio.BaseProtocol]) -> int:
        """Listens. Returns the port's number.

        Args:
            make: Makes the protocol of a connection.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        listener = listen(self.host, self.number, reuse_port=self.reuse)
        number = port_of(listener)
        context = self._context
        encryption = (
            None if context is None else Encryption(context.context, self.handshake, self._shutdown, self._held)
        )
        self._acceptor = Acceptor(listener, make, encryption)
        self._acceptor.start()
        return number

    def close(self) -> None:
        """Accepts no more."""
        if self._acceptor is not None:
            self._acceptor.close()
