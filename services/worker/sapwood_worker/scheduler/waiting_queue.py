"""Requests that wait to be admitted: bounded, and quick to take one out of the middle."""

from __future__ import annotations

from collections.abc import Iterator

from sapwood_common.errors import ResourceExhaustedError
from sapwood_worker.scheduler.request import Request


class WaitingQueue:
    """The queue in order of arrival; retracted requests come first. Adding and removing is O(1).

    Args:
        limit: The most requests it takes in. A retracted request always finds room: it was let in before.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._new: dict[int, Request] = {}
        self._retracted: dict[int, Request] = {}
        self.num_tokens = 0
        """Tokens that the waiting requests have to compute, were nothing cached."""

    def __len__(self) -> int:
        return len(self._new) + len(self._retracted)

    def add(self, request: Request) -> None:
        """Lets a new request in.

        Raises:
            ResourceExhaustedError: The queue is full.
        """
        if len(self._new) >= self._limit:
            raise ResourceExhaustedError(f"the queue is full: {self._limit} requests wait", retry_after=1.0)
        self._new[request.serial] = request
        self.num_tokens += request.remaining

    def put_back(self, request: Request) -> None:
        """Takes a retracted request back, before all new ones."""
        self._retracted[request.serial] = request
        self.num_tokens += request.remaining

    def remove(self, request: Request, tokens: int) -> None:
        """Takes a request out, which had this many tokens to compute when it was let in."""
        if self._new.pop(request.serial, None) is None:
            del self._retracted[request.serial]
        self.num_tokens -= tokens

    def retracted(self) -> list[Request]:
        """The retracted requests, by arrival."""
        return sorted(self._retracted.values(), key=lambda request: request.arrival)

    def new(self) -> Iterator[Request]:
        """The others that may be admitted, by arrival; valid until the queue changes."""
        return (request for request in self._new.values() if not request.held)

    def held(self) -> list[Request]:
        """Those that may not be admitted yet."""
        return [request for request in self._new.values() if request.held]
