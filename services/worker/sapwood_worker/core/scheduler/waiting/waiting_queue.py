"""Requests that wait to be admitted: bounded, and quick to take one out of the middle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sapwood_common.errors import ResourceExhaustedError
from sapwood_worker.core.scheduler.request import Request


class WaitingQueue:
    """New requests by priority and tenant, each in order of arrival, and retracted requests. Adding and removing is O(1).

    Args:
        limit: The most requests it takes in. A retracted request always finds room: it was let in before.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._new: dict[tuple[int, str], dict[int, Request]] = {}
        self._num_new = 0
        self._put_back: dict[int, Request] = {}
        self.num_tokens = 0
        """Tokens that the waiting requests would have to compute if nothing were cached."""

    def __len__(self) -> int:
        return self._num_new + len(self._put_back)

    def add(self, request: Request) -> None:
        """Lets a new request in.

        Raises:
            ResourceExhaustedError: The queue is full.
        """
        if self._num_new >= self._limit:
            raise ResourceExhaustedError(f"the queue is full: {self._limit} requests wait", retry_after=1.0)
        self._new.setdefault((request.priority, request.tenant), {})[request.serial] = request
        self._num_new += 1
        self.num_tokens += request.remaining

    def put_back(self, request: Request) -> None:
        """Takes a retracted request back."""
        self._put_back[request.serial] = request
        self.num_tokens += request.remaining

    def remove(self, request: Request, tokens: int) -> None:
        """Takes a request out; ``tokens`` is what it had to compute when it was let in or put back."""
        if self._put_back.pop(request.serial, None) is None:
            place = request.priority, request.tenant
            del self._new[place][request.serial]
            self._num_new -= 1
            if not self._new[place]:
                del self._new[place]
        self.num_tokens -= tokens

    def retracted(self) -> Sequence[Request]:
        """The requests that were put back, in no order."""
        return list(self._put_back.values())

    def queues(self) -> Iterator[tuple[int, str, dict[int, Request]]]:
        """Priority, tenant and their new requests by arrival, at least one; valid until the queue changes."""
        for (priority, tenant), queue in self._new.items():
            yield priority, tenant, queue

    def __iter__(self) -> Iterator[Request]:
        """All of them, in no order; valid until the queue changes."""
        yield from self._put_back.values()
        for queue in self._new.values():
            yield from queue.values()
