"""Connections of clients in five languages, mutated: the server continues or says goodbye, and nobody else notices.

``corpus`` holds what clients sent to ``conftest.Service``: grpcio, grpcurl (Go), curl (nghttp2), Node, our own; and four attacks.
A byte string that breaks something goes there, too.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import hpack
import pytest
from h2.errors import ErrorCodes
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sapwood_net.http2.wire import frames

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.bin"))
ROOM = 8 << 20
"""Bytes that the process may grow by with one connection."""
PONG = frames.frame(frames.PING, frames.ACK, 0, b"at last.")
FUZZ = settings(
    deadline=None,
    max_examples=40,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # what fails is short enough
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@dataclass(frozen=True)
class Part:
    """A frame as it is sent: its length may be a lie."""

    kind: int
    flags: int
    stream: int
    payload: bytes
    length: int | None = None

    def encode(self) -> bytes:
        length = len(self.payload) if self.length is None else self.length
        head = length.to_bytes(3, "big") + bytes((self.kind, self.flags)) + self.stream.to_bytes(4, "big")
        return head + self.payload


def parts_of(recorded: bytes) -> list[Part]:
    found, at = [], len(frames.PREFACE)
    while at < len(recorded):
        end = at + frames.HEADER + int.from_bytes(recorded[at : at + 3], "big")
        stream = int.from_bytes(recorded[at + 5 : at + 9], "big")
        found.append(Part(recorded[at + 3], recorded[at + 4], stream, recorded[at + 9 : end]))
        at = end
    return found


KINDS = st.sampled_from((*range(10), 0, 1, 1, 9, 0x16))
FLAGS = st.sampled_from((0, 1, 4, 5, 8, 9, 0xC, 0xD, 0x24, 0x2C, 0xFF))
STREAMS = st.sampled_from((0, 0, 1, 1, 1, 2, 3, 3, 5, 7, 101, 2**31 - 1, 2**31 + 1))
NUMBERS = st.sampled_from((0, 1, 5, 16_383, 16_384, 65_535, 2**31 - 1, 2**31, 2**32 - 1))
NAMES = st.one_of(
    st.sampled_from((b":method", b":path", b":scheme", b":authority", b"te", b"content-length", b"grpc-timeout")),
    st.sampled_from((b"grpc-encoding", b"content-type", b"host", b"connection", b"a-bin", b"X", b"")),
    st.binary(max_size=5),
)
VALUES = st.one_of(
    st.sampled_from((b"POST", b"/test.Test/Echo", b"/test.Test/Chat", b"http", b"application/grpc", b"gzip", b"1n")),
    st.sampled_from((b"99999999H", b"0", b"5", b" x", b"\r\n")),
    st.binary(max_size=30),
)


@st.composite
def blocks(draw) -> bytes:
    """A header block: as an encoder writes it, or of anything."""
    fields = draw(st.lists(st.tuples(NAMES, VALUES, st.booleans()), max_size=8))
    encoder = hpack.Encoder()
    if draw(st.booleans()):
        encoder.header_table_size = draw(st.sampled_from((0, 64, 4096)))
    block = encoder.encode(fields, huffman=draw(st.booleans()))
    return block + draw(st.one_of(st.just(b""), st.binary(max_size=12), st.just(b"\xbe" * 30)))


PAYLOADS = st.one_of(
    st.sampled_from((b"", b"\0", b"\1", b"\xff", bytes(4), bytes(5), bytes(6), bytes(8))),
    blocks(),
    st.binary(max_size=40),
    NUMBERS.map(lambda number: number.to_bytes(4, "big")),
    st.tuples(st.integers(0, 8), NUMBERS).map(lambda pair: pair[0].to_bytes(2, "big") + pair[1].to_bytes(4, "big")),
    st.tuples(st.integers(0, 1), NUMBERS, st.binary(max_size=9)).map(
        lambda parts: bytes((parts[0],)) + parts[1].to_bytes(4, "big") + parts[2]
    ),
    st.integers(0, 16_384).map(bytes),
)
ANY_PART = st.builds(Part, KINDS, FLAGS, STREAMS, PAYLOADS)


@st.composite
def connections(draw) -> bytes:
    """What a client might send."""
    parts = parts_of(draw(st.sampled_from(CORPUS)).read_bytes())
    for _ in range(draw(st.integers(1, 8))):
        at = draw(st.integers(0, len(parts)))
        match draw(st.integers(0, 9)):
            case 0:
                parts[at : at + 1] = []
            case 1 if parts:
                parts.insert(at, parts[draw(st.integers(0, len(parts) - 1))])
            case 2:
                parts[at : at + 1] *= draw(st.integers(2, 200))
            case 3:
                parts[at:at] = draw(st.lists(ANY_PART, min_size=1, max_size=4))
            case 4 if at < len(parts):
                parts[at] = replace(parts[at], kind=draw(KINDS))
            case 5 if at < len(parts):
                parts[at] = replace(parts[at], flags=draw(FLAGS))
            case 6 if at < len(parts):
                parts[at] = replace(parts[at], stream=draw(STREAMS))
            case 7 if at < len(parts):
                parts[at] = replace(parts[at], payload=draw(PAYLOADS))
            case 8 if at < len(parts) and parts[at].payload:
                payload = bytearray(parts[at].payload)
                payload[draw(st.integers(0, len(payload) - 1))] ^= 1 << draw(st.integers(0, 7))
                parts[at] = replace(parts[at], payload=bytes(payload))
            case 9 if at < len(parts):
                parts[at] = replace(parts[at], length=draw(st.integers(0, 40)))
    sent = bytearray(frames.PREFACE + b"".join(part.encode() for part in parts))
    if draw(st.integers(0, 19)) == 0:
        sent[draw(st.integers(0, len(frames.PREFACE) - 1))] ^= 1
    return bytes(sent)


def whole(sent: bytes) -> bytes:
    """The same, with what its last frame lacks."""
    at = len(frames.PREFACE)
    while at < len(sent):
        at += frames.HEADER + int.from_bytes(sent[at : at + 3].ljust(3, b"\0"), "big")
    return sent.ljust(min(at, len(sent) + frames.USUAL_FRAME + frames.HEADER), b"\0")


def exchange(port: int, data: bytes, piece: int) -> tuple[bytes, str]:
    """What comes back, and how it ends: the last ping is ``answered``, or the connection ``closed`` or ``reset``.

    On a plain socket: event loops forget what has come when they cannot send.
    """
    received = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        try:
            for at in range(0, len(data), piece):
                client.sendall(data[at : at + piece])
            while PONG not in received:
                some = client.recv(65536)
                if not some:
                    return bytes(received), "closed"
                received += some
        except ConnectionError:
            return bytes(received), "reset"
    return bytes(received), "answered"


@pytest.fixture
async def served(running, request_block, grpc_message, split_frames, until, caplog) -> AsyncIterator[tuple]:
    """A server, and a client of it that has a call all the time; nothing is left in the end."""
    escaped: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: escaped.append(context))
    caplog.set_level(logging.WARNING)
    witness = await running.connect()
    witness.send(frames.header_frames(1, request_block("Wait"), frames.USUAL_FRAME))
    witness.send(frames.frame(frames.DATA, frames.END_STREAM, 1, grpc_message(b"still here")))
    await witness.ping()
    held = running.live()
    yield running, witness, split_frames
    await until(lambda: running.live() == held)
    running.service.release.set()
    assert (await witness.until(frames.DATA, 1))[3] == grpc_message(b"still here")
    assert not escaped
    assert not [record for record in caplog.records if record.name.startswith("sapwood")]
    witness.writer.close()


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def try_out(running, witness, split_frames, sent: bytes, piece: int) -> None:
    data = whole(sent) + frames.frame(frames.PING, 0, 0, b"at last.")
    before = resident()
    received, end = await asyncio.to_thread(exchange, running.port, data, piece)
    assert resident() - before < ROOM
    found, rest = split_frames(received)
    goodbye = [payload[4:8] for kind, _, _, payload in found if kind == frames.GOAWAY]
    if end == "answered":
        assert not goodbye
    elif end == "closed" and sent.startswith(frames.PREFACE):  # a reset may overtake what was sent before it
        (code,) = goodbye
        assert not rest
        assert ErrorCodes(int.from_bytes(code, "big")) not in (ErrorCodes.NO_ERROR, ErrorCodes.INTERNAL_ERROR)
    await witness.ping()


@FUZZ
@given(connections(), st.integers(1, 5000))
async def test_a_connection_ends_with_a_goodbye_or_goes_on_and_others_notice_nothing(served, sent, piece) -> None:
    await try_out(*served, sent, piece)


@pytest.mark.slow
@settings(FUZZ, max_examples=500)
@given(connections(), st.integers(1, 5000))
async def test_many_more_broken_connections_hurt_no_other(served, sent, piece) -> None:
    await try_out(*served, sent, piece)
