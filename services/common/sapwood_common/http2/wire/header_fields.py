"""Says what it costs to decode a header block, without decoding it: ``hpack`` takes up to 20 us for a field of one to four bytes,
and half a microsecond for a byte in Huffman code.
"""

from __future__ import annotations


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
