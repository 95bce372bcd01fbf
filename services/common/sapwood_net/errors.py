"""The errors of a call: one class for each gRPC status that a service chooses. A project may derive its own from these."""

from __future__ import annotations

_MOST_TOLD = 4096
"""The most characters of a message: it may quote the caller, who may have sent megabytes."""
_LONGEST_FIELD = 1024
"""Characters of a field: its last part may be a caller's key, or another service's word."""


class CallError(Exception):
    """An error that its caller sees.

    Args:
        message: One sentence for the person who reads it.
        field: The request field at fault, as the caller spells it (``sampling.temperature``).
        retry_after: Seconds after which trying again makes sense, if it does.
    """

    def __init__(self, message: str, *, field: str | None = None, retry_after: float | None = None) -> None:
        if len(message) > _MOST_TOLD:
            message = f"{message[: _MOST_TOLD // 2]} ... {message[-_MOST_TOLD // 2 :]}"
        super().__init__(message)
        self.message = message
        self.field = field if field is None else field[:_LONGEST_FIELD]
        self.retry_after = retry_after


class InvalidArgumentError(CallError):
    """A malformed or out-of-range field, or a prompt longer than the context."""


class NotFoundError(CallError):
    """No such model, worker or request."""


class AlreadyExistsError(CallError):
    """The request id is in use."""


class UnauthenticatedError(CallError):
    """A missing or wrong key."""


class ResourceExhaustedError(CallError):
    """A queue is full or a limit is reached; the same request may succeed later."""


class UnavailableError(CallError):
    """No worker, a broken connection, or a service that is starting or draining."""


class DeadlineExceededError(CallError):
    """The caller's deadline passed; its work was cancelled."""


class RequestCancelledError(CallError):
    """The request was aborted, by its client or by an operator."""


class UnimplementedError(CallError):
    """The method or option does not exist here."""


class InternalError(CallError):
    """A fault of the service itself, not of the request."""


class ConfigError(Exception):
    """A service cannot start as configured. The message names the flag or file."""


def forget_frames(error: BaseException | None) -> None:
    """Drops the traceback of an error, and those of the errors that led to it.

    A frame in a traceback that refers to the error, as the frame of a future's awaiter does, makes a cycle: it would keep a
    request of many megabytes until the garbage collector comes.
    """
    left = [error]
    while left:  # each may be made of others, or of itself where it was raised again
        one = left.pop()
        if one is not None:
            left += [one.__cause__, one.__context__]
            one.__traceback__ = one.__cause__ = one.__context__ = None
