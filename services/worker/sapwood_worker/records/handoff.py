"""The ticket of a KV transfer: permission to read a prompt's pages from the worker that has computed them."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

import msgspec

logger = logging.getLogger(__name__)


class HandoffTicket(msgspec.Struct, frozen=True, array_like=True):
    """The content of a ``HandoffTicket`` of ``worker.proto``.

    Attributes:
        transfer_id: 16 random bytes; a reader must present them.
        source: ``host:port`` at which the pages are read.
        epoch: The epoch of the process that keeps them.
        fingerprint: Equal only if pages have the same content: model, dtype, layout and page size.
        page_hashes: The hashes of the prompt's first pages, in order.
        places: The page id of each in the source's host pool, and the epoch of that page.
        lease_ms: For how long they are kept unless the lease is renewed.
        first_page: The index of the first page of the prompt that this ticket names.
    """

    transfer_id: bytes
    source: str
    epoch: int
    fingerprint: bytes
    page_hashes: list[bytes]
    places: list[tuple[int, int]]
    lease_ms: int
    first_page: int = 0

    def joined(self, later: HandoffTicket) -> HandoffTicket:
        """Joins this announcement and the next one; returns only ``later`` if it is of another transfer."""
        if (later.transfer_id, later.first_page) != (self.transfer_id, self.first_page + len(self.places)):
            return later
        return msgspec.structs.replace(
            self, page_hashes=self.page_hashes + later.page_hashes, places=self.places + later.places
        )


class Handoff(NamedTuple):
    """The part of a request in KV transfers.

    Attributes:
        hands_off: Whether the request ends with its first token, and the prompt's pages are kept for another worker.
        ticket: For pages of its prompt that another worker keeps; None: there is none.
    """

    hands_off: bool = False
    ticket: HandoffTicket | None = None


NO_HANDOFF = Handoff()


def log_stage(stage: str) -> None:
    """Writes a debug line: a KV transfer comes to a stage now, in seconds of a clock that all processes of a machine share."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("handoff stage %s at %.6f", stage, time.monotonic())
