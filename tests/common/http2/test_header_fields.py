"""Fields are counted as hpack reads them, without reading them."""

from __future__ import annotations

import random

import hpack
import pytest
from h2.errors import ErrorCodes

from sapwood_common.http2.wire import frames
from sapwood_common.http2.wire.header_fields import has_more_than

REFERENCE, TINY = b"\x82", b"\x0f\x2f\x81\x1f"


def test_as_many_are_counted_as_hpack_reads() -> None:
    rng = random.Random(1)
    for _ in range(60):
        count = rng.randint(1, 60)
        fields = [
            (f"x-{rng.randint(0, 20)}", "v" * rng.choice((0, 1, 5, 126, 127, 128, 300, 20_000))) for _ in range(count)
        ]
        encoder = hpack.Encoder()
        if rng.random() < 0.5:
            encoder.header_table_size = rng.choice((0, 100, 4096))
        block = encoder.encode(fields, huffman=rng.random() < 0.5)
        sizes = 1 if block[0] & 0xE0 == 0x20 else 0
        padded = block + REFERENCE * 100  # or the length alone would say that they are few
        assert has_more_than(padded, count + sizes + 99)
        assert not has_more_than(padded, count + sizes + 100)


@pytest.mark.parametrize("block", [b"\xff" * 300, b"\x00\x7f\xff\xff\xff\xff\x0f" * 50, b"\x3f" + b"\xff" * 300])
def test_what_makes_no_sense_is_left_to_hpack(block) -> None:
    assert not has_more_than(block, 256)


@pytest.mark.parametrize("field", [REFERENCE, TINY, b"\x20"], ids=["references", "tiny Huffman fields", "table sizes"])
async def test_a_block_of_far_too_many_fields_ends_its_connection_unread(
    make_wire, request_block, field, monkeypatch
) -> None:
    wire = make_wire()
    wire.open(1)
    monkeypatch.setattr("hpack.Decoder.decode", lambda *_, **__: pytest.fail("it was read"))
    block = request_block() + field * 2000
    wire.send(frames.header_frames(3, block, frames.USUAL_FRAME))
    (error,) = wire.failed
    assert (error.code, str(error)) == (ErrorCodes.ENHANCE_YOUR_CALM, "more than 256 header fields")


async def test_a_block_in_far_too_many_frames_ends_its_connection(make_wire, request_block) -> None:
    wire = make_wire()
    wire.send(frames.frame(frames.HEADERS, frames.END_STREAM, 1, request_block()))
    wire.send(frames.frame(frames.CONTINUATION, 0, 1) * 1100)
    assert [error.code for error in wire.failed] == [ErrorCodes.ENHANCE_YOUR_CALM]
    assert wire.calls == {}
