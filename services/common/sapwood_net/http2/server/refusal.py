"""Answers to calls that end before they have begun: one header block each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import grpc

from sapwood_net.errors import CallError
from sapwood_net.http2.wire import encoding, frames
from sapwood_net.http2.wire.metadata import closing_block, metadata_block, opening_block

_NOT_POST = frames.literal(b":status", b"405") + frames.literal(b"allow", b"POST")
_NOT_GRPC = frames.literal(b":status", b"415")


StatusOf = Callable[[CallError], tuple[grpc.StatusCode, str, Iterable[tuple[str, str | bytes]]]]
"""Says what ends a call with an error: status, message and trailing metadata."""


def find_problem(handler: Any, fields: dict[bytes, bytes]) -> bytes | None:
    """Why a request is no call that can be answered, as the block to answer it with; None if it is one.

    Args:
        handler: The handler of its path; None if there is none.
        fields: Its header fields by name, which are well formed.
    """
    if fields[b":method"] != b"POST":
        return _NOT_POST
    if not fields.get(b"content-type", b"").startswith(b"application/grpc"):
        return _NOT_GRPC
    if handler is None:
        method = fields[b":path"][:200].decode("latin-1")
        return _end(grpc.StatusCode.UNIMPLEMENTED, f"there is no method {method}")
    if not encoding.is_known(fields.get(b"grpc-encoding", b"identity")):
        accepted = metadata_block((("grpc-accept-encoding", encoding.ENCODINGS.decode()),))
        return _end(grpc.StatusCode.UNIMPLEMENTED, "grpc-encoding is none that is understood", accepted)
    return None


def refusal(code: grpc.StatusCode, details: str, trailing: Iterable[tuple[str, str | bytes]]) -> bytes:
    """The block that ends a call with a status."""
    return _end(code, details, metadata_block(trailing))


def _end(code: grpc.StatusCode, details: str, metadata: bytes = b"") -> bytes:
    return opening_block() + closing_block(code, details, metadata)
