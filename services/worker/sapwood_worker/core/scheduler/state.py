"""The states of a request and the ways between them."""

from __future__ import annotations

from enum import Enum


class RequestState(Enum):
    """Where a request is."""

    WAITING = "waiting"
    """In the queue: it has no row and no pages."""
    RUNNING = "running"
    """It has a row in the page table; each step computes some of its tokens."""
    FINISHED = "finished"
    """It ended, for whatever reason; nothing of it is left but what it put into the prefix cache."""


_ALLOWED = {
    RequestState.WAITING: {RequestState.RUNNING, RequestState.FINISHED},
    RequestState.RUNNING: {RequestState.WAITING, RequestState.FINISHED},
    RequestState.FINISHED: set[RequestState](),
}


class IllegalTransitionError(AssertionError):
    """A request was about to make a transition that does not exist. A bug of ours."""


def check_transition(request_id: str, old: RequestState, new: RequestState) -> None:
    """Raises IllegalTransitionError unless a request may go from ``old`` to ``new``."""
    if new not in _ALLOWED[old]:
        raise IllegalTransitionError(f"request {request_id}: {old.value} -> {new.value}")
