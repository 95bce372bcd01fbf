"""Copies pages between device and host: the runner's half of the second tier."""

from __future__ import annotations

from typing import Protocol

from sapwood_worker.records.page_copies import Copies, CopyReport


class Transfer(Protocol):
    """Carries out what the scheduler asks for. The runner calls it before each step's computation."""

    def start(self, copies: Copies) -> None:
        """Copies pages, in the order and with the waits that :class:`Copies` says.

        Mutates the host pages of the store, which are valid once it is reported done, and the device pages of the load,
        which are valid for whatever the step computes next.
        """
        ...

    def finish(self, *, failed: bool = False) -> None:
        """The step's computation has been queued, or has failed: copies what is left of the pages that it fills."""
        ...

    def poll(self) -> CopyReport:
        """The stores that have ended since the last call; never waits."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a store has been started and not reported."""
        ...
