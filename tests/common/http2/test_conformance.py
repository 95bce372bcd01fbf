"""A frame that a client may not send ends its stream or its connection with the right error; one that it may ends nothing."""

from __future__ import annotations

import itertools

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_common.http2 import frames
from sapwood_common.http2.frames import frame

BLOCK = frames.STATUS_200  # decodes, and is no call
UPDATE = SettingCodes.INITIAL_WINDOW_SIZE


def header(kind: int, flags: int, stream: int, size: int) -> bytes:
    return size.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")


CONNECTION_ERRORS = {
    "data on the connection": (frame(frames.DATA, 0, 0, b"x"), ErrorCodes.PROTOCOL_ERROR),
    "data on an idle stream": (frame(frames.DATA, 0, 9, b"x"), ErrorCodes.PROTOCOL_ERROR),
    "more padding than data": (frame(frames.DATA, frames.PADDED, 1, b"\x05abc"), ErrorCodes.PROTOCOL_ERROR),
    "padding without its length": (frame(frames.DATA, frames.PADDED, 1), ErrorCodes.PROTOCOL_ERROR),
    "headers on the connection": (frame(frames.HEADERS, frames.END_HEADERS, 0, BLOCK), ErrorCodes.PROTOCOL_ERROR),
    "headers on an even stream": (frame(frames.HEADERS, frames.END_HEADERS, 4, BLOCK), ErrorCodes.PROTOCOL_ERROR),
    "headers that are none": (frame(frames.HEADERS, frames.END_HEADERS, 3, b"\xff" * 9), ErrorCodes.COMPRESSION_ERROR),
    "a table too large": (frame(frames.HEADERS, frames.END_HEADERS, 3, b"\x3f\xe1\x7f"), ErrorCodes.COMPRESSION_ERROR),
    "half a priority": (
        frame(frames.HEADERS, frames.END_HEADERS | frames.WITH_PRIORITY, 3, b"abc"),
        ErrorCodes.FRAME_SIZE_ERROR,
    ),
    "a frame too large": (header(frames.DATA, 0, 1, frames.USUAL_FRAME + 1), ErrorCodes.FRAME_SIZE_ERROR),
    "a continuation of nothing": (frame(frames.CONTINUATION, 0, 1, BLOCK), ErrorCodes.PROTOCOL_ERROR),
    "a continuation of another stream": (
        frame(frames.HEADERS, 0, 3, BLOCK) + frame(frames.CONTINUATION, 0, 5, BLOCK),
        ErrorCodes.PROTOCOL_ERROR,
    ),
    "a frame within a header block": (
        frame(frames.HEADERS, 0, 3, BLOCK) + frame(frames.PING, 0, 0, bytes(8)),
        ErrorCodes.PROTOCOL_ERROR,
    ),
    "an unknown frame within a header block": (
        frame(frames.HEADERS, 0, 3, BLOCK) + frame(0xBE, 0, 0),
        ErrorCodes.PROTOCOL_ERROR,
    ),
    "continuations without an end": (
        frame(frames.HEADERS, 0, 3, BLOCK) + frame(frames.CONTINUATION, 0, 3, b"\x88" * 8000) * 33,
        ErrorCodes.ENHANCE_YOUR_CALM,
    ),
    "empty continuations without an end": (
        frame(frames.HEADERS, 0, 3) + frame(frames.CONTINUATION, 0, 3) * 30_000,
        ErrorCodes.ENHANCE_YOUR_CALM,
    ),
    "a header bomb": (
        # One entry of 4 000 bytes in the table, then references to it.
        frame(
            frames.HEADERS,
            frames.END_HEADERS,
            3,
            b"\x40\x01a" + b"\x7f\xa1\x1e" + b"b" * 4000 + b"\xbe" * 70,
        ),
        ErrorCodes.COMPRESSION_ERROR,
    ),
    "a short ping": (frame(frames.PING, 0, 0, b"short"), ErrorCodes.FRAME_SIZE_ERROR),
    "a ping on a stream": (frame(frames.PING, 0, 1, bytes(8)), ErrorCodes.PROTOCOL_ERROR),
    "a reset of an idle stream": (frames.reset(9, ErrorCodes.CANCEL), ErrorCodes.PROTOCOL_ERROR),
    "a reset of the connection": (frames.reset(0, ErrorCodes.CANCEL), ErrorCodes.PROTOCOL_ERROR),
    "a short reset": (frame(frames.RST_STREAM, 0, 1, b"abc"), ErrorCodes.FRAME_SIZE_ERROR),
    "half a setting": (frame(frames.SETTINGS, 0, 0, bytes(5)), ErrorCodes.FRAME_SIZE_ERROR),
    "settings of a stream": (frame(frames.SETTINGS, 0, 1), ErrorCodes.PROTOCOL_ERROR),
    "an acknowledgement that says something": (
        frame(frames.SETTINGS, frames.ACK, 0, bytes(6)),
        ErrorCodes.FRAME_SIZE_ERROR,
    ),
    "an initial window too large": (frames.settings([(UPDATE, 2**31)]), ErrorCodes.FLOW_CONTROL_ERROR),
    "an initial window that overflows a stream's": (
        frames.window_update(1, 2**30) + frames.settings([(UPDATE, 2**31 - 1)]),
        ErrorCodes.FLOW_CONTROL_ERROR,
    ),
    "a largest frame too small": (
        frames.settings([(SettingCodes.MAX_FRAME_SIZE, 16_383)]),
        ErrorCodes.PROTOCOL_ERROR,
    ),
    "a largest frame too large": (frames.settings([(SettingCodes.MAX_FRAME_SIZE, 2**24)]), ErrorCodes.PROTOCOL_ERROR),
    "a connection window that grows by nothing": (frames.window_update(0, 0), ErrorCodes.PROTOCOL_ERROR),
    "a connection window that overflows": (frames.window_update(0, 2**31 - 1), ErrorCodes.FLOW_CONTROL_ERROR),
    "a short window update": (frame(frames.WINDOW_UPDATE, 0, 0, b"abc"), ErrorCodes.FRAME_SIZE_ERROR),
    "a window of an idle stream": (frames.window_update(9, 1), ErrorCodes.PROTOCOL_ERROR),
    "a promise": (frame(frames.PUSH_PROMISE, 0, 1, bytes(4)), ErrorCodes.PROTOCOL_ERROR),
}
STREAM_ERRORS = {
    "a window that grows by nothing": (frames.window_update(1, 0), ErrorCodes.PROTOCOL_ERROR),
    "a window that overflows": (frames.window_update(1, 2**31 - 1), ErrorCodes.FLOW_CONTROL_ERROR),
    "trailers that do not end": (frame(frames.HEADERS, frames.END_HEADERS, 1, BLOCK), ErrorCodes.PROTOCOL_ERROR),
    "data after the end": (
        frame(frames.DATA, frames.END_STREAM, 1) + frame(frames.DATA, 0, 1, b"x"),
        ErrorCodes.STREAM_CLOSED,
    ),
    "a second end": (frame(frames.DATA, frames.END_STREAM, 1) * 2, ErrorCodes.STREAM_CLOSED),
    "trailers after the end": (
        frame(frames.DATA, frames.END_STREAM, 1)
        + frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, BLOCK),
        ErrorCodes.STREAM_CLOSED,
    ),
    "an end within a message": (
        frame(frames.DATA, frames.END_STREAM, 1, b"\0\0\0\0\x05abcd"),
        ErrorCodes.PROTOCOL_ERROR,
    ),
    "an end within a prefix": (frame(frames.DATA, frames.END_STREAM, 1, b"\0\0"), ErrorCodes.PROTOCOL_ERROR),
}
FINE = {
    "a window update of a stream that is over": frames.window_update(3, 5),
    "a reset of a stream that is over": frames.reset(3, ErrorCodes.CANCEL),
    "data of a stream that is over": frame(frames.DATA, 0, 3, b"abc"),
    "an unknown frame": frame(0xFA, 0xFF, 1, b"whatever"),
    "a priority": frame(frames.PRIORITY, 0, 1, bytes(5)),
    "a goodbye": frame(frames.GOAWAY, 0, 0, bytes(8)),
    "an acknowledged ping": frame(frames.PING, frames.ACK, 0, bytes(8)),
    "acknowledged settings": frame(frames.SETTINGS, frames.ACK, 0),
    "data of nothing": frame(frames.DATA, 0, 1),
    "data of padding": frame(frames.DATA, frames.PADDED, 1, b"\x03\0\0\0"),
    "a reserved bit": header(frames.WINDOW_UPDATE, 0, 1 | 1 << 31, 4) + (5 | 1 << 31).to_bytes(4, "big"),
}


def in_use(make_wire, request_block, grpc_message):
    """A connection with a call on stream 1, and one on stream 3 that is over."""
    wire = make_wire()
    wire.open(1)
    wire.open(3)
    wire.send(frames.reset(3, ErrorCodes.CANCEL))
    wire.answers()
    return wire


@pytest.mark.parametrize("name", CONNECTION_ERRORS)
async def test_what_ends_the_connection(make_wire, request_block, grpc_message, name) -> None:
    wire = in_use(make_wire, request_block, grpc_message)
    data, code = CONNECTION_ERRORS[name]
    wire.send(data)
    goodbye = wire.answers()[-1]
    assert goodbye[0] == frames.GOAWAY
    assert ErrorCodes(int.from_bytes(goodbye[3][4:8], "big")) is code
    assert wire.transport.closed
    assert wire.calls[1].left == 1
    assert wire.connection.idle


@pytest.mark.parametrize("name", STREAM_ERRORS)
def test_what_ends_the_stream_and_no_other(make_wire, request_block, grpc_message, name) -> None:
    wire = in_use(make_wire, request_block, grpc_message)
    other = wire.open(5)
    data, code = STREAM_ERRORS[name]
    wire.send(data)
    assert wire.answers() == [(frames.RST_STREAM, 0, 1, code.to_bytes(4, "big"))]
    assert wire.calls[1].left == 1
    wire.send(frame(frames.DATA, frames.END_STREAM, 5, grpc_message(b"well")))
    assert (other.messages, other.ended, other.left) == ([(b"well", False)], 1, 0)
    assert not wire.transport.closed


@pytest.mark.parametrize("name", FINE)
def test_what_changes_nothing(make_wire, request_block, grpc_message, name) -> None:
    wire = in_use(make_wire, request_block, grpc_message)
    wire.send(FINE[name])
    assert wire.answers() == []
    wire.send(frame(frames.DATA, frames.END_STREAM, 1, grpc_message(b"well")))
    call = wire.calls[1]
    assert (call.messages, call.ended, call.left) == ([(b"well", False)], 1, 0)
    assert not wire.transport.closed


def test_a_call_with_too_many_headers_is_refused_and_no_other(make_wire, request_block, grpc_message) -> None:
    """Each time: what they say is not remembered as something that may be said."""
    wire = make_wire()
    other = wire.open(1)
    wire.answers()
    # An entry of 4 000 bytes enters the table; then come blocks of references to it.
    wire.send(frame(frames.HEADERS, frames.END_HEADERS, 3, b"\x40\x01a" + b"\x7f\xa1\x1e" + b"b" * 4000))
    for stream in (5, 7, 9):
        wire.send(frame(frames.HEADERS, frames.END_HEADERS, stream, b"\xbe" * 17))
    refused = ErrorCodes.ENHANCE_YOUR_CALM.to_bytes(4, "big")
    assert wire.answers() == [(frames.RST_STREAM, 0, stream, refused) for stream in (5, 7, 9)]
    assert set(wire.calls) == {1, 3}
    wire.send(frames.header_frames(11, request_block("Echo", ("key", "v" * 70_000)), frames.USUAL_FRAME))
    assert wire.answers() == [(frames.RST_STREAM, 0, 11, refused)]
    wire.send(frame(frames.DATA, frames.END_STREAM, 1, grpc_message(b"well")))
    assert (other.messages, other.left) == ([(b"well", False)], 0)


def test_streams_whose_ids_go_down_are_refused_and_do_not_wait(make_wire, request_block) -> None:
    wire = make_wire()
    wire.open(5)
    wire.send(frames.header_frames(3, request_block(), frames.USUAL_FRAME))
    assert (frames.RST_STREAM, 0, 3, ErrorCodes.STREAM_CLOSED.to_bytes(4, "big")) in wire.answers()
    assert set(wire.calls) == {5}


def test_trailers_of_a_client_end_its_side(make_wire, grpc_message) -> None:
    wire = make_wire()
    call = wire.open(1)
    wire.send(frame(frames.DATA, 0, 1, grpc_message(b"a")))
    wire.send(frames.header_frames(1, frames.literal(b"some", b"thing"), 4, end=True))
    assert (call.messages, call.ended, call.left) == ([(b"a", False)], 1, 0)


def test_settings_and_pings_are_answered_in_order(make_wire) -> None:
    wire = make_wire()
    wire.send(frame(frames.PING, 0, 0, b"12345678") + frames.settings([(0xABCD, 1), (1, 0)]))
    assert wire.answers() == [(frames.PING, frames.ACK, 0, b"12345678"), (frames.SETTINGS, frames.ACK, 0, b"")]


def test_a_message_larger_than_allowed_is_told_once_and_none_of_it_kept(make_wire, grpc_message) -> None:
    wire = make_wire(100)
    call = wire.open(1)
    data = grpc_message(b"small") + (101).to_bytes(5, "big") + bytes(3000)
    for at in range(0, len(data), 7):
        wire.send(frame(frames.DATA, 0, 1, data[at : at + 7]))
    wire.send(frame(frames.DATA, frames.END_STREAM, 1))
    assert (call.messages, call.refused, call.ended, call.left) == ([(b"small", False)], [101], 1, 0)
    wire.calls[1].stream.finish(frames.literal(b"grpc-status", b"8"))
    assert wire.connection.idle


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_bytes_are_understood_however_they_are_cut(make_wire, request_block, grpc_message, data) -> None:
    """Padding, priorities, continuations, frames and TCP pieces of any size: the messages are the same."""
    messages = data.draw(st.lists(st.binary(max_size=300), max_size=5))
    random = data.draw(st.randoms(use_true_random=False))
    block, sent = request_block(), bytearray(frames.PREFACE + frames.settings(()))
    cuts = sorted(random.sample(range(len(block)), 3))
    parts = [block[a:b] for a, b in itertools.pairwise((0, *cuts, len(block)))]
    sent += frame(frames.HEADERS, frames.PADDED | frames.WITH_PRIORITY, 1, b"\x02" + bytes(5) + parts[0] + b"\0\0")
    for number, part in enumerate(parts[1:], 2):
        sent += frame(frames.CONTINUATION, frames.END_HEADERS if number == len(parts) else 0, 1, part)
    body, at = b"".join(map(grpc_message, messages)), 0
    while at < len(body):
        size, padding = random.randint(0, 400), random.randint(0, 255)
        if random.random() < 0.5:
            sent += frame(frames.DATA, frames.PADDED, 1, bytes((padding,)) + body[at : at + size] + bytes(padding))
        else:
            sent += frame(frames.DATA, 0, 1, body[at : at + size])
        at += size
    sent += frame(frames.DATA, frames.END_STREAM, 1)
    wire, at = make_wire(greet=False), 0
    while at < len(sent):
        size = random.choice((1, 2, 9, 50, 1000))
        wire.send(bytes(sent[at : at + size]))
        at += size
    call = wire.calls[1]
    assert [body for body, _ in call.messages] == messages
    assert call.ended == 1
    assert dict(call.headers)[b":path"] == b"/test.Test/Echo"


ANY_FRAME = st.builds(
    frame,
    st.integers(0, 11),
    st.integers(0, 255),
    st.sampled_from((0, 1, 1, 2, 3, 5, 2**31 - 1)),
    st.one_of(
        st.binary(max_size=40),
        st.just(bytes(4)),
        st.sampled_from((b"\0\0\0\0\1x", b"\0\0\0\x80\0", b"\0\3\0\0\x40\0\0\4\0\0\0\0", BLOCK * 5)),
    ),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(ANY_FRAME, max_size=30))
async def test_frames_of_anything_end_in_an_answer(make_wire, sent) -> None:
    """Nothing raises, and the other side can read all that comes back; a connection that ends leaves no call."""
    wire = make_wire(echo=True)
    wire.open(1)
    for data in sent:
        wire.send(data)
        if wire.transport.closed:
            break
    answers = wire.answers()
    assert wire.transport.closed == (bool(answers) and answers[-1][0] == frames.GOAWAY)
    if wire.transport.closed:
        assert wire.connection.idle
        assert all(call.ended <= 1 and call.left <= 1 for call in wire.calls.values())


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_http_1_is_told_what_this_port_speaks(make_wire, size) -> None:
    wire = make_wire(greet=False)
    wire.transport.written.clear()
    wire.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"[:size])
    assert wire.transport.closed
    assert (b"400 Bad Request" in wire.transport.written) == (size == 1000)


def test_streams_beyond_the_most_are_refused_and_make_room_when_they_end(make_wire, request_block) -> None:
    wire = make_wire(greet=False)
    wire.send(frames.PREFACE + frames.settings(()))
    told = wire.answers()[0][3]
    limits = {
        int.from_bytes(told[at : at + 2], "big"): int.from_bytes(told[at + 2 : at + 6], "big")
        for at in range(0, len(told), 6)
    }
    most = limits[SettingCodes.MAX_CONCURRENT_STREAMS]
    block = request_block()
    numbers = range(1, 2 * most + 6, 2)
    wire.send(b"".join(frames.header_frames(number, block, frames.USUAL_FRAME) for number in numbers))
    assert len(wire.calls) == most
    refused = {stream: payload for kind, _, stream, payload in wire.answers() if kind == frames.RST_STREAM}
    assert set(refused) == set(numbers[most:])
    assert {int.from_bytes(payload, "big") for payload in refused.values()} == {ErrorCodes.REFUSED_STREAM}
    wire.send(frames.reset(1, ErrorCodes.CANCEL))
    wire.open(numbers[-1] + 2)
