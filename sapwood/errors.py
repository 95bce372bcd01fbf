"""The errors of calls to Sapwood: one exception for each gRPC status, with the field at fault and the retry delay.

The ``google.rpc`` details that carry field and delay are three small messages
(https://github.com/googleapis/googleapis/blob/master/google/rpc/error_details.proto); reading them here by their fields'
numbers spares clients the googleapis package.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2, empty_pb2
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

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
        for number, detail in _fields(raw):
            if number != 3:  # Status: 3 = repeated google.protobuf.Any details
                continue
            packed = any_pb2.Any.FromString(detail)
            if packed.type_url.endswith("google.rpc.BadRequest"):  # 1 = repeated field_violations {1 = field}
                field = dict(_fields(dict(_fields(packed.value))[1]))[1].decode()
            elif packed.type_url.endswith("google.rpc.RetryInfo"):  # 1 = Duration
                delay = duration_pb2.Duration.FromString(dict(_fields(packed.value)).get(1, b""))
                retry_after = delay.seconds + delay.nanos / 1e9
    except (DecodeError, KeyError, ValueError, TypeError, AttributeError):  # must not hide the error itself
        return None, None
    return field, retry_after


def _fields(raw: bytes) -> list[tuple[int, Any]]:
    """The fields of a protobuf message of any type, by number."""
    found: Any = UnknownFieldSet(empty_pb2.Empty.FromString(raw))
    return [(item.field_number, item.data) for item in found]
