"""TLS: what is agreed on, who is let in, and files that are replaced under way."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import grpc
import pytest
import trustme

from sapwood_net.http2.wire import frames
from sapwood_net.sockets.tls import ServerTls

ECHO = "/test.Test/Echo"


class Files:
    """A server's certificate, key and clients' CA, and what clients need for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = trustme.CA()
        self.tls = ServerTls(folder / "cert.pem", folder / "key.pem")
        self.mutual = ServerTls(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
        self.write()

    def write(self) -> None:
        issued = self.ca.issue_cert("127.0.0.1", "localhost")
        for path, blob in (
            (self.tls.key, issued.private_key_pem.bytes()),
            (self.tls.cert, issued.cert_chain_pems[0].bytes()),
            (self.folder / "ca.pem", self.ca.cert_pem.bytes()),
        ):
            path.with_suffix(".new").write_bytes(blob)
            path.with_suffix(".new").rename(path)

    def context(self, *protocols: str, shown: trustme.LeafCert | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.ca.cert_pem.bytes().decode())
        if protocols:
            context.set_alpn_protocols(list(protocols))
        if shown is not None:
            shown.configure_cert(context)
        return context

    def credentials(self, shown: trustme.LeafCert | None = None) -> grpc.ChannelCredentials:
        if shown is None:
            return grpc.ssl_channel_credentials(self.ca.cert_pem.bytes())
        key, chain = shown.private_key_pem.bytes(), shown.cert_chain_pems[0].bytes()
        return grpc.ssl_channel_credentials(self.ca.cert_pem.bytes(), key, chain)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def test_calls_and_large_messages_over_tls(serve, files) -> None:
    async with serve(8 << 20, files.tls) as running:
        options = [("grpc.max_receive_message_length", -1)]
        async with grpc.aio.secure_channel(running.address, files.credentials(), options) as channel:
            for body in (b"", b"a", bytes(5 << 20)):
                assert await channel.unary_unary(ECHO)(body) == body


@pytest.mark.parametrize("offered", [("h2",), ("http/1.1", "h2")])
async def test_h2_is_agreed_on(serve, files, offered) -> None:
    async with serve(tls=files.tls) as running:
        client = await running.connect(ssl=files.context(*offered))
        assert client.writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        await client.ping()
        client.writer.transport.abort()


@pytest.mark.parametrize("offered", [("http/1.1",), ("h3", "http/1.1"), ()])
async def test_who_does_not_offer_h2_is_closed_and_told_nothing(serve, files, offered, until) -> None:
    """As by grpcio's server, also who offers nothing."""
    async with serve(tls=files.tls) as running:
        client = await running.connect(ssl=files.context(*offered))
        assert client.writer.get_extra_info("ssl_object").selected_alpn_protocol() is None
        with contextlib.suppress(ConnectionError):
            assert await client.reader.read() == b""
        assert not running.server.connections
        client.writer.close()


async def test_a_tls_handshake_that_does_not_go_on_is_closed(serve, files) -> None:
    async with serve(tls=files.tls, handshake=0.05) as running:
        for sent in (b"", b"\x16\x03\x01\x02\0"):
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(sent)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()


async def test_failed_handshakes_leave_nothing_and_harm_nobody(serve, files, until) -> None:
    async with serve(tls=files.mutual) as running:
        stranger = trustme.CA().issue_cert("stranger")
        for context in (files.context("h2"), files.context("h2", shown=stranger)):
            with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
                client = await running.connect(ssl=context)
                await client.ping()
        plain = await running.connect()
        await plain.closed()
        scanner = await running.connect(greet=False)
        scanner.writer.close()
        async with grpc.aio.secure_channel(
            running.address, files.credentials(files.ca.issue_cert("client"))
        ) as channel:
            assert await channel.unary_unary(ECHO)(b"a") == b"a"
            await until(lambda: running.live() == 1)


async def test_replaced_files_count_from_the_next_connection_on(serve, files) -> None:
    """Also for clients that name no server, and for those whose CA is no longer one."""
    async with serve(tls=files.mutual) as running:
        old_client = files.context("h2", shown=files.ca.issue_cert("client"))
        first = await running.connect(ssl=old_client)
        await first.ping()
        session = first.writer.get_extra_info("ssl_object").session
        old_authority = files.ca
        files.ca = trustme.CA()
        files.write()
        await first.ping()
        for name in ("127.0.0.1", "localhost"):
            fresh = files.context("h2", shown=files.ca.issue_cert("client"))
            client = await running.connect(ssl=fresh, server_hostname=name)
            await client.ping()
            client.writer.close()
        # One who would trust the new server, and shows what the old CA said; also with what it remembers of the first time.
        old_client.load_verify_locations(cadata=files.ca.cert_pem.bytes().decode())
        assert not await is_let_in(old_client, session, running.port)
        files.ca = old_authority
        (files.folder / "cert.pem").write_bytes(b"half of")
        client = await running.connect(ssl=fresh)  # broken files are not taken up
        await client.ping()
        client.writer.close()
        first.writer.close()


async def is_let_in(context: ssl.SSLContext, session: ssl.SSLSession | None, port: int) -> bool:
    """Whether a client with this context, and a session to resume, is answered."""
    inbound, outbound = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(inbound, outbound, server_hostname="127.0.0.1", session=session)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while True:
            try:
                if tls.version() is None or not tls.selected_alpn_protocol():
                    tls.do_handshake()
                    tls.write(frames.PREFACE + frames.settings(()))
                return bool(tls.read(1))
            except ssl.SSLWantReadError:
                writer.write(outbound.read())
                received = await reader.read(65536)
                if not received:
                    return False
                inbound.write(received)
    except (ssl.SSLError, ConnectionError):
        return False
    finally:
        writer.close()
