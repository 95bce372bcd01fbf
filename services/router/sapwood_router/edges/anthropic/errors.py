"""Errors as Anthropic's API tells them."""

from __future__ import annotations

import msgspec

from sapwood_common import errors
from sapwood_router.edges.http.errors import http_status

_OVERLOADED = 529
_STATUSES = {503: _OVERLOADED}
"""Anthropic's statuses where they are others; clients wait and ask again at both."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}


class ErrorDetails(msgspec.Struct):
    """What programs read of an error."""

    error_code: str


class ThreadsError(errors.InvalidArgumentError):
    """A request that continues a thread: its client then sends the whole conversation."""


class Error(msgspec.Struct):
    """An error."""

    type: str
    message: str
    details: ErrorDetails | msgspec.UnsetType = msgspec.UNSET


class ErrorResponse(msgspec.Struct, kw_only=True):
    """What tells an error."""

    type: str = "error"
    error: Error
    request_id: str


class AnthropicDialect:
    """Implements :class:`Dialect` as Anthropic's API does: the message begins with the field at fault."""

    shape: type[msgspec.Struct] = ErrorResponse
    id_header: bytes | None = b"request-id"

    def status(self, error: errors.SapwoodError) -> int:
        status = http_status(error)
        return _STATUSES.get(status, status)

    def body(self, error: errors.SapwoodError, request_id: str) -> bytes:
        message = error.message
        if error.field and error.field not in message:
            message = f"{error.field}: {message}"
        detail = Error(_TYPES.get(self.status(error), "api_error"), message)
        if isinstance(error, ThreadsError):
            detail.details = ErrorDetails("thread_unsupported_request")
        return msgspec.json.encode(ErrorResponse(error=detail, request_id=request_id))

    def event(self, error: errors.SapwoodError, request_id: str) -> bytes:
        return b"event: error\ndata: %b\n\n" % self.body(error, request_id)
