"""The interface of transfer backends: they move pages from the worker that keeps them into this worker's host pages.

Backends differ in what carries the bytes. All of them ask the source before and after a read, and address pages by ticket.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from sapwood_worker.records.handoff import HandoffTicket


class TransferError(Exception):
    """The source could not be reached, or stopped answering. The pages are computed again."""


class PartCount:
    """Counts bytes of pages that arrived before all of the pages' layers were computed. Thread-safe.

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
        parts: Counts bytes that arrived before all layers of their pages were computed; 0 for backends that read only whole
            pages.
    """

    parts: PartCount

    def read(self, ticket: HandoffTicket, indices: Sequence[int], buffers: Sequence[memoryview]) -> list[bool]:
        """Reads pages into records.

        Args:
            ticket: Names them and where they are.
            indices: Which of the ticket's pages.
            buffers: A host record for each page. Mutated; a record whose answer is false is undefined afterwards.

        Returns:
            For each page, whether the source had it with the ticket's content before and after the read.

        Raises:
            TransferError: The source does not answer, or answers wrongly; all buffers are undefined.
        """
        ...
