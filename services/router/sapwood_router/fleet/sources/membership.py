"""Sources of workers that change while the router runs: a file of addresses, and registrations."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from sapwood_router.fleet.fleet import Fleet
from sapwood_router.transport.backend.spec import has_credentials

logger = logging.getLogger(__name__)

_FILE_INTERVAL = 0.25
_LAPSE_INTERVAL = 0.5


async def follow_file(path: Path, fleet: Fleet) -> None:
    """Names the workers in a file, one ``host:port`` a line, ``#`` begins a comment; again after each change, for ever.

    A file that is missing or cannot be read changes nothing, and neither does what is read only once: anybody who writes it may
    be about to replace it, or half through.
    """
    applied: str | None = None
    last: str | None = None
    reported = False
    while True:
        try:
            text = await asyncio.to_thread(path.read_text)
        except (OSError, UnicodeDecodeError) as error:
            if not reported:
                logger.warning("workers file %s: %s", path, error)
            reported, last = True, None
        else:
            reported = False
            if text == last and text != applied:
                applied = text
                fleet.name(f"file {path}", read_addresses(text))
            last = text
        await asyncio.sleep(_FILE_INTERVAL)


def read_addresses(text: str) -> list[str]:
    """The addresses in a workers file. URLs with credentials are left out: an address shows everywhere."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        address = line.partition("#")[0].strip()
        if has_credentials(address):
            logger.error("workers file, line %d: credentials belong in --backends: it is left out", number)
        elif address:
            found.append(address)
    return found


async def follow_leases(fleet: Fleet) -> None:
    """Removes workers that do not renew their registration, for ever."""
    while True:
        await asyncio.sleep(_LAPSE_INTERVAL)
        fleet.lapse()
