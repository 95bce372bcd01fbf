"""RFC 7541: header blocks that make no sense end the connection with COMPRESSION_ERROR."""

from __future__ import annotations

import pytest
from h2.errors import ErrorCodes

from sapwood_net.http2.wire import frames
from sapwood_net.http2.wire.frames import frame

BROKEN = {
    "2.3.3/1 an index beyond the table": b"\xfe",
    "2.3.3/2 a literal whose name is beyond the table": b"\x7e\x01a",
    "4.2/1 an update of the table's size at the end": b"\x21",
    "4.2 three updates of the table's size, the last too large": b"\x20\x20\x3f\xe2\x1f",
    "5.1 an integer without an end": b"\x7f" + b"\xff" * 20,
    "5.2/1 Huffman, padded with more than 7 bits": b"\x00\x01x\x82\x1f\xff",
    "5.2/2 Huffman, padded with zeros": b"\x00\x01x\x81\x18",
    "5.2/3 Huffman, with the end of the string in it": b"\x00\x01x\x84\xff\xff\xff\xff",
    "5.2 a string longer than the block": b"\x00\x01x\x09abc",
    "6.1/1 the index 0": b"\x80",
    "6.3/1 a table larger than allowed": b"\x3f\xe2\x1f",
}
AT_THE_BEGINNING = ("6.3", "4.2 three")


@pytest.mark.parametrize("name", BROKEN)
async def test_blocks_that_make_no_sense(peer, build, name) -> None:
    block = BROKEN[name] + build.block() if name.startswith(AT_THE_BEGINNING) else build.block() + BROKEN[name]
    await peer.fails(frame(frames.HEADERS, frames.END_HEADERS, 1, block), ErrorCodes.COMPRESSION_ERROR)


async def test_4_2_two_updates_of_the_tables_size_at_the_beginning(peer, build) -> None:
    await peer.answers(
        frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x20\x3f\xe1\x1f" + build.block()) + build.body(1)
    )


async def test_4_4_a_field_larger_than_the_table_empties_it(peer, build) -> None:
    first = build.block() + b"\x40\x01x\x01y" + b"\x40\x01z\x7f\xa1\x1e" + bytes(b"v" * 4000) + b"\x40\x01z\x01w"
    await peer.answers(frame(frames.HEADERS, frames.END_HEADERS, 1, first) + build.body(1))
    await peer.answers(frame(frames.HEADERS, frames.END_HEADERS, 3, build.block() + b"\xbe") + build.body(3))
    gone = build.block() + b"\xc0"
    await peer.fails(frame(frames.HEADERS, frames.END_HEADERS, 5, gone), ErrorCodes.COMPRESSION_ERROR, 3)
