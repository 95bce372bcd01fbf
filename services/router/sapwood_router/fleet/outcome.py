"""What the end of a worker's try at a request says about the worker."""

from __future__ import annotations

import enum

from sapwood_common.errors import InternalError, ResourceExhaustedError, SapwoodError, UnavailableError


class Outcome(enum.Enum):
    """What an attempt says about its worker."""

    SUCCESS = "success"
    SERVER_FAULT = "server_fault"
    """The worker failed, or is gone."""
    BUSY = "busy"
    """It refused because it has enough to do: that is no fault."""
    NEUTRAL = "neutral"
    """The client's fault, its leaving, or its deadline."""


class WorkerLostError(UnavailableError):
    """The connection to the worker broke or fell silent: its requests get no more output from it."""


class WorkerLeftError(WorkerLostError):
    """The worker went as planned, by an operator or after it said that it drains: nothing is wrong with it or the request."""


def outcome_of(error: SapwoodError) -> Outcome:
    """What a failure says about the worker."""
    if isinstance(error, WorkerLostError):
        return Outcome.NEUTRAL  # the loss is one fault, counted where it is noticed, whatever was running
    if isinstance(error, UnavailableError | InternalError):
        return Outcome.SERVER_FAULT
    if isinstance(error, ResourceExhaustedError):
        return Outcome.BUSY
    return Outcome.NEUTRAL
