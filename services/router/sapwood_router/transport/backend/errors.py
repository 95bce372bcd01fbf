"""What a backend's refusals are to us: one error of ours for each status of theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sapwood_common.errors import (
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    SapwoodError,
    UnavailableError,
)

_LONGEST = 1000
"""Characters of a backend's message that clients see."""
_MOST_RETRY_AFTER = 600.0
_STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "BadRequestError": 400,
    "not_found_error": 404,
    "NotFoundError": 404,
    "rate_limit_error": 429,
    "insufficient_quota": 429,
    "service_unavailable_error": 503,
    "overloaded_error": 503,
    "timeout_error": 503,
}


def error_of_answer(address: str, status: int, body: bytes, headers: Mapping[str, str]) -> SapwoodError:
    """The error that an answer stands for whose status is not 200.

    An error of the client's keeps the backend's words; another one names the backend. That the backend does not take
    the router's key is no fault of the client's.
    """
    message, field = _said(body)
    retry_after = _retry_after(headers)
    if status == 429:
        return ResourceExhaustedError(f"backend {address}: {message or 'busy'}", retry_after=retry_after or 1.0)
    if status in (400, 413, 415, 422):
        return InvalidArgumentError(message or f"the backend refuses the request ({status})", field=field)
    if status == 404:
        return NotFoundError(message or "the backend knows no such model or path", field=field)
    what = f"backend {address} answered {status}{': ' if message else ''}{message}"
    return InternalError(what) if status == 500 else UnavailableError(what, retry_after=retry_after or 1.0)


def error_of_event(address: str, told: Any) -> SapwoodError:
    """The error that an event with ``error`` stands for."""
    status = 500
    if isinstance(told, dict):
        kind, code = told.get("type"), told.get("code")
        if isinstance(code, int) and 400 <= code <= 599:
            status = code
        elif isinstance(kind, str):
            status = _STATUS_OF_TYPE.get(kind, 500)
    return error_of_answer(address, status, msgspec.json.encode({"error": told}), {})


def _said(body: bytes) -> tuple[str, str | None]:
    """Message and parameter of an error's body, as OpenAI, vLLM and FastAPI write it."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "", None
    if not isinstance(found, dict):
        return "", None
    error = found.get("error", found)
    if not isinstance(error, dict):
        return str(error)[:_LONGEST], None
    message, field = error.get("message", found.get("detail", "")), error.get("param")
    return str(message)[:_LONGEST], field if isinstance(field, str) else None


def _retry_after(headers: Mapping[str, str]) -> float | None:
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit
        except ValueError:  # absent, or a date
            continue
        if 0 < seconds < _MOST_RETRY_AFTER:
            return seconds
    return None
