"""What moves pages from the worker that keeps them into this one's host pages.

Ways differ in what carries the bytes. Whatever does, the source is asked before and after, and pages are addressed by ticket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sapwood_worker.records.handoff import HandoffTicket


class MoverError(Exception):
    """The source could not be reached, or stopped answering. Costs a recomputation."""


class PageMover(Protocol):
    """Reads pages by their ticket. Called from several threads at once; every call may block and may fail.

    What it brings is not trusted: whoever asks checks every byte (``storage/record.py``).
    """

    def read(self, ticket: HandoffTicket, indices: Sequence[int], buffers: Sequence[memoryview]) -> list[bool]:
        """Reads pages into records.

        Args:
            ticket: Names them and where they are.
            indices: Which of the ticket's pages.
            buffers: A host record for each. Mutated; one whose answer is false is undefined afterwards.

        Returns:
            For each whether the source had it, before and after it was read, as the ticket says.

        Raises:
            MoverError: The source does not answer, or not as it should; all buffers are undefined.
        """
        ...
