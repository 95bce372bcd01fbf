"""Header blocks, metadata, deadlines, statuses and compressed messages against plain readings of them."""

from __future__ import annotations

import gzip
import zlib
from urllib.parse import unquote

import grpc
import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_net.http2.wire import encoding, frames
from sapwood_net.http2.wire.header_reader import HeaderReader
from sapwood_net.http2.wire.metadata import closing_block, metadata_block, opening_block, read_metadata, read_timeout

NAMES = st.sampled_from(("a", "b", "key", ":path"))
LENGTHS = st.sampled_from((0, 1, 2, 900, 5000))
FIELDS = st.lists(st.tuples(NAMES, LENGTHS, st.booleans()), max_size=3)  # four long ones are more than a block may have
QUICKLY = settings(deadline=None, max_examples=40)


def unfold(name: bytes, packed: bytes, most: int) -> bytes:
    unfolder = encoding.Unfolder(name, packed, most)
    while (whole := unfolder.step()) is None:
        assert unfolder.size <= most
    return whole


@QUICKLY
@given(st.lists(st.one_of(FIELDS, st.just("again"), st.sampled_from((0, 100, 2000, 4096))), max_size=25))
def test_what_a_reader_remembers_is_what_a_plain_decoder_reads(steps) -> None:
    """Blocks that come again, between blocks that change the table by entries, evictions and sizes."""
    encoder, plain, reader = hpack.Encoder(), hpack.Decoder(), HeaderReader(list)
    last: list = []
    for step in steps:
        if isinstance(step, int):
            if step != encoder.header_table_size:  # the same once more, and the encoder forgets to tell
                encoder.header_table_size = step
            continue
        if step != "again":
            last = [(name, "v" * length, secret) for name, length, secret in step]
        block = encoder.encode(last)
        assert reader.read(block) == [(bytes(n), bytes(v)) for n, v in plain.decode(block, raw=True)]


@QUICKLY
@given(st.one_of(st.binary(max_size=60), st.lists(st.integers(0x3E, 0xFF)).map(bytes)))
def test_blocks_of_anything_are_read_or_refused(block) -> None:
    reader = HeaderReader(list)
    for _ in range(2):
        try:
            reader.read(block)
        except hpack.HPACKError:
            return


@QUICKLY
@given(st.lists(st.tuples(st.text(max_size=300), st.text(max_size=300))))
def test_literals_are_what_a_decoder_reads(fields) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in fields]
    block = b"".join(frames.literal(name, value) for name, value in pairs)
    decoder = hpack.Decoder(1 << 20)
    assert [(bytes(n), bytes(v)) for n, v in decoder.decode(block, raw=True)] == pairs
    assert not decoder.header_table.dynamic_entries


@pytest.mark.parametrize("length", [126, 127, 128, 254, 255, 16_383, 16_384, 100_000])
def test_literals_of_any_length(length) -> None:
    block = frames.literal(b"k", b"v" * length)
    assert hpack.Decoder(1 << 20).decode(block, raw=True) == [(b"k", b"v" * length)]


TEXT = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=40)
METADATA = st.lists(
    st.one_of(
        st.tuples(st.from_regex(r"\A[a-z0-9_.]{1,9}\Z"), TEXT),
        st.tuples(st.from_regex(r"\A[a-z0-9_.]{1,9}-bin\Z"), st.binary(max_size=40)),
    )
)


@QUICKLY
@given(METADATA)
def test_metadata_come_back(metadata) -> None:
    block = metadata_block(metadata)
    assert read_metadata(HeaderReader(list).read(block)) == tuple(metadata)
    assert HeaderReader(list).read(opening_block(metadata))[:1] == [(b":status", b"200")]


def test_metadata_leaves_out_what_is_http2s_and_reads_all_forms_of_base64() -> None:
    headers = [(b":path", b"/"), (b"te", b"trailers"), (b"grpc-timeout", b"1S"), (b"k-bin", b"AAE=, AAE"), (b"k", b"v")]
    assert read_metadata(headers[:3]) == ()
    assert read_metadata([(b"k-bin", b"AAE=,AAE"), (b"n-bin", b"!"), (b"k", b"\xff")]) == (
        ("k-bin", b"\0\1"),
        ("k-bin", b"\0\1"),
        ("k", "\xff"),
    )


@QUICKLY
@given(st.text(max_size=50), st.sampled_from(list(grpc.StatusCode)))
def test_a_status_comes_back(details, code) -> None:
    fields = dict(HeaderReader(list).read(closing_block(code, details, metadata_block([("k", "v")]))))
    assert int(fields[b"grpc-status"]) == code.value[0]
    assert unquote(fields.get(b"grpc-message", b"").decode("ascii")) == details
    assert fields[b"k"] == b"v"


def test_a_status_that_no_text_can_say_still_comes() -> None:
    block = closing_block(grpc.StatusCode.INTERNAL, "a\ud800b", b"")
    assert dict(HeaderReader(list).read(block))[b"grpc-message"] == b"a?b"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1H", 3600),
        ("2M", 120),
        ("3S", 3),
        ("4m", 0.004),
        ("5u", 5e-6),
        ("6n", 6e-9),
        ("99999999H", 99_999_999 * 3600),
        ("", None),
        ("S", None),
        ("1", None),
        ("1x", None),
        ("-1S", None),
        ("999999999S", None),
        ("\xb2S", None),
    ],
)
def test_timeouts(text, seconds) -> None:
    assert read_timeout(text.encode("latin-1")) == (None if seconds is None else pytest.approx(seconds))


def test_compressed_messages() -> None:
    body = b"sapwood" * 1000
    for name, packed in ((b"gzip", gzip.compress(body)), (b"deflate", zlib.compress(body))):
        assert unfold(name, packed, len(body)) == body
        with pytest.raises(encoding.TooLargeError):
            unfold(name, packed, len(body) - 1)
        for broken in (packed[:-9], b"", b"no such thing", packed[5:]):
            with pytest.raises(ValueError):
                unfold(name, broken, len(body))
    with pytest.raises(ValueError, match="names no compression"):
        unfold(b"identity", body, len(body))
