"""Errors as clients get them: in OpenAI's format, unless an API has its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from sapwood_common import errors
from sapwood_common.status import row_of
from sapwood_router.edges.http1.errors import HttpError
from sapwood_router.request.objective import SHED, STATUS_KEY, ShedError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class Error(msgspec.Struct):
    """An error; ``param`` is the parameter or header at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    """What tells an error."""

    error: Error


class Dialect(Protocol):
    """How an API tells errors.

    Attributes:
        shape: What its error responses are.
        id_header: Where its clients look for the request's id, beside ``x-request-id``; None: nowhere.
    """

    shape: type[msgspec.Struct]
    id_header: bytes | None

    def status(self, error: errors.SapwoodError) -> int:
        """The HTTP status of an error."""
        ...

    def body(self, error: errors.SapwoodError, request_id: str) -> bytes:
        """The body of an error response, as JSON."""
        ...

    def event(self, error: errors.SapwoodError, request_id: str) -> bytes:
        """The last event of a stream that failed."""
        ...


class OpenAIDialect:
    """Implements :class:`Dialect` as OpenAI's API does."""

    shape: type[msgspec.Struct] = ErrorResponse
    id_header: bytes | None = None

    def status(self, error: errors.SapwoodError) -> int:
        return http_status(error)

    def body(self, error: errors.SapwoodError, request_id: str) -> bytes:
        return error_body(error)

    def event(self, error: errors.SapwoodError, request_id: str) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"


OPENAI = OpenAIDialect()


class Dialects:
    """Which API a request is of where no route says so.

    Args:
        below: Paths below these belong to this API; the first matching one counts.
        by_header: Requests with one of these headers, in lower case, belong to this API.
    """

    def __init__(self, below: Sequence[tuple[str, Dialect]] = (), by_header: Mapping[bytes, Dialect] | None = None):
        self._below = below
        self._by_header = by_header or {}

    def of(self, path: str, headers: Mapping[bytes, bytes]) -> Dialect:
        """The dialect of a request."""
        for header, dialect in self._by_header.items():
            if header in headers:
                return dialect
        return next((dialect for prefix, dialect in self._below if path.startswith(prefix)), OPENAI)


def http_status(error: errors.SapwoodError) -> int:
    """The HTTP status of an error."""
    return error.status if isinstance(error, HttpError) else row_of(error).http


def error_body(error: errors.SapwoodError) -> bytes:
    """The body of an error response, as JSON."""
    kind = _TYPES.get(http_status(error), "server_error")
    return msgspec.json.encode(ErrorResponse(Error(error.message, kind, error.field, error_code(error))))


def error_code(error: errors.SapwoodError) -> str | None:
    """OpenAI's code of an error, where it has one."""
    if isinstance(error, errors.PromptTooLongError):
        return "context_length_exceeded"
    if isinstance(error, errors.NotFoundError) and error.field == "model":
        return "model_not_found"
    return None


def retry_headers(error: errors.SapwoodError) -> list[tuple[bytes, bytes]]:
    """The headers of 429 and 503: ``Retry-After`` (whole seconds, at least 1), and milliseconds for OpenAI's clients; and whether
    it is for a request's objective."""
    if http_status(error) not in (429, 503):
        return []
    seconds = error.retry_after or 1.0
    shed = [(STATUS_KEY.encode(), SHED.encode())] if isinstance(error, ShedError) else []
    return [
        *shed,
        (b"retry-after", b"%d" % max(1, math.ceil(seconds))),
        (b"retry-after-ms", b"%d" % math.ceil(seconds * 1000)),
    ]
