"""Errors as Ollama tells them: a sentence."""

from __future__ import annotations

import msgspec

from sapwood_common import errors
from sapwood_router.edges.http.errors import http_status


class OllamaError(msgspec.Struct):
    """What tells an error."""

    error: str


class OllamaDialect:
    """Implements :class:`Dialect`: the message begins with the field at fault."""

    shape: type[msgspec.Struct] = OllamaError
    id_header: bytes | None = None

    def status(self, error: errors.SapwoodError) -> int:
        return http_status(error)

    def body(self, error: errors.SapwoodError, request_id: str) -> bytes:
        named = error.field and error.field not in error.message
        return msgspec.json.encode(OllamaError(f"{error.field}: {error.message}" if named else error.message))

    def event(self, error: errors.SapwoodError, request_id: str) -> bytes:
        return self.body(error, request_id) + b"\n"
