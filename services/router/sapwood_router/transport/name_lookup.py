"""The addresses behind a name: how the router finds the processes of a service that has one name for all of them."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

Lookup = Callable[[str, int], Awaitable[frozenset[str]]]
"""``host:port`` of every address behind a host name, with the port given. Raises OSError."""


async def addresses_behind(host: str, port: int) -> frozenset[str]:
    """What the system's resolver says. Only IPv4 addresses where a name has IPv6 ones too: both lead to the same processes.

    Raises:
        OSError: It knows none, or cannot be asked.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    v4 = frozenset(f"{address[0]}:{port}" for family, _, _, _, address in found if family == socket.AF_INET)
    return v4 or frozenset(f"[{address[0]}]:{port}" for _, _, _, _, address in found)


def name_in(target: str) -> tuple[str, int] | None:
    """Host name and port of a ``name:port`` or ``dns:///name:port``; None of anything else, such as an IP address."""
    host, _, port = target.removeprefix("dns:///").rpartition(":")
    if not host or not port.isdigit() or set(host) & set(":/,[]"):
        return None
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host, int(port)
    return None


async def follow_name(
    host: str,
    port: int,
    name: Callable[[frozenset[str]], None],
    interval: float,
    lookup: Lookup = addresses_behind,
) -> None:
    """Tells ``name`` every address behind a host name, now and after each change, for ever; looks each ``interval`` seconds.

    A lookup that fails changes nothing: processes that answer are worth more than a name server's word.
    """
    known: frozenset[str] | None = None
    reported = False
    while True:
        try:
            found = await lookup(host, port)
        except OSError as error:
            if not reported:
                logger.warning("addresses behind %s: %s", host, error)
            reported = True
        else:
            reported = False
            if found != known:
                known = found
                name(found)
        await asyncio.sleep(interval)
