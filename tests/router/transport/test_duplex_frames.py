"""The call's frames against another implementation's server, cut anywhere, and what a peer must not do."""

import asyncio
from collections.abc import Iterator
from functools import partial
from random import Random

import grpc
import hypothesis.strategies as st
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, Event, StreamReset
from h2.settings import SettingCodes, Settings
from hypothesis import given, settings

from sapwood_net.http2.client.duplex_call import DuplexCall
from sapwood_net.http2.wire import frames
from sapwood_net.http2.wire.frames import frame
from sapwood_net.http2.wire.message_reader import prefixed

OPENING = frames.STATUS_200 + frames.literal(b"content-type", b"application/grpc")
CLOSING = frames.literal(b"grpc-status", b"0")
MOST = 1 << 20


class Socket(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = False

    def write(self, data) -> None:
        assert not self.closed
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0


def begun() -> tuple[DuplexCall, Socket, list[bytes]]:
    call, socket, messages = DuplexCall("x:1", "/a/b", secure=False, most_bytes=MOST), Socket(), []
    call.connection_made(socket)
    call.follow(messages.append, lambda: None)
    return call, socket, messages


def status(call: DuplexCall) -> grpc.StatusCode:
    return asyncio.run(call.wait_ended()).code


def pieces(data: bytes, random: Random) -> Iterator[bytes]:
    while data:
        size = random.choice((1, 8, 9, 13, 14, 15, 100, 20_000))
        yield data[:size]
        data = data[size:]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from((0, 1, 5, 300, 16_374, 16_379, 16_380, 40_000)), max_size=8),
    st.sampled_from((0, 1, 100, 65_535)),
    st.booleans(),
)
def test_messages_arrive_as_they_were_sent_however_they_are_cut(seed, sizes, window, padded) -> None:
    random = Random(seed)
    server = H2Connection(H2Configuration(client_side=False))
    server.local_settings = Settings(client=False, initial_values={SettingCodes.INITIAL_WINDOW_SIZE: window})
    server.encoder.encode = partial(server.encoder.encode, huffman=False)  # of Huffman code little is taken
    server.initiate_connection()
    call, socket, received = begun()
    sent = [random.randbytes(size) for size in sizes]
    arrived = bytearray()

    def turn() -> list[Event]:
        events = []
        for piece in pieces(bytes(socket.written), random):
            events += server.receive_data(piece)
        socket.written.clear()
        for event in events:
            if isinstance(event, DataReceived):
                arrived.extend(event.data)
                if event.flow_controlled_length:
                    server.acknowledge_received_data(event.flow_controlled_length, 1)
        for piece in pieces(server.data_to_send(), random):
            call.data_received(piece)
        return events

    turn()  # each knows the other's settings
    for message in sent:
        call.write(message)
    server.send_headers(1, [(":status", "200"), ("content-type", "application/grpc"), ("long", "x" * 20_000)])
    server.ping(b"12345678")
    for message in sent:
        data = prefixed(message)
        while data:
            size = random.choice((1, 5, 1000, 16_300))
            server.send_data(1, data[:size], pad_length=random.choice((0, 7)) if padded else None)
            data = data[size:]
    for _ in range(1000):
        turn()
        if len(arrived) == sum(map(len, sent)) + 5 * len(sent):
            break
        server.increment_flow_control_window(10_000, 1)
    assert received == sent
    assert bytes(arrived) == b"".join(map(prefixed, sent))
    server.send_headers(1, [("grpc-status", "9"), ("grpc-message", "so %25")], end_stream=True)
    turn()
    assert call.ended and socket.closed
    assert status(call) is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    "data",
    [
        frame(frames.DATA, frames.PADDED, 1, b"\x05abcd"),
        frame(frames.DATA, frames.END_STREAM, 1, prefixed(b"x")),
        frame(frames.DATA, 0, 3, prefixed(b"x")),
        frame(frames.HEADERS, frames.END_HEADERS, 3, OPENING),
        frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff"),
        frame(frames.HEADERS, 0, 1, OPENING) + frame(frames.PING, 0, 0, bytes(8)),
        frame(frames.CONTINUATION, frames.END_HEADERS, 1, OPENING),
        frame(frames.SETTINGS, 0, 0, bytes(5)),
        frame(frames.SETTINGS, 0, 1),
        frame(frames.PING, 0, 0, bytes(7)),
        frame(frames.PUSH_PROMISE, frames.END_HEADERS, 1, bytes(4)),
        frame(frames.RST_STREAM, 0, 1, bytes(3)),
        frame(frames.WINDOW_UPDATE, 0, 0, bytes(3)),
        frame(frames.DATA, 0, 1, bytes(16_385)),
        frame(frames.DATA, 0, 1, b"\x01\0\0\0\x01x"),
        frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, OPENING),
    ],
)
def test_what_a_peer_must_not_do_ends_the_call(data) -> None:
    call, socket, messages = begun()
    call.data_received(frames.settings(()) + frames.header_frames(1, OPENING, 16_384))
    call.data_received(data)
    assert status(call) is grpc.StatusCode.INTERNAL
    assert socket.closed
    call.data_received(frame(frames.DATA, 0, 1, prefixed(b"late")))
    assert b"late" not in messages


@pytest.mark.parametrize(
    "data",
    [
        frame(frames.PING, 0, 0, bytes(8)),
        frames.header_frames(1, OPENING, 16_384),
        frame(frames.DATA, 0, 1, prefixed(b"x")),
    ],
)
def test_a_peer_that_does_not_begin_with_settings_ends_the_call(data) -> None:
    call, socket, messages = begun()
    call.data_received(data + frames.settings(()))
    assert status(call) is grpc.StatusCode.INTERNAL
    assert socket.closed and not messages


def test_what_asks_for_nothing_changes_nothing() -> None:
    call, socket, messages = begun()
    call.data_received(frames.settings(()) + frames.header_frames(1, OPENING, 16_384))
    socket.written.clear()
    for data in (
        frame(0xFA, 0xFF, 1, b"whatever"),
        frame(frames.PRIORITY, 0, 1, bytes(5)),
        frame(frames.SETTINGS, frames.ACK, 0),
        frame(frames.PING, frames.ACK, 0, bytes(8)),
        frame(frames.GOAWAY, 0, 0, (1).to_bytes(4, "big") + bytes(4)),
        frame(frames.HEADERS, frames.END_HEADERS, 1, frames.literal(b":status", b"103")),
        frame(frames.DATA, frames.PADDED, 1, b"\x03\0\0\0"),
    ):
        call.data_received(data)
    assert not socket.written and not messages
    call.data_received(frame(frames.DATA, 0, 1, prefixed(b"well")))
    assert messages == [b"well"] and not call.ended
    call.data_received(frames.header_frames(1, CLOSING, 16_384, end=True))
    assert status(call) is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frames.reset(1, ErrorCodes.CANCEL), grpc.StatusCode.CANCELLED),
        (frames.reset(1, ErrorCodes.ENHANCE_YOUR_CALM), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (frames.reset(1, 99), grpc.StatusCode.UNAVAILABLE),
        (frame(frames.GOAWAY, 0, 0, bytes(8)), grpc.StatusCode.UNAVAILABLE),
        (frame(frames.GOAWAY, 0, 0, (1).to_bytes(4, "big") + bytes((0, 0, 0, 2))), grpc.StatusCode.UNAVAILABLE),
        (frames.header_frames(1, frames.literal(b":status", b"503"), 16_384), grpc.StatusCode.UNAVAILABLE),
        (frames.header_frames(1, frames.literal(b"grpc-status", b"1" * 5000), 16_384), grpc.StatusCode.UNKNOWN),
    ],
)
def test_how_it_ends_says_why(data, code) -> None:
    call, _, _ = begun()
    call.data_received(frames.settings(()) + data)
    assert status(call) is code


def test_closing_resets_the_stream() -> None:
    call, socket, _ = begun()
    server = H2Connection(H2Configuration(client_side=False))
    server.initiate_connection()
    call.close()
    assert isinstance(server.receive_data(bytes(socket.written))[-1], StreamReset)
