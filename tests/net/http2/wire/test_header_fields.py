"""Fields are counted as hpack reads them, without reading them."""

from __future__ import annotations

import random

import hpack
import pytest
from h2.errors import ErrorCodes

from sapwood_net.http2.wire import frames
from sapwood_net.http2.wire.header_reader import weigh

REFERENCE, TINY = b"\x82", b"\x0f\x2f\x81\x1f"


def test_as_many_are_counted_as_hpack_reads() -> None:
    rng = random.Random(1)
    for _ in range(60):
        count = rng.randint(1, 60)
        fields = [
            (f"x-{rng.randint(0, 20)}", "v" * rng.choice((0, 1, 5, 126, 127, 128, 300, 20_000))) for _ in range(count)
        ]
        encoder, huffman = hpack.Encoder(), rng.random() < 0.5
        if rng.random() < 0.5:
            encoder.header_table_size = rng.choice((0, 100, 4096))
        block = encoder.encode(fields, huffman=huffman)
        sizes = 1 if block[0] & 0xE0 == 0x20 else 0
        found, coded = weigh(block + REFERENCE * 100, 1000)
        assert found == count + sizes + 100
        assert coded <= len(block) if huffman else not coded
        assert weigh(block, found - 101)[0] == found - 100


@pytest.mark.parametrize("block", [b"\xff" * 300, b"\x00\x7f\xff\xff\xff\xff\x0f" * 50, b"\x3f" + b"\xff" * 300])
def test_what_makes_no_sense_is_left_to_hpack(block) -> None:
    assert weigh(block, 256)[0] <= 256
    assert weigh(block, 256)[1] <= len(block)


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


@pytest.mark.parametrize("fields", [1, 200])
async def test_a_block_with_much_huffman_code_ends_its_connection_unread(
    make_wire, request_block, fields, monkeypatch
) -> None:
    headers = [(f"a{number}", "0" * (60_000 // fields)) for number in range(fields)]
    coded = hpack.Encoder().encode(headers, huffman=True)
    half = hpack.Encoder().encode([("a", "0" * 24_000)], huffman=True)
    wire = make_wire()
    wire.send(frames.header_frames(1, request_block() + half, frames.USUAL_FRAME))
    assert 1 in wire.calls
    monkeypatch.setattr("hpack.Decoder.decode", lambda *_, **__: pytest.fail("it was read"))
    wire.send(frames.header_frames(3, request_block() + coded, frames.USUAL_FRAME))
    (error,) = wire.failed
    text = "header fields of more than 16384 bytes in Huffman code"
    assert (error.code, str(error)) == (ErrorCodes.ENHANCE_YOUR_CALM, text)


async def test_a_block_in_far_too_many_frames_ends_its_connection(make_wire, request_block) -> None:
    wire = make_wire()
    wire.send(frames.frame(frames.HEADERS, frames.END_STREAM, 1, request_block()))
    wire.send(frames.frame(frames.CONTINUATION, 0, 1) * 1100)
    assert [error.code for error in wire.failed] == [ErrorCodes.ENHANCE_YOUR_CALM]
    assert wire.calls == {}
