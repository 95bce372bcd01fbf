"""Opens the connection of a :class:`~sapwood_net.http2.client.duplex_call.DuplexCall`."""

from __future__ import annotations

import asyncio

import grpc

from sapwood_common.errors import ConfigError
from sapwood_common.network.channel import MAX_MESSAGE_BYTES, Dialer
from sapwood_net.http2.client.duplex_call import CallEndedError, DuplexCall


async def open_call(
    target: str, method: str, dialer: Dialer, timeout: float, most_bytes: int = MAX_MESSAGE_BYTES
) -> DuplexCall:
    """Connects, waits until the peer is found to speak HTTP/2, and begins a call. The caller closes it.

    Args:
        target: ``host:port``, also with gRPC's ``dns:///``, ``ipv4:`` or ``ipv6:`` before it, or ``unix:path``.
        method: The method's path.
        dialer: Knows the TLS files.
        timeout: Seconds that this may take.
        most_bytes: The largest message taken.

    Raises:
        CallEndedError: There is no connection, or the TLS files are of no use.
    """
    loop = asyncio.get_running_loop()
    path, host, port = _address(target)
    try:
        tls = dialer.context()
    except ConfigError as error:  # half written: they may be whole the next time
        raise CallEndedError(grpc.StatusCode.UNAVAILABLE, str(error)) from error
    name = dialer.name or host
    authority = "localhost" if path is not None else f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    call = DuplexCall(authority, method, secure=tls is not None, most_bytes=most_bytes)
    try:
        async with asyncio.timeout(timeout):
            if path is not None:
                await loop.create_unix_connection(lambda: call, path)
            else:
                await loop.create_connection(
                    lambda: call, host, port, ssl=tls, server_hostname=None if tls is None else name
                )
            await call.answered()
    except TimeoutError:
        call.close()
        raise CallEndedError(grpc.StatusCode.UNAVAILABLE, f"no connection to {target} in {timeout:g} s") from None
    except (OSError, ValueError) as error:
        raise CallEndedError(grpc.StatusCode.UNAVAILABLE, f"no connection to {target}: {error}") from error
    except BaseException:
        call.close()
        raise
    return call


def _address(target: str) -> tuple[str | None, str, int]:
    """The path of a Unix socket, or a host and its port."""
    if target.startswith("unix:"):
        return target.removeprefix("unix:").removeprefix("//"), "", 0
    for scheme in ("dns:///", "dns:", "ipv4:", "ipv6:"):
        target = target.removeprefix(scheme)
    host, _, port = target.rpartition(":")
    if not host or not port.isdecimal():
        raise CallEndedError(grpc.StatusCode.UNAVAILABLE, f"{target!r} is not host:port")
    return None, host.removeprefix("[").removesuffix("]"), int(port)
