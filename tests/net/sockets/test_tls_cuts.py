"""TLS over a transport that brings bytes in pieces of any size."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

import pytest
import trustme

from sapwood_net.pacing.tarpit import Tarpit
from sapwood_net.pacing.time_share import TimeShare
from sapwood_net.sockets.encryption import Encryption
from sapwood_net.sockets.tls_connection import INPUT_BYTES, TlsConnection
from sapwood_testing.takers import Taker


class Wire(asyncio.Transport):
    """A socket's transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Nothing is read here."""

    def resume_reading(self) -> None:
        """Nothing is read here."""

    def abort(self) -> None:
        """Nothing is open."""


class Fed:
    """Notes the most bytes that are written at once."""

    def __init__(self, inner: ssl.MemoryBIO) -> None:
        self.most = 0
        self._inner = inner

    def write(self, data: bytes) -> int:
        self.most = max(self.most, len(data))
        return self._inner.write(data)


@pytest.mark.parametrize("cut", [1, 3, 4, 7, 1021, INPUT_BYTES])
async def test_records_cut_anywhere_arrive_and_a_large_one_is_decrypted_at_once(cut) -> None:
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(server)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = client.wrap_bio(incoming, outgoing)
    memory, taker, wire = memoryview(bytearray(INPUT_BYTES)), Taker(), Wire()
    share = TimeShare(lambda: 0.0)  # time never passes
    connection = TlsConnection(taker, Encryption(server, 3600, 3600), share, share, memory, Tarpit(0))
    connection.connection_made(wire)

    def feed(data: bytes) -> None:
        for at in range(0, len(data), cut):
            part = data[at : at + cut]
            memory[: len(part)] = part
            connection.buffer_updated(len(part))

    while not taker.made.is_set():
        with contextlib.suppress(ssl.SSLWantReadError):
            tls.do_handshake()
        feed(outgoing.read())
        incoming.write(wire.written)
        wire.written = b""
    steps: list[int] = []
    advance = connection._advance

    def counting() -> bool:
        steps.append(1)
        return advance()

    connection._advance = counting  # type: ignore[method-assign]
    connection._incoming = fed = Fed(connection._incoming)  # type: ignore[assignment]
    tls.write(b"a" * 15_000)
    for _ in range(100):
        tls.write(b"b")
    feed(outgoing.read())
    assert taker.content == b"a" * 15_000 + b"b" * 100
    assert fed.most <= 4096  # as much is kept for each connection as long as it lives
    if cut == INPUT_BYTES:
        assert len(steps) <= 1 + 1 + 100 * 23 // 1024 + 1  # the large record; the small ones, many at a time
    connection.abort()
    connection.connection_lost(None)
