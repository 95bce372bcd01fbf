"""Sources of workers that change while the router runs: a file of addresses, and DNS names."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path

from sapwood_router.fleet import Fleet

logger = logging.getLogger(__name__)

_FILE_INTERVAL = 0.25
_LAPSE_INTERVAL = 0.5


async def follow_file(path: Path, fleet: Fleet) -> None:
    """Names the workers in a file, one ``host:port`` a line, ``#`` begins a comment; again after each change, for ever.

    A file that is missing or cannot be read changes nothing, and neither does what is read only once: whoever writes it may
    be about to replace it, or half through.
    """
    applied: str | None = None
    last: str | None = None
    told = False
    while True:
        try:
            text = await asyncio.to_thread(path.read_text)
        except (OSError, UnicodeDecodeError) as error:
            if not told:
                logger.warning("workers file %s: %s", path, error)
            told, last = True, None
        else:
            told = False
            if text == last and text != applied:
                applied = text
                fleet.name(f"file {path}", read_addresses(text))
            last = text
        await asyncio.sleep(_FILE_INTERVAL)


def read_addresses(text: str) -> list[str]:
    """The addresses in a workers file."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


async def follow_dns(target: str, name: Callable[[frozenset[str]], None], interval: float) -> None:
    """Tells ``name`` every address that ``host:port`` resolves to, now and after each change, for ever.

    It looks again each ``interval`` seconds.

    A lookup that fails changes nothing: workers are worth more than a name server's word.
    """
    host, _, port = target.rpartition(":")
    loop = asyncio.get_running_loop()
    known: frozenset[str] | None = None
    while True:
        try:
            found = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            logger.warning("workers behind %s: %s", target, error)
        else:
            addresses = frozenset(
                f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
                for family, _, _, _, address in found
            )
            if addresses != known:
                known = addresses
                name(addresses)
        await asyncio.sleep(interval)


async def follow_leases(fleet: Fleet) -> None:
    """Removes workers that do not renew their registration, for ever."""
    while True:
        await asyncio.sleep(_LAPSE_INTERVAL)
        fleet.lapse()
