"""The one exception tree. ``status.py`` says which gRPC status and HTTP code each class becomes."""

from __future__ import annotations

from sapwood_net.errors import (
    AlreadyExistsError,
    ConfigError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    forget_frames,
)
from sapwood_net.errors import CallError as SapwoodError

__all__ = [
    "AlreadyExistsError",
    "ConfigError",
    "DeadlineExceededError",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "PromptTooLongError",
    "RequestCancelledError",
    "ResourceExhaustedError",
    "SapwoodError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "forget_frames",
]


class PromptTooLongError(InvalidArgumentError):
    """A prompt longer than the context, in words that agents look for: they shorten the conversation and continue."""

    @classmethod
    def of(cls, tokens: int, most: int, *, field: str | None = None) -> PromptTooLongError:
        """The error of a prompt of this many tokens where ``most`` would do."""
        return cls(
            f"prompt is too long: {tokens} tokens > {most} maximum. This model's maximum context length is {most} tokens; "
            "please reduce the length of the messages",
            field=field,
        )

    @classmethod
    def in_bytes(cls, size: int, most: int, *, field: str | None = None) -> PromptTooLongError:
        """The same where its bytes say so, before there are tokens."""
        return cls(
            f"prompt is too long: {size} bytes > {most} maximum; please reduce the length of the messages", field=field
        )
