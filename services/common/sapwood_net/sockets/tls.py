"""TLS between services: credentials from files, and servers that take up new files without a restart."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from sapwood_net.errors import ConfigError

logger = logging.getLogger(__name__)

Version = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The certificates that a server shows and requires.

    Attributes:
        cert: PEM file with its certificate, intermediate ones after it.
        key: PEM file with its private key.
        client_ca: PEM file with the CAs that clients' certificates must come from; None asks for none.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    def version(self) -> Version:
        """Differs after any of the files has changed."""
        files = (self.cert, self.key) if self.client_ca is None else (self.cert, self.key, self.client_ca)
        return version_of(files)


def version_of(files: Iterable[Path]) -> Version:
    """Differs after any of the files has changed. Raises OSError if one is missing."""
    stats = [file.stat() for file in files]
    return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)


def server_tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> ServerTls | None:
    """The server's TLS as configured; None without.

    Raises:
        ConfigError: A part is missing, or the files do not go together.
    """
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise ConfigError("--tls-cert and --tls-key go together, and --tls-client-ca with them")
    tls = ServerTls(cert, key, client_ca)
    for flag, file in (("--tls-cert", cert), ("--tls-key", key), ("--tls-client-ca", client_ca)):
        _check_readable(flag, file)
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
    except (OSError, ssl.SSLError) as error:
        said = error.strerror or str(error)
        if isinstance(error, ssl.SSLError) and "PEM lib" in said:  # OpenSSL's word for a file with none of it
            said = "one holds no PEM: -----BEGIN CERTIFICATE----- in the first, -----BEGIN ... PRIVATE KEY----- in the second"
        raise ConfigError(f"--tls-cert {cert}, --tls-key {key}: {said}") from None
    return tls


def _check_readable(flag: str, file: Path | None) -> None:
    """OpenSSL does not say which of two files it cannot open. Raises ConfigError."""
    try:
        if file is not None:
            file.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {file}: {error.strerror}") from None


class ServerContext:
    """An SSL context that follows the files: handshakes after a change use the new files; broken files are logged and ignored.

    An SSL context cannot forget a CA, and a listener keeps the context it began with: so each handshake moves to the newest one.

    Args:
        tls: The files.
        alpn: Protocols to agree on with clients, where they ask.

    Attributes:
        context: For the listener.
    """

    def __init__(self, tls: ServerTls, alpn: Sequence[str] = ()) -> None:
        self._tls = tls
        self._alpn = list(alpn)
        self._version = tls.version()
        self.context = self._newest = self._make()
        self.context.sni_callback = self._move

    def _make(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._tls.cert, self._tls.key)
        if self._tls.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self._tls.client_ca)
            # A session that is resumed is not verified again: a CA that is no longer one would still let its clients in.
            context.num_tickets = 0
            context.minimum_version = ssl.TLSVersion.TLSv1_3  # before it, sessions could not be denied
        if self._alpn:
            context.set_alpn_protocols(self._alpn)
        return context

    def _move(self, handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        try:
            found = self._tls.version()
            if found != self._version:
                self._version = found
                self._newest = self._make()  # raises where files are half-written
        except (OSError, ssl.SSLError) as error:
            logger.warning("new TLS files are not taken up: %s", error)
        if self._newest is not self.context:
            handshake.context = self._newest


def channel_credentials(ca: Path | None, cert: Path | None, key: Path | None) -> grpc.ChannelCredentials | None:
    """A client's credentials; None, that is plain text, without a CA.

    Args:
        ca: PEM file with the CAs that servers' certificates must come from.
        cert: PEM file with the certificate to show.
        key: PEM file with its key.

    Raises:
        ConfigError: A part is missing or cannot be read.
    """
    if ca is None:
        if cert is not None or key is not None:
            raise ConfigError("--peer-cert and --peer-key need --peer-ca")
        return None
    if (cert is None) != (key is None):
        raise ConfigError("--peer-cert and --peer-key go together")
    try:
        return grpc.ssl_channel_credentials(
            ca.read_bytes(), None if key is None else key.read_bytes(), None if cert is None else cert.read_bytes()
        )
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from None


def client_context(ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """A client's TLS context for HTTP/2 connections that are not grpcio's; None, that is plain text, without a CA.

    Raises:
        ConfigError: A part is missing or cannot be read.
    """
    if channel_credentials(ca, cert, key) is None:
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
        context.set_alpn_protocols(["h2"])
        if cert is not None:
            context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--peer-ca {ca}, --peer-cert {cert}: {error.strerror or error}") from None
    return context
