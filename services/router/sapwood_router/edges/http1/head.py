"""A request's line and header fields, and how its body is framed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote

import httptools

from sapwood_router.edges.http1.errors import HttpError

Headers = Sequence[tuple[bytes, bytes]]

MOST_HEADERS = 128

_LINE = re.compile(rb"([A-Z]+) ([!\"$-~]+) HTTP/1\.([01])\r\n")
"""Stricter than llhttp, which takes HTTP/0.9 and 2.0, RTSP, more spaces than one and fragments."""
_OTHER_VERSION = re.compile(rb"[A-Z]+ [^ \r\n]+ HTTP/(?!1\.[01]\r)[0-9.]+\r\n")
_HOST = re.compile(rb"[A-Za-z0-9._~%:\[\]-]*")
_AFTER_HOST = re.compile(rb"[/?]")
_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ?([0-9]{1,15})\r\n")
_MOST_DIGITS = 20
"""Of a length, zeros in front included: other servers refuse more."""
_MOST_KNOWN, _LONGEST_KNOWN = 256, 2048
"""Heads that are remembered, and the bytes of one."""
_METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"TRACE"})
_ONCE = frozenset(
    {
        b"host",
        b"content-length",
        b"transfer-encoding",
        b"content-type",
        b"authorization",
        b"x-api-key",
        b"expect",
        b"origin",
    }
)
"""Headers that may come once: with two values, one could be believed here and the other elsewhere."""


class Head:
    """What a request says before its body.

    Attributes:
        method: As sent, such as ``POST``.
        path: With percent signs decoded.
        query: The text after the path's question mark, as sent.
        headers: In order, names in small letters; without content-length. Not to be changed.
        fields: The same by name; of several with one name the last. Not to be changed.
        takes_chunks: Whether the client knows an answer in chunks; to others its end is the connection's.
        keep_alive: Whether the client may send another request after it.
        expects_continue: Whether the client waits for permission to send the body.
    """

    __slots__ = ("expects_continue", "fields", "headers", "keep_alive", "method", "path", "query", "takes_chunks")

    def __init__(self, line: re.Match[bytes], headers: list[tuple[bytes, bytes]]) -> None:
        method, target, minor = line.groups()
        if method not in _METHODS:
            raise HttpError(501, f"{method[:20].decode('ascii')} is no method that is served here")
        self.method = method.decode("ascii")
        self.path = _path_of(target)
        self.query = target.partition(b"?")[2].decode("ascii")
        self.takes_chunks = minor == b"1"
        self.headers = headers
        self.fields = fields = dict(headers)
        self.keep_alive = self.takes_chunks if b"connection" not in fields else self._asks_to_stay()
        if (
            not target.startswith(b"/") and b"://" in target and b"host" in fields
        ):  # a target that names a host counts, not the header (RFC 9112, 3.2.2)
            fields[b"host"] = _AFTER_HOST.split(target.partition(b"://")[2], maxsplit=1)[0].rpartition(b"@")[2]
        host = fields.get(b"host")
        if host is None:
            if self.takes_chunks:
                raise HttpError(400, "the header host is missing", field="host")
        elif _HOST.fullmatch(host) is None:
            raise HttpError(400, "the header host is no host and port", field="host")
        coding = fields.get(b"transfer-encoding")
        if coding is not None and (coding.lower() != b"chunked" or not self.takes_chunks):
            raise HttpError(400, "transfer-encoding may only be chunked, and in HTTP/1.1", field="transfer-encoding")
        expect = fields.get(b"expect")
        if expect is not None and expect.lower() != b"100-continue":
            raise HttpError(417, "expect may only be 100-continue", field="expect")
        self.expects_continue = expect is not None and self.takes_chunks

    def _asks_to_stay(self) -> bool:
        values = b",".join(value for name, value in self.headers if name == b"connection").lower()
        options = [option.strip() for option in values.split(b",")]
        return b"close" not in options and (self.takes_chunks or b"keep-alive" in options)


class HeadReader:
    """Reads heads. A client sends the same head again and again, except for the length of the body: such a head is parsed
    once."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[Head, int | None]] = {}
        """Heads as they came, with 0 as content-length: one without a number is another head, and malformed."""

    def read(self, data: bytes) -> tuple[Head, int | None]:
        """Reads a head.

        Args:
            data: From the request's line to the empty one.

        Returns:
            The head, and the bytes of its body; None: that comes in chunks.

        Raises:
            HttpError: It is malformed, or of an HTTP version that is not served.
        """
        found = _LENGTH.search(data)
        key = data if found is None else b"%b0%b" % (data[: found.start(1)], data[found.end(1) :])
        known = self._known.get(key)
        if known is None:
            known = _read(data)
            if len(key) <= _LONGEST_KNOWN:
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[key] = known
        elif found is not None and known[1] is not None:
            return known[0], int(found[1])
        return known


class _HeaderFields:
    """Keeps what httptools finds in a head."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found: list[tuple[bytes, bytes]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.found) >= MOST_HEADERS:
            raise HttpError(431, f"more than {MOST_HEADERS} headers")
        self.found.append((name.lower(), value.rstrip()))


def _read(data: bytes) -> tuple[Head, int | None]:
    line = _LINE.match(data)
    if line is None:
        if _OTHER_VERSION.match(data) is not None:
            raise HttpError(505, "this port speaks HTTP/1.1")
        raise HttpError(400, "not a line of an HTTP/1.1 request")
    fields = _HeaderFields()
    try:
        httptools.HttpRequestParser(fields).feed_data(data)
    except httptools.HttpParserUpgrade:
        pass  # nothing that one could change to is spoken here: it is answered as if it had not asked
    except httptools.HttpParserError as error:
        if isinstance(error.__context__, HttpError):
            raise error.__context__ from None
        raise HttpError(400, f"malformed request: {str(error)[:100]}") from None
    _check_doubled(fields.found)
    lengths = [value for name, value in fields.found if name == b"content-length"]
    if lengths and len(lengths[0]) > _MOST_DIGITS:
        raise HttpError(400, "content-length has too many digits", field="content-length")
    head = Head(line, [field for field in fields.found if field[0] != b"content-length"])
    # llhttp lets nothing but digits through as a length, and none next to chunks.
    return head, None if b"transfer-encoding" in head.fields else int(lengths[0]) if lengths else 0


def _path_of(target: bytes) -> str:
    if not target.startswith(b"/") and target != b"*":
        try:
            target = httptools.parse_url(target).path or b"/"  # with scheme and host, as proxies are asked
        except httptools.HttpParserError:
            raise HttpError(400, "what is asked for is no path") from None
    path = target.partition(b"?")[0].decode("ascii")
    return unquote(path) if "%" in path else path


def _check_doubled(headers: Headers) -> None:
    seen: set[bytes] = set()
    for name, _ in headers:
        if name in _ONCE and name in seen:
            raise HttpError(400, f"the header {name.decode('ascii')} comes twice", field=name.decode("ascii"))
        seen.add(name)
