"""Checks the header fields that begin a call: a malformed request reaches no handler (RFC 9113, 8.1.1, 8.2 and 8.3)."""

from __future__ import annotations

import re

from sapwood_net.http2.wire.header_reader import Headers

_REQUIRED = (b":method", b":scheme", b":path")
_PSEUDO = frozenset((*_REQUIRED, b":authority"))
_OF_ONE_CONNECTION = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
_TOKENS = rb"(?:[!#$%&'*+\-.^_`|~0-9a-z]++,)*+"
"""Names of fields (RFC 9110, 5.6.2, without capitals), each with a comma behind it."""
_REQUEST_NAMES = re.compile(rb"(?::[a-z]++,)*+" + _TOKENS)
_TRAILER_NAMES = re.compile(_TOKENS)
_CLASSES = bytes.maketrans(b"\0\t", b"\r ")
"""Maps bytes that values may not hold to CR, and those that they may not begin or end with to space; LF separates values."""
_MOST_DIGITS = 18
"""The most digits of a content-length."""


class RequestHead:
    """The header fields of a call.

    Attributes:
        headers: In their order; not to be changed.
        fields: The same by name; of several with one name the last. Not to be changed.
        problem: Why the request is malformed; None if it is not.
        content_length: Bytes of DATA that the client says will come; None if it does not say.
    """

    __slots__ = ("content_length", "fields", "headers", "problem")

    def __init__(self, headers: Headers) -> None:
        self.headers = headers
        self.fields = fields = dict(headers)
        names = _joined_names(headers)
        self.problem = _find_problem(headers, fields, names, _REQUEST_NAMES) or _find_request_problem(
            headers, fields, names
        )
        length = None if self.problem else fields.get(b"content-length")
        self.content_length = None if length is None else int(length)


def find_trailer_problem(headers: Headers) -> str | None:
    """Why the fields that end a request are malformed; None if they are not."""
    return _find_problem(headers, dict(headers), _joined_names(headers), _TRAILER_NAMES)


# All names are checked at once, and so are all values: checking each by itself would take half as long as decoding them.


def _joined_names(headers: Headers) -> bytes:
    """The names of the fields, each with a comma behind it."""
    return b"".join([name + b"," for name, _ in headers])


def _find_problem(headers: Headers, fields: dict[bytes, bytes], names: bytes, known: re.Pattern[bytes]) -> str | None:
    if names.count(b",") != len(headers) or not known.fullmatch(names):
        return "a field name that there cannot be, or not there"
    values = b"\n".join([b"", *[value for _, value in headers], b""]).translate(_CLASSES)
    if values.count(b"\n") != len(headers) + 1 or b"\r" in values or b" \n" in values or b"\n " in values:
        return "a value with a line end, a zero byte, or space around it"
    if not _OF_ONE_CONNECTION.isdisjoint(fields):
        return "a field that HTTP/2 does not have"
    if b"te" in fields and _values_of(b"te", headers) != {b"trailers"}:
        return "te is not trailers"
    return None


def _find_request_problem(headers: Headers, fields: dict[bytes, bytes], names: bytes) -> str | None:
    pseudo = _PSEUDO.intersection(fields)
    if names.count(b":") != len(pseudo):
        return "a pseudo-header field that there is not, or twice"
    if b"content-length" in fields:
        lengths = _values_of(b"content-length", headers)
        if len(lengths) > 1 or not all(value.isdigit() and len(value) <= _MOST_DIGITS for value in lengths):
            return "content-length is not one number"
    if b"host" in fields and fields[b"host"].lower() != fields.get(b":authority", fields[b"host"]).lower():
        return "host and :authority differ"
    if fields.get(b":method") == b"CONNECT":
        return None if pseudo == {b":method", b":authority"} else "CONNECT takes :authority and nothing else"
    for name in _REQUIRED:
        if not fields.get(name):
            return f"{name.decode()} is missing"
    if not fields[b":path"].startswith(b"/") and (fields[b":method"], fields[b":path"]) != (b"OPTIONS", b"*"):
        return ":path is no path"
    return None


def _values_of(name: bytes, headers: Headers) -> set[bytes]:
    return {value for found, value in headers if found == name}
