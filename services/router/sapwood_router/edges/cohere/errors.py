"""Errors as Cohere tells them: a sentence, and the request's id."""

from __future__ import annotations

import msgspec

from sapwood_common import errors
from sapwood_router.edges.http.errors import http_status
from sapwood_router.edges.http.sse import event


class CohereError(msgspec.Struct):
    """What tells an error."""

    message: str
    id: str


class CohereDialect:
    """Implements :class:`Dialect`: the message begins with the field at fault."""

    shape: type[msgspec.Struct] = CohereError
    id_header: bytes | None = None

    def status(self, error: errors.SapwoodError) -> int:
        return http_status(error)

    def body(self, error: errors.SapwoodError, request_id: str) -> bytes:
        return msgspec.json.encode(CohereError(_sentence(error), request_id))

    def event(self, error: errors.SapwoodError, request_id: str) -> bytes:
        return event("message-end", id=request_id, delta={"error": _sentence(error), "finish_reason": "ERROR"})


def _sentence(error: errors.SapwoodError) -> str:
    named = error.field and error.field not in error.message
    return f"{error.field}: {error.message}" if named else error.message
