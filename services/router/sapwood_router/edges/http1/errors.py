"""Errors for which HTTP has a status and the error tree has no class."""

from __future__ import annotations

from sapwood_common.errors import InvalidArgumentError


class HttpError(InvalidArgumentError):
    """A request that is refused with a status of its own.

    Args:
        status: The HTTP status.
        message: One sentence for the person who reads it.
        field: The header at fault.
    """

    def __init__(self, status: int, message: str, *, field: str | None = None) -> None:
        super().__init__(message, field=field)
        self.status = status
