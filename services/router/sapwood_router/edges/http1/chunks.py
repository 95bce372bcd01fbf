"""A body that comes in chunks, read without reading beyond it."""

from __future__ import annotations

import httptools

from sapwood_router.edges.http1.errors import HttpError

_HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
_EMPTY_LINE = b"\r\n\r\n"
_SLICE = 4096
"""Bytes that are read at a time: at most some 700 chunks, each of which costs as much as a kilobyte of one."""
_MOST_FRAMING = 64 * 1024
_FRAMING_PER_BYTE = 8
"""Sizes, extensions and trailers may come to ``_MOST_FRAMING`` and this for each byte of the body: more than chunks of a byte
need."""


class ChunkReader:
    """Reads one body; httptools calls it back.

    httptools cannot be stopped: given all that came it would read the next request, and the ones after it. A body in chunks ends
    with an empty line and nowhere else, so it is given what ends with one, or has none.

    Attributes:
        complete: Whether the body has ended.
        fed: Bytes that were read, framing included.
    """

    __slots__ = ("_allowed", "_parser", "_parts", "_tail", "complete", "fed")

    def __init__(self) -> None:
        self.complete = False
        self.fed = 0
        self._parts: list[bytes] = []
        self._tail = b""
        """The last three bytes: an empty line may begin in them."""
        self._allowed = _MOST_FRAMING
        """Bytes of framing that may still come."""
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._parser.feed_data(_HEAD)

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self.complete = True

    def on_message_begin(self) -> None:
        if self.complete:
            raise HttpError(400, "malformed chunks")

    def read(self, data: bytes, at: int) -> tuple[int, list[bytes]]:
        """Reads some of ``data`` from ``at`` on. Returns where it stopped, and the body's bytes on the way.

        Raises:
            HttpError: The chunks are malformed, or next to nothing is in them.
        """
        assert self._parser is not None, "it is complete"
        window = self._tail + data[at : at + _SLICE]
        found = window.find(_EMPTY_LINE)
        if found >= 0:
            window = window[: found + len(_EMPTY_LINE)]
        piece = window[len(self._tail) :]
        self._tail = window[-3:]
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserError as error:
            raise HttpError(400, f"malformed chunks: {str(error)[:100]}") from None
        self.fed += len(piece)
        parts, self._parts = self._parts, []
        size = sum(map(len, parts))
        self._allowed += _FRAMING_PER_BYTE * size - (len(piece) - size)
        if self._allowed < 0:
            raise HttpError(400, "the body's chunks are nearly all sizes, extensions or trailers")
        if self.complete:
            self._parser = None  # the two would keep each other until the collector comes
        return at + len(piece), parts

    def close(self) -> None:
        """To be called when it is given up."""
        self._parser = None
