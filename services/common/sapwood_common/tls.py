"""TLS between services: credentials from files, and servers that take up new files without a restart."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc

from sapwood_common.errors import ConfigError

logger = logging.getLogger(__name__)

Version = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ServerTls:
    """What a server shows and asks for.

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
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-cert {cert}, --tls-key {key}: {error.strerror or error}") from None
    return tls


def grpc_server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Credentials that follow the files: a handshake after a change sees the new ones; broken ones are logged and ignored."""
    first = tls.version()

    class Follower:
        version = first

        def __call__(self) -> grpc.ServerCertificateConfiguration | None:
            try:
                found = tls.version()
                if found == self.version:
                    return None
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(tls.cert, tls.key)  # or half-written files would be taken up
                if tls.client_ca is not None:
                    context.load_verify_locations(tls.client_ca)
                self.version = found
                return _configuration(tls)
            except (OSError, ssl.SSLError) as error:
                logger.warning("new TLS files are not taken up: %s", error)
                return None

    return grpc.dynamic_ssl_server_credentials(
        _configuration(tls),
        Follower(),  # type: ignore[arg-type]  # None, for no change, is missing in the stubs
        require_client_authentication=tls.client_ca is not None,
    )


def _configuration(tls: ServerTls) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(tls.key.read_bytes(), tls.cert.read_bytes())],
        root_certificates=None if tls.client_ca is None else tls.client_ca.read_bytes(),
    )


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
    """The same for connections that are not grpcio's, speaking HTTP/2; None, that is plain text, without a CA.

    Raises:
        ConfigError: As :func:`channel_credentials`.
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
