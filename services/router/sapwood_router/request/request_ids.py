"""The id of a request: taken over from the client or made, and made unique for the worker."""

from __future__ import annotations

from sapwood_common.errors import InvalidArgumentError
from sapwood_common.random_bytes import random_bytes
from sapwood_common.telemetry.logs import is_valid_request_id, new_request_id

_LONGEST_STEM = 110


def accept_request_id(given: str, field: str) -> str:
    """The client's id; a new one if it gave none.

    Raises:
        InvalidArgumentError: It cannot be put into headers and logs.
    """
    if not given:
        return new_request_id()
    if not is_valid_request_id(given):
        raise InvalidArgumentError(f"{field} must be 1 to 128 letters, digits and ._:/@+=-", field=field)
    return given


def unique_id(request_id: str) -> str:
    """An id for the worker: clients may use an id twice at a time, workers may not."""
    return f"{request_id[:_LONGEST_STEM]}.{random_bytes(4).hex()}"
