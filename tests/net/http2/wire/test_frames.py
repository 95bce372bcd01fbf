"""Frames on a fake socket: what they may hold, how they may be cut, and that frames of anything end in an answer."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_net.http2.wire import frames
from sapwood_net.http2.wire.frame_reader import FrameReader
from sapwood_net.http2.wire.frames import frame
from sapwood_net.pacing.time_share import TimeShare

BLOCK = frames.STATUS_200  # decodes, and is no call


CONNECTION_ERRORS = {
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
    "a broken ping": (frame(frames.PING, 0, 0, b"short"), ErrorCodes.FRAME_SIZE_ERROR),
}
STREAM_ERRORS = {
    "an end within a message": (
        frame(frames.DATA, frames.END_STREAM, 1, b"\0\0\0\0\x05abcd"),
        ErrorCodes.PROTOCOL_ERROR,
    ),
    "an end within a prefix": (frame(frames.DATA, frames.END_STREAM, 1, b"\0\0"), ErrorCodes.PROTOCOL_ERROR),
    "trailers within a message": (
        frame(frames.DATA, 0, 1, b"\0\0") + frames.header_frames(1, frames.literal(b"x", b"y"), 99, end=True),
        ErrorCodes.PROTOCOL_ERROR,
    ),
}


def in_use(make_wire):
    """A connection with a call on stream 1, and one on stream 3 that is over."""
    wire = make_wire()
    wire.open(1)
    wire.open(3)
    wire.send(frames.reset(3, ErrorCodes.CANCEL))
    wire.answers()
    return wire


@pytest.mark.parametrize("name", CONNECTION_ERRORS)
async def test_what_ends_the_connection(make_wire, name) -> None:
    wire = in_use(make_wire)
    data, code = CONNECTION_ERRORS[name]
    wire.send(data)
    goodbye = wire.answers()[-1]
    assert goodbye[0] == frames.GOAWAY
    assert ErrorCodes(int.from_bytes(goodbye[3][4:8], "big")) is code
    assert wire.transport.closed
    assert wire.calls[1].left == 1
    assert wire.connection.idle


@pytest.mark.parametrize("name", STREAM_ERRORS)
def test_what_ends_the_stream_and_no_other(make_wire, grpc_message, name) -> None:
    wire = in_use(make_wire)
    other = wire.open(5)
    data, code = STREAM_ERRORS[name]
    wire.send(data)
    assert wire.answers() == [(frames.RST_STREAM, 0, 1, code.to_bytes(4, "big"))]
    assert wire.calls[1].left == 1
    wire.send(frame(frames.DATA, frames.END_STREAM, 5, grpc_message(b"well")))
    assert (other.messages, other.ended, other.left) == ([(b"well", False)], 1, 0)
    assert not wire.transport.closed


async def test_a_call_with_too_many_headers_is_refused_and_no_other(make_wire, request_block, grpc_message) -> None:
    """Each time: what they say is not remembered as something that may be said."""
    wire = make_wire()
    other = wire.open(1)
    wire.answers()
    # An entry of 4 000 bytes enters the table; then come blocks of references to it.
    entry = b"\x40\x01a" + b"\x7f\xa1\x1e" + b"b" * 4000
    wire.send(frame(frames.HEADERS, frames.END_HEADERS, 3, request_block() + entry))
    for stream in (5, 7, 9):
        wire.send(frame(frames.HEADERS, frames.END_HEADERS, stream, b"\xbe" * 17))
    refused = ErrorCodes.ENHANCE_YOUR_CALM.to_bytes(4, "big")
    assert wire.answers() == [(frames.RST_STREAM, 0, stream, refused) for stream in (5, 7, 9)]
    assert set(wire.calls) == {1, 3}
    wire.send(frames.header_frames(11, request_block("Echo", ("key", "v" * 70_000)), frames.USUAL_FRAME))
    assert wire.answers() == [(frames.RST_STREAM, 0, 11, refused)]
    wire.send(frame(frames.DATA, frames.END_STREAM, 1, grpc_message(b"well")))
    assert (other.messages, other.left) == ([(b"well", False)], 0)


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


async def test_streams_beyond_the_most_are_refused_and_make_room_when_they_end(make_wire, request_block) -> None:
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


async def test_who_sends_much_waits_from_its_first_frame_on_when_time_is_over(make_wire, grpc_message) -> None:
    """One frame of small messages takes milliseconds: each of many connections must not have one."""
    turns = iter(range(1_000_000))
    share = TimeShare(lambda: next(turns) / 500)  # every look at the clock finds 2 ms more
    wires = [make_wire(share=share) for _ in range(8)]
    calls = [wire.open(1) for wire in wires]
    for wire in wires:
        wire.send(frame(frames.DATA, 0, 1, grpc_message(b"") * 1000) * 2)
    assert sum(len(call.messages) for call in calls) <= 4000  # and not 16 000
    few = make_wire(share=share)
    call = few.open(1)
    few.send(frame(frames.DATA, 0, 1, grpc_message(b"a")))
    assert len(call.messages) == 1
    for wire in (*wires, few):
        wire.connection.connection_lost(None)


async def test_a_connection_with_a_call_to_read_goes_on_before_those_with_much(make_wire, grpc_message) -> None:
    turns = iter(range(1_000_000))
    share = TimeShare(lambda: next(turns) / 500)  # every look at the clock finds 2 ms more
    wires = [make_wire(share=share, stranger=True) for _ in range(9)]
    calls = [wire.open(1) for wire in wires]
    for wire in wires[:8]:
        wire.send(frame(frames.DATA, 0, 1, grpc_message(b"") * 1000) * 4)
    wires[8].send(frame(frames.DATA, 0, 1, grpc_message(bytes(300))) * 3)
    assert len(calls[8].messages) < 3
    before = [len(call.messages) for call in calls[:8]]
    while len(calls[8].messages) < 3:
        await asyncio.sleep(0)
    assert sum(len(call.messages) > count for call, count in zip(calls, before, strict=False)) < 4
    for wire in wires:
        wire.connection.connection_lost(None)


async def test_of_many_connections_that_are_lost_at_once_few_streams_end_in_a_turn(make_wire) -> None:
    turns = iter(range(1_000_000))
    share = TimeShare(lambda: next(turns) / 10_000)  # every look at the clock finds 0.1 ms more
    wires = [make_wire(share=share, stranger=True) for _ in range(40)]
    calls = [wire.open(stream) for wire in wires for stream in range(1, 101, 2)]
    for wire in wires:
        wire.connection.connection_lost(None)
    assert sum(call.left for call in calls) <= 100
    while any(not call.left for call in calls):
        before = sum(call.left for call in calls)
        await asyncio.sleep(0)
        assert sum(call.left for call in calls) <= before + 20
    assert sum(call.left for call in calls) == len(calls)


class Taken:
    """Which frames were handed over."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, int]] = []

    def take_data(self, stream: int, payload: bytes, wire_bytes: int, ends: bool) -> None:
        self.frames.append(("data", stream))

    def take_block(self, stream: int, block: bytes, ends: bool) -> None:
        self.frames.append(("head", stream))

    def take_control(self, kind: int, stream: int, flags: int, payload: bytes) -> None:
        self.frames.append(("control", stream))


def test_when_time_is_over_a_calls_request_is_taken_with_its_head_and_nothing_else() -> None:
    reader, taken = FrameReader(stranger=True), Taken()
    calls = b"".join(
        frames.header_frames(stream, BLOCK, frames.USUAL_FRAME) + frame(frames.DATA, 0, stream, b"a") * 2
        for stream in (1, 3)
    )
    assert reader.feed(calls, taken, lambda: True)
    assert taken.frames == [("head", 1), ("data", 1)]
    while reader.feed(b"", taken, lambda: True):
        pass
    assert [kind for kind, _ in taken.frames] == ["head", "data", "data"] * 2


@pytest.mark.parametrize("stranger", [False, True])
async def test_of_a_stranger_less_is_taken_before_the_clock_is_looked_at(make_wire, stranger) -> None:
    turns = iter(range(1_000_000))
    share = TimeShare(lambda: next(turns) / 500)
    wire = make_wire(share=share, stranger=stranger)
    wire.answers()
    wire.send(frame(frames.PING, 0, 0, bytes(8)) * 120)  # two kilobytes
    answered = sum(kind == frames.PING for kind, *_ in wire.answers())
    assert answered == 120 if not stranger else 20 < answered < 80
    assert share.waiting == stranger
    wire.connection.connection_lost(None)
