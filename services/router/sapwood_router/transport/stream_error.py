"""The error of one stream of a call that many requests share, as an exception."""

from __future__ import annotations

from sapwood.v1 import tokenizer_pb2, worker_pb2
from sapwood_common.errors import SapwoodError
from sapwood_common.status import from_parts


def stream_error(message: worker_pb2.GenerationError | tokenizer_pb2.StreamError) -> SapwoodError:
    """The error of one stream, or of one item, of a session."""
    if isinstance(message, tokenizer_pb2.StreamError):
        service, reason = "tokenizer", message.reason
    else:
        service, reason = "worker", ""
    said = message.message or f"the {service} failed with status {message.code}"
    error = from_parts(message.code, said, message.field, reason)
    if message.HasField("retry_after_ms"):
        error.retry_after = message.retry_after_ms / 1000
    return error
