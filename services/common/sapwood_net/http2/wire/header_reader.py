"""Decodes header blocks; one that comes again and again is decoded only once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from h2.errors import ErrorCodes
from hpack import Decoder

from sapwood_net.http2.wire.frames import ConnectionFailedError

# At the level DEBUG hpack logs every header, API keys among them.
logging.getLogger("hpack").setLevel(logging.INFO)

MOST_HEADER_BYTES = 64 * 1024
"""The most bytes of a call's header fields, as RFC 9113 counts them; a call with more is refused."""
_MOST_READ_BYTES = 96 * 1024
"""The most bytes that are decoded at all; more end the connection. Between the two limits its other calls continue."""
_MOST_FIELDS = 256
"""The most fields of a block. No client that only calls sends more."""
_MOST_CODED = 16 * 1024
"""The most bytes of a block in Huffman code, as many as grpcio takes of metadata in all: they are decoded in one go, in 5 ms."""
_MOST_KNOWN = 64
_LONGEST_KNOWN = 512
"""The most bytes of a block that is remembered; a call that brings no new fields has about 20."""

Headers = list[tuple[bytes, bytes]]
ReadT = TypeVar("ReadT")


class HeaderReader(Generic[ReadT]):
    """``hpack``'s decoder with a memory.

    A client that calls the same method again sends the same bytes: references to fields in the table of those it sent before.
    Such a block's meaning depends on the table alone; so it is remembered until another block changes the table.

    Args:
        make: Makes what is returned and remembered of a block's fields. Equal fields must give equal results.
    """

    def __init__(self, make: Callable[[Headers], ReadT]) -> None:
        self._make = make
        self._decoder = Decoder(_MOST_READ_BYTES)
        self._known: dict[bytes, ReadT] = {}
        self._front: object = None
        self._shape = (0, 0)

    def read(self, block: bytes) -> ReadT | None:
        """The result of ``make`` for a block's fields, which must not be changed; None if they exceed ``MOST_HEADER_BYTES``.

        Raises:
            HPACKError: The block is malformed, or has far too many bytes.
            ConnectionFailedError: It has far too many fields.
        """
        known = self._known.get(block)
        if known is not None:
            return known
        headers, table_is_same = self._decode(block)
        if headers is None:
            return None
        made = self._make(headers)
        if table_is_same and len(block) <= _LONGEST_KNOWN:
            self._known[block] = made
        return made

    def read_trailers(self, block: bytes) -> Headers | None:
        """The fields of a block that is not remembered; None and errors as for :meth:`read`."""
        return self._decode(block)[0]

    def _decode(self, block: bytes) -> tuple[Headers | None, bool]:
        """The fields, and whether the block leaves the table as it was."""
        if len(block) > _MOST_FIELDS:
            fields, coded = weigh(block, _MOST_FIELDS)
            if fields > _MOST_FIELDS:
                raise ConnectionFailedError(ErrorCodes.ENHANCE_YOUR_CALM, f"more than {_MOST_FIELDS} header fields")
            if coded > _MOST_CODED:
                text = f"header fields of more than {_MOST_CODED} bytes in Huffman code"
                raise ConnectionFailedError(ErrorCodes.ENHANCE_YOUR_CALM, text)
        headers = cast(Headers, self._decoder.decode(block, raw=True))
        is_too_large = sum([len(name) + len(value) + 32 for name, value in headers]) > MOST_HEADER_BYTES
        table = self._decoder.header_table
        # A new entry enters at the front, as a new object. Entries leave only when one enters, or when the size changes.
        front = table.dynamic_entries[0] if table.dynamic_entries else None
        shape = (len(table.dynamic_entries), table.maxsize)
        if front is not self._front or shape != self._shape or len(self._known) >= _MOST_KNOWN:
            self._front, self._shape = front, shape
            self._known.clear()
            return (None if is_too_large else headers), False
        return (None if is_too_large else headers), True


# Estimates the cost of decoding a header block, without decoding it: ``hpack`` takes up to 20 us for a field of one to four
# bytes, and half a microsecond for a byte in Huffman code.
def weigh(block: bytes, most: int) -> tuple[int, int]:
    """How many fields and changes of the table's size a block has (RFC 7541, 6), and how many bytes of it are Huffman code.

    Counts no further than the first field beyond ``most``, or the first that is malformed. O(``most``).
    """
    at = count = coded = 0
    try:
        while at < len(block) and count <= most:
            count += 1
            first = block[at]
            if first & 0x80:  # a field in the table
                at = _after_integer(block, at, 0x7F)
            elif first & 0xE0 == 0x20:  # a new size of the table
                at = _after_integer(block, at, 0x1F)
            else:
                mask = 0x3F if first & 0x40 else 0x0F
                at = _after_integer(block, at, mask)
                for _ in range(1 if first & mask else 2):  # its value, and its name unless that is in the table
                    begin, at = at, _after_string(block, at)
                    if block[begin] & 0x80:
                        coded += min(at, len(block)) - begin
    except IndexError:
        pass
    return count, coded


def _after_integer(block: bytes, at: int, mask: int) -> int:
    if block[at] & mask == mask:
        at += 1
        while block[at] & 0x80:
            at += 1
    return at + 1


def _after_string(block: bytes, at: int) -> int:
    length = block[at] & 0x7F
    if length < 0x7F:
        return at + 1 + length
    at += 1
    shift = 0
    while True:
        length += (block[at] & 0x7F) << shift
        shift += 7
        at += 1
        if not block[at - 1] & 0x80:
            return at + length
