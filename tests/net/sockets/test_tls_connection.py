"""TLS takes its share of the event loop's time and no more, and content passes as over a plain connection."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import socket
import ssl
import weakref
from types import ModuleType

import pytest
import trustme

from sapwood_net.pacing.time_share import TimeShare
from sapwood_net.sockets.acceptor import Acceptor
from sapwood_net.sockets.encryption import Encryption
from sapwood_net.sockets.listen import listen
from sapwood_net.sockets.tls_connection import INPUT_BYTES, TlsConnection
from sapwood_testing.takers import BufferedTaker, Taker, Turns


class Client:
    """A client in a thread, with Python's own TLS on a blocking socket."""

    def __init__(self, port: int) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self.plain = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing)

    def shake_hands(self) -> Client:
        self._pump(self.tls.do_handshake)
        return self

    def receive(self, count: int) -> bytes:
        got = b""
        while len(got) < count and (part := self._pump(self.tls.read, count - len(got))):
            got += part
        return got

    def send(self, *records: bytes) -> None:
        for record in records:
            self.tls.write(record)
        self.plain.sendall(self.outgoing.read())

    def _pump(self, step, *given):
        while True:
            try:
                done = step(*given)
                self.plain.sendall(self.outgoing.read())
                return done
            except ssl.SSLWantReadError:
                self.plain.sendall(self.outgoing.read())
                data = self.plain.recv(65536)
                if not data:
                    return b""
                self.incoming.write(data)


@pytest.fixture
async def serve():
    """Listens over TLS with a protocol for each connection; gives the port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    acceptors = []

    def start(make, shutdown: float = 5.0, held: float = 0.05) -> int:
        listener = listen("127.0.0.1", 0)
        acceptors.append(Acceptor(listener, make, Encryption(context, 30.0, shutdown, held)))
        acceptors[-1].start()
        return listener.getsockname()[1]

    yield start
    for acceptor in acceptors:
        acceptor.close()


async def test_in_one_turn_of_the_loop_little_is_decrypted_however_much_there_is(serve) -> None:
    turns = Turns()
    taker = Taker(turns)
    client = Client(serve(lambda: taker))
    await asyncio.to_thread(client.shake_hands)
    await taker.made.wait()
    taker.transport.pause_reading()
    sending = asyncio.create_task(asyncio.to_thread(client.send, bytes(4000), *([b"a" * 10] * 20_000)))
    await asyncio.sleep(0.1)  # as much as the kernel takes is there when reading continues
    taker.transport.resume_reading()
    await sending
    while len(taker.content) < 204_000:
        await asyncio.sleep(0.001)
    turns.stop()
    # What waits is worked on, and as much is read; a turn of the loop has both at most twice.
    assert max(taker.by_turn.values()) <= 4 * INPUT_BYTES
    taker.transport.abort()
    await taker.lost


async def test_the_rest_of_much_is_much_however_little_is_left(serve, monkeypatch) -> None:
    queued: list[bool] = []
    add = TimeShare.add

    def note(share: TimeShare, worker, *, light: bool = False) -> None:
        if isinstance(worker, TlsConnection):
            queued.append(light)
        add(share, worker, light=light)

    taker = Taker()
    client = Client(serve(lambda: taker))
    await asyncio.to_thread(client.shake_hands)
    await taker.made.wait()
    monkeypatch.setattr(TimeShare, "add", note)
    for records, light in ((40, True), (800, False)):
        taker.transport.pause_reading()
        before = len(taker.content)
        await asyncio.to_thread(client.send, *([b"a" * 10] * records))
        await asyncio.sleep(0.1)
        queued.clear()
        monkeypatch.setattr(TimeShare, "is_over", lambda _: True)  # there is no time for what was just read
        taker.transport.resume_reading()
        while len(taker.content) < before + 10 * records:
            await asyncio.sleep(0)
            assert not queued or taker.transport.get_extra_info("light") == light
        assert queued
        assert set(queued) == {light}
    taker.transport.abort()
    await taker.lost


async def test_who_sends_records_with_next_to_nothing_in_them_is_closed(serve) -> None:
    taker = Taker()
    client = Client(serve(lambda: taker))
    await asyncio.to_thread(client.shake_hands)
    with contextlib.suppress(OSError):  # closed meanwhile
        await asyncio.to_thread(client.send, *([b"a"] * 20_000))
    await taker.lost
    assert 2000 < len(taker.content) < 10_000


async def test_small_messages_each_in_a_record_are_taken_for_ever(serve) -> None:
    taker = Taker()
    client = Client(serve(lambda: taker))
    await asyncio.to_thread(client.shake_hands)
    await asyncio.to_thread(client.send, *([b"17 bytes, a PING!"] * 20_000))
    while len(taker.content) < 17 * 20_000:
        await asyncio.sleep(0.001)
    taker.transport.abort()
    await taker.lost


class OpenSsl:
    """Python's own OpenSSL, of which the ``ssl`` module shows no changes of keys."""

    def __init__(self, library: ModuleType) -> None:
        self._library = ctypes.CDLL(library.__file__)
        for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
            getattr(self._library, name).restype = ctypes.c_void_p

    def flood(self, connection: socket.socket, requested: bool) -> int:
        """Changes keys until the server closes; returns how often that went."""
        library, pointer = self._library, ctypes.c_void_p
        context = pointer(library.SSL_CTX_new(pointer(library.TLS_client_method())))
        tls = pointer(library.SSL_new(context))
        library.SSL_set_fd(tls, connection.fileno())
        assert library.SSL_connect(tls) == 1
        count = 0
        while count < 100_000 and library.SSL_key_update(tls, int(requested)) == 1:
            if library.SSL_do_handshake(tls) != 1:
                break
            count += 1
        library.SSL_free(tls)
        library.SSL_CTX_free(context)
        return count


@pytest.fixture
def openssl() -> OpenSsl:
    _ssl = pytest.importorskip("_ssl")
    try:
        found = OpenSsl(_ssl)
    except (AttributeError, OSError, TypeError):
        pytest.skip("this Python shows no OpenSSL")
    return found


@pytest.mark.parametrize("requested", [False, True], ids=["one-sided", "both sides'"])
async def test_who_changes_keys_again_and_again_is_closed(serve, openssl, requested) -> None:
    taker = Taker()
    port = serve(lambda: taker)
    with socket.create_connection(("127.0.0.1", port), timeout=None) as connection:
        changes = await asyncio.to_thread(openssl.flood, connection, requested)
    assert changes < 100_000
    await taker.lost
    assert not taker.content


@pytest.mark.parametrize("make", [Taker, BufferedTaker])
async def test_megabytes_pass_both_ways_and_a_slow_reader_is_told(serve, make) -> None:
    taken = make()
    taker = taken if isinstance(taken, Taker) else taken.inner
    client = Client(serve(lambda: taken))
    await asyncio.to_thread(client.shake_hands)
    body = bytes(range(256)) * 12_000
    await taker.made.wait()
    await asyncio.to_thread(client.send, body)
    while len(taker.content) < len(body):
        await asyncio.sleep(0.001)
    assert taker.content == body
    if isinstance(taken, Taker):
        taker.transport.write(body * 4)
        assert taker.write_paused
        assert taker.transport.get_write_buffer_size() > 0
        received = await asyncio.to_thread(client.receive, 4 * len(body))
        assert received == body * 4
        await taker.drained.wait()
        assert not taker.write_paused
    taker.transport.close()
    taker.transport.close()
    taker.transport.write(b"too late")
    assert taker.transport.is_closing()
    assert await asyncio.to_thread(client.receive, 1) == b""
    client.plain.close()
    await taker.lost


async def test_nothing_comes_while_reading_is_paused(serve) -> None:
    taker = Taker()
    client = Client(serve(lambda: taker))
    await asyncio.to_thread(client.shake_hands)
    await taker.made.wait()
    taker.transport.pause_reading()
    await asyncio.to_thread(client.send, b"hello")
    await asyncio.sleep(0.05)
    assert not taker.content
    taker.transport.resume_reading()
    while not taker.content:
        await asyncio.sleep(0.001)
    client.plain.shutdown(socket.SHUT_WR)
    await taker.lost
    assert taker.ended
    client.plain.close()


async def test_the_last_answer_reaches_who_is_still_sending(serve) -> None:
    """The kernel would take it back if the socket were closed with something unread."""
    taker = Taker()
    client = Client(serve(lambda: taker))
    await asyncio.to_thread(client.shake_hands)
    await taker.made.wait()
    taker.transport.pause_reading()
    await asyncio.to_thread(client.send, bytes(100_000))
    taker.transport.write(b"goodbye")
    taker.transport.close()
    assert await asyncio.to_thread(client.receive, 7) == b"goodbye"
    assert await asyncio.to_thread(client.receive, 1) == b""
    client.plain.close()
    await taker.lost


async def test_who_does_not_leave_is_closed_in_time(serve) -> None:
    taker = Taker()
    client = Client(serve(lambda: taker, shutdown=0.05))
    await asyncio.to_thread(client.shake_hands)
    await taker.made.wait()
    taker.transport.close()
    await taker.lost
    client.plain.close()


@pytest.mark.parametrize("how", ["nonsense", "end"])
async def test_who_reads_nothing_and_breaks_off_is_closed_in_time(serve, how) -> None:
    taker = Taker()
    client = Client(serve(lambda: taker, shutdown=0.05))
    await asyncio.to_thread(client.shake_hands)
    await taker.made.wait()
    taker.transport.write(bytes(30_000_000))
    if how == "end":
        client.plain.shutdown(socket.SHUT_WR)
    else:
        client.plain.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    await taker.lost
    client.plain.close()


async def test_a_failed_handshake_leaves_nothing_for_the_collector(serve) -> None:
    made: list[weakref.ref[Taker]] = []

    def make() -> Taker:
        taker = Taker()
        made.append(weakref.ref(taker))
        return taker

    port = serve(make)
    gc.disable()
    try:
        for number in range(3):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
                client.sendall(b"\x16 and no TLS at all")
                while len(made) <= number or made[number]() is not None:
                    await asyncio.sleep(0.001)
    finally:
        gc.enable()


async def test_nonsense_in_place_of_a_record_ends_the_connection_quietly(serve, caplog) -> None:
    taker = Taker()
    client = Client(serve(lambda: taker))
    await asyncio.to_thread(client.shake_hands)
    client.plain.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    await taker.lost
    client.plain.close()
    assert [record for record in caplog.records if record.levelname not in ("DEBUG", "INFO")] == []
