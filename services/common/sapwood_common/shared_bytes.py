"""Memory that running requests share, fair between their owners.

An owner may hold as much as is free (dynamic thresholds with factor 1: Choudhury and Hahne, 1998). One alone may hold about half,
two a third each, and an owner that holds nothing finds room. Invariant: what owners hold together is at most the limit. O(1).
"""

from __future__ import annotations

from collections import defaultdict

from sapwood_common.errors import ResourceExhaustedError


class SharedBytes:
    """Counts what is held. Lives on one event loop.

    Args:
        limit: Bytes that all owners may hold together.
        what: What is held, for errors: ``pictures``.

    Attributes:
        total: Bytes that are held.
    """

    def __init__(self, limit: int, what: str) -> None:
        self._limit, self._what = limit, what
        self._held: dict[str, int] = defaultdict(int)
        self.total = 0

    def hold(self, owner: str, size: int) -> None:
        """Counts ``size`` further bytes of an owner, until :meth:`release`.

        Raises:
            ResourceExhaustedError: They are too many; nothing is counted.
        """
        if not size:
            return
        held, free = self._held.get(owner, 0), self._limit - self.total
        if size > free or (held and held + size > free):
            raise ResourceExhaustedError(
                f"{self._what} of running requests take {self.total} of {self._limit} bytes: try again later",
                retry_after=1.0,
            )
        self._held[owner] += size
        self.total += size

    def release(self, owner: str, size: int) -> None:
        """Gives bytes back that :meth:`hold` has counted."""
        if not size:
            return
        self._held[owner] -= size
        self.total -= size
        assert self._held[owner] >= 0, "it was given back twice"
        if not self._held[owner]:
            del self._held[owner]
