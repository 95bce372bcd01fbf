"""Maps exceptions to gRPC statuses and HTTP codes, and back, by one table.

Errors travel as a gRPC status with ``google.rpc`` details (``BadRequest`` names the field, ``RetryInfo`` the delay), so a
service that calls another one passes the original error on with :func:`from_rpc_error`.
"""

from __future__ import annotations

from typing import NamedTuple

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status

from sapwood_common import errors

_DETAILS_KEY = "grpc-status-details-bin"
_DOMAIN = "sapwood"
_REASONS: dict[str, type[errors.SapwoodError]] = {"PROMPT_TOO_LONG": errors.PromptTooLongError}
"""Classes that have no status of their own, by what says so."""


_MOST_BYTES = 1024
"""Of a message or a field. A message goes thrice, once with ``%`` for some bytes, and gRPC's clients end a call whose metadata
has more than 8 KiB."""


class StatusRow(NamedTuple):
    """A class of exceptions, and its statuses in gRPC and HTTP."""

    error: type[errors.SapwoodError]
    grpc: grpc.StatusCode
    http: int


TABLE: tuple[StatusRow, ...] = (
    StatusRow(errors.InvalidArgumentError, grpc.StatusCode.INVALID_ARGUMENT, 400),
    StatusRow(errors.UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED, 401),
    StatusRow(errors.NotFoundError, grpc.StatusCode.NOT_FOUND, 404),
    StatusRow(errors.AlreadyExistsError, grpc.StatusCode.ALREADY_EXISTS, 409),
    StatusRow(errors.ResourceExhaustedError, grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    StatusRow(errors.RequestCancelledError, grpc.StatusCode.CANCELLED, 499),
    StatusRow(errors.InternalError, grpc.StatusCode.INTERNAL, 500),
    StatusRow(errors.UnimplementedError, grpc.StatusCode.UNIMPLEMENTED, 501),
    StatusRow(errors.UnavailableError, grpc.StatusCode.UNAVAILABLE, 503),
    StatusRow(errors.DeadlineExceededError, grpc.StatusCode.DEADLINE_EXCEEDED, 504),
)

_BY_ERROR = {row.error: row for row in TABLE}
_BY_GRPC = {row.grpc: row for row in TABLE}
# Codes no service of ours sends, but grpcio, a proxy or another implementation may.
_FOREIGN = {
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidArgumentError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.InvalidArgumentError,
    grpc.StatusCode.PERMISSION_DENIED: errors.UnauthenticatedError,
    grpc.StatusCode.ABORTED: errors.UnavailableError,
}


def row_of(error: errors.SapwoodError) -> StatusRow:
    """The row of an error's class, or of the nearest class above it."""
    for cls in type(error).__mro__:
        if cls in _BY_ERROR:
            return _BY_ERROR[cls]
    return _BY_ERROR[errors.InternalError]


def error_of_code(code: grpc.StatusCode) -> type[errors.SapwoodError]:
    """The class that a gRPC status stands for; :class:`InternalError` for one with no row."""
    row = _BY_GRPC.get(code)
    return row.error if row is not None else _FOREIGN.get(code, errors.InternalError)


def reason_of(error: errors.SapwoodError) -> str:
    """What says of an error more than its status; empty: nothing."""
    return next((reason for reason, cls in _REASONS.items() if isinstance(error, cls)), "")


def code_number(error: errors.SapwoodError) -> int:
    """The numeric ``google.rpc.Code`` of an error."""
    number: int = row_of(error).grpc.value[0]
    return number


def to_trailing_metadata(error: errors.SapwoodError) -> tuple[tuple[str, bytes], ...]:
    """The trailing metadata that carries the ``google.rpc`` details of an error; empty if it has none.

    A cancelled request is always noted there, so that :func:`from_rpc_error` can tell it from a call that broke.
    """
    details: list[AnyMessage] = []
    if reason := reason_of(error):
        details.append(_pack(error_details_pb2.ErrorInfo(reason=reason, domain=_DOMAIN)))
    if error.field is not None:
        bad_request = error_details_pb2.BadRequest()
        bad_request.field_violations.add(field=_short(error.field), description=_short(error.message))
        details.append(_pack(bad_request))
    if error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(error.retry_after * 1000))
        details.append(_pack(retry))
    if not details and not isinstance(error, errors.RequestCancelledError):
        return ()
    status = Status(code=code_number(error), message=_short(error.message), details=details)
    return ((_DETAILS_KEY, status.SerializeToString()),)


def rpc_status(error: errors.SapwoodError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """What ends a call with an error: status, message and trailing metadata."""
    return row_of(error).grpc, _short(error.message), to_trailing_metadata(error)


def from_rpc_error(error: grpc.aio.AioRpcError) -> errors.SapwoodError:
    """The exception that a failed call stands for, with field and retry delay restored from its details.

    CANCELLED without details is no service's answer: the peer reset the call, as a server does that stops. Anybody who cancels a
    call of his own gets ``asyncio.CancelledError`` instead.
    """
    field: str | None = None
    retry_after: float | None = None
    detailed, reason = False, ""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            detailed = True
            field, retry_after, reason = _unpack(value)
    if error.code() is grpc.StatusCode.CANCELLED and not detailed:
        return errors.UnavailableError("the peer cancelled the call")
    cls = _REASONS.get(reason) or error_of_code(error.code())
    return cls(error.details() or error.code().name, field=field, retry_after=retry_after)


def from_parts(code: int, message: str, field: str = "", reason: str = "") -> errors.SapwoodError:
    """The exception for a numeric code, and what says more, carried inside a multiplexed stream."""
    if reason in _REASONS:
        return _REASONS[reason](message, field=field or None)
    for row in TABLE:
        if row.grpc.value[0] == code:
            return row.error(message, field=field or None)
    return errors.InternalError(message, field=field or None)


def _short(text: str) -> str:
    """A text without the middle of a long one: what it quotes may be a stranger's."""
    if len(text.encode("utf-8", "replace")) <= _MOST_BYTES:
        return text
    half = _MOST_BYTES // (2 if text.isascii() else 8) - 8
    return f"{text[:half]} ... {text[-half:]}"


def _pack(
    message: error_details_pb2.BadRequest | error_details_pb2.RetryInfo | error_details_pb2.ErrorInfo,
) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def _unpack(raw: bytes) -> tuple[str | None, float | None, str]:
    field: str | None = None
    retry_after: float | None = None
    reason = ""
    try:
        status = Status.FromString(raw)
    except Exception:  # a peer's broken details must not hide the error itself
        return None, None, ""
    for detail in status.details:
        bad_request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(bad_request) and bad_request.field_violations:
            field = bad_request.field_violations[0].field
        elif detail.Unpack(retry):
            retry_after = retry.retry_delay.ToMilliseconds() / 1000
        elif detail.Unpack(info) and info.domain == _DOMAIN:
            reason = info.reason
    return field, retry_after, reason
