"""What is written over TLS is encrypted as its client reads it, and no more of it in one turn of the loop than there is time."""

from __future__ import annotations

import asyncio
import socket
import ssl

import pytest
import trustme

from sapwood_net.pacing.time_share import SLICE, TimeShare
from sapwood_net.sockets.acceptor import Acceptor
from sapwood_net.sockets.encryption import Encryption
from sapwood_net.sockets.listen import listen
from sapwood_net.sockets.tls_writer import TlsWriter


class End:
    """Counts what is encrypted; each piece takes a turn's share of its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pieces: list[int] = []
        self.data = bytearray()
        self.ends = 0

    def encrypt(self, data: memoryview) -> None:
        self.now += SLICE
        self.pieces.append(len(data))
        self.data += data

    def all_encrypted(self) -> None:
        self.ends += 1


async def test_a_large_answer_is_encrypted_in_pieces_only_while_its_client_reads() -> None:
    end = End()
    writer = TlsWriter(end, TimeShare(lambda: end.now))
    body = bytes(range(256)) * 1024
    writer.write(memoryview(body[:1000]))
    assert end.pieces == [1000]  # what is small goes at once
    writer.write(memoryview(body[1000:-10]))
    writer.write(memoryview(body[-10:]))
    assert end.pieces == [1000]
    assert writer.size == len(body) - 1000
    for turns in range(1, 4):
        await asyncio.sleep(0)
        assert len(end.pieces) == 1 + turns
    writer.pause()
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(end.pieces) == 4
    assert not end.ends
    writer.resume()
    while writer.size:
        await asyncio.sleep(0)
    assert end.data == body
    assert max(end.pieces) <= 32 * 1024
    assert end.ends == 1


async def test_of_a_connection_that_is_lost_nothing_more_is_encrypted() -> None:
    end = End()
    writer = TlsWriter(end, TimeShare(lambda: end.now))
    writer.write(memoryview(bytes(1_000_000)))
    writer.drop()
    writer.write(memoryview(b"a"))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not end.pieces
    assert writer.size == 0


class Writer(asyncio.Protocol):
    """Writes megabytes as soon as there is a connection, and closes."""

    body = bytes(range(256)) * 20_000

    def __init__(self, closes: bool) -> None:
        self._closes = closes
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self.body[:100])
        transport.write(self.body[100:])
        if self._closes:
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(None)


@pytest.mark.parametrize("closes", [True, False], ids=["server closes", "client closes"])
async def test_all_that_was_written_comes_before_the_end_whoever_ends_the_connection(closes) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    listener = listen("127.0.0.1", 0)
    written: list[Writer] = []

    def make() -> Writer:
        written.append(Writer(closes))
        return written[-1]

    acceptor = Acceptor(listener, make, Encryption(context, 30.0, 30.0))
    acceptor.start()

    def read() -> bytes:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        plain = socket.create_connection(listener.getsockname(), timeout=60)
        with client.wrap_socket(plain, suppress_ragged_eofs=True) as tls:
            got = bytearray()
            while part := tls.recv(65536):
                if not got and not closes:
                    socket.socket.shutdown(tls, socket.SHUT_WR)  # below TLS: it sends no more, and reads on
                got += part
            return bytes(got)

    assert await asyncio.to_thread(read) == Writer.body
    await written[0].lost
    acceptor.close()
