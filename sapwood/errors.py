"""The errors of calls to Sapwood: one exception for each gRPC status, with the field at fault and the retry delay.

Needs nothing but grpcio. The ``google.rpc`` details that carry field and delay are three small messages
(https://github.com/googleapis/googleapis/blob/master/google/rpc/error_details.proto); reading them here, one pass over
their wire format, spares clients the googleapis package.
"""

from __future__ import annotations

from collections.abc import Iterator

import grpc

_DETAILS_KEY = "grpc-status-details-bin"
_REQUEST_ID_KEY = "x-request-id"


class SapwoodError(Exception):
    """A call failed. Subclasses say how; catch this one for all.

    Attributes:
        status: The gRPC status.
        message: One sentence for a person.
        field: The request field at fault (``sampling.temperature``), if the request was.
        retry_after: Seconds after which trying again makes sense, if the server said so.
        request_id: Under which the services logged the request, if it got that far.
    """

    def __init__(
        self,
        status: grpc.StatusCode,
        message: str,
        *,
        field: str | None = None,
        retry_after: float | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.field = field
        self.retry_after = retry_after
        self.request_id = request_id

    def __str__(self) -> str:
        """``INVALID_ARGUMENT (sampling.temperature): must be at least 0``."""
        return f"{self.status.name}{f' ({self.field})' if self.field else ''}: {self.message}"


class InvalidArgumentError(SapwoodError):
    """A field is malformed or out of range, or the prompt is longer than the context; ``field`` names it."""


class UnauthenticatedError(SapwoodError):
    """A missing or wrong key."""


class NotFoundError(SapwoodError):
    """No such model."""


class AlreadyExistsError(SapwoodError):
    """The request id is in use."""


class ResourceExhaustedError(SapwoodError):
    """A queue is full or a limit is reached; try again after ``retry_after`` seconds."""


class CancelledError(SapwoodError):
    """The call was cancelled, here or by the server."""


class UnavailableError(SapwoodError):
    """The router cannot be reached, is shutting down, or has no worker that could answer."""


class DeadlineExceededError(SapwoodError):
    """The call took longer than its timeout; the servers stopped working on it."""


class UnimplementedError(SapwoodError):
    """The server does not know the method or option."""


class ServerError(SapwoodError):
    """A fault of the server; its log has the details under ``request_id``."""


_CLASSES: dict[grpc.StatusCode, type[SapwoodError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgumentError,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidArgumentError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: UnauthenticatedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
}


def from_rpc_error(error: grpc.Call | grpc.aio.AioRpcError, *, request_id: str | None = None) -> SapwoodError:
    """The exception for a failed call, field and retry delay restored from its trailing metadata."""
    code = error.code() or grpc.StatusCode.UNKNOWN
    field: str | None = None
    retry_after: float | None = None
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            field, retry_after = _read_details(value)
        elif key == _REQUEST_ID_KEY and isinstance(value, str):
            request_id = value
    return _CLASSES.get(code, ServerError)(
        code, error.details() or code.name, field=field, retry_after=retry_after, request_id=request_id
    )


def _read_details(raw: bytes) -> tuple[str | None, float | None]:
    """Field and retry delay in seconds from a serialized ``google.rpc.Status``; broken bytes give None, None."""
    field: str | None = None
    retry_after: float | None = None
    try:
        for number, packed in _fields(raw):  # Status: 3 = repeated google.protobuf.Any details
            if number != 3 or not isinstance(packed, bytes):
                continue
            any_message = dict(_fields(packed))  # Any: 1 = type_url, 2 = value
            kind, body = any_message.get(1), any_message.get(2)
            if not isinstance(kind, bytes) or not isinstance(body, bytes):
                continue
            if kind.endswith(b"google.rpc.BadRequest"):  # 1 = repeated field_violations {1 = field}
                violation = dict(_fields(body)).get(1)
                name = dict(_fields(violation)).get(1) if isinstance(violation, bytes) else None
                field = name.decode() if isinstance(name, bytes) else None
            elif kind.endswith(b"google.rpc.RetryInfo"):  # 1 = Duration {1 = seconds, 2 = nanos}
                delay = dict(_fields(body)).get(1, b"")
                parts = dict(_fields(delay)) if isinstance(delay, bytes) else {}
                seconds, nanos = parts.get(1, 0), parts.get(2, 0)
                if isinstance(seconds, int) and isinstance(nanos, int):
                    retry_after = seconds + nanos / 1e9
    except (IndexError, ValueError):  # a peer's broken details must not hide the error itself
        return None, None
    return field, retry_after


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The (number, value) pairs of a protobuf message that holds only varints and length-delimited fields."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        value, at = _varint(raw, at)
        if tag & 7 == 0:
            yield tag >> 3, value
        elif tag & 7 == 2:
            yield tag >> 3, raw[at : at + value]
            at += value
        else:
            raise ValueError("unexpected wire type")


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
