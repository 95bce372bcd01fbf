"""What moves pages from the worker that keeps them into this one's host pages.

Ways differ in what carries the bytes. Whatever does, the source is asked before and after, and pages are addressed by ticket.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from sapwood_worker.records.handoff import HandoffTicket


class TransferError(Exception):
    """The source could not be reached, or stopped answering. Costs a recomputation."""


class PartCount:
    """Counts what came of pages before all of their layers were computed. For any thread.

    Attributes:
        bytes: How many.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """More came."""
        with self._lock:
            self.bytes += count


class TransferBackend(Protocol):
    """Reads pages by their ticket. Called from several threads at once; every call may block and may fail.

    What it brings is not trusted: the caller checks every byte (``storage/record.py``).

    Attributes:
        parts: Counts what came of pages before all of their layers were computed; 0 for backends that take none in parts.
    """

    parts: PartCount

    def read(self, ticket: HandoffTicket, indices: Sequence[int], buffers: Sequence[memoryview]) -> list[bool]:
        """Reads pages into records.

        Args:
            ticket: Names them and where they are.
            indices: Which of the ticket's pages.
            buffers: A host record for each. Mutated; one whose answer is false is undefined afterwards.

        Returns:
            For each whether the source had it, before and after it was read, as the ticket says.

        Raises:
            TransferError: The source does not answer, or not as it should; all buffers are undefined.
        """
        ...
