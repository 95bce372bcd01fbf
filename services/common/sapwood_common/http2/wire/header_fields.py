"""Counts the fields of a header block without decoding them: ``hpack`` takes up to 20 us for a field of one to four bytes."""

from __future__ import annotations


def has_more_than(block: bytes, most: int) -> bool:
    """Whether a block has more than ``most`` fields and changes of the table's size (RFC 7541, 6); False if it is malformed.

    O(``most``).
    """
    if len(block) <= most:
        return False
    at = count = 0
    try:
        while at < len(block):
            count += 1
            if count > most:
                return True
            first = block[at]
            if first & 0x80:  # a field in the table
                at = _after_integer(block, at, 0x7F)
            elif first & 0xE0 == 0x20:  # a new size of the table
                at = _after_integer(block, at, 0x1F)
            else:
                mask = 0x3F if first & 0x40 else 0x0F
                at = _after_integer(block, at, mask)
                if not first & mask:  # its name is not in the table
                    at = _after_string(block, at)
                at = _after_string(block, at)
    except IndexError:
        pass
    return False


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
