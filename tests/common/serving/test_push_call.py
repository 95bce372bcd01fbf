"""What servicers push, and what they learn of their callers: the same of either server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from sapwood_common.errors import InvalidArgumentError, UnauthenticatedError
from sapwood_common.serving.server import ServiceServer
from sapwood_common.tenants.api_keys import ApiKeys, hash_key, make_key
from sapwood_common.tenants.tenant import Tenant, TenantSettings
from sapwood_net.http2.server.waiting_line import Rank
from sapwood_net.sockets.tls import ServerTls

SERVICE = "test.Push"
ALICE = Tenant(TenantSettings("alice"), time.monotonic)


class Service:
    """Pushes.

    Attributes:
        tenants: Whose calls there were.
        finished: How many handlers have ended.
        left: How many done callbacks ran.
    """

    def __init__(self) -> None:
        self.tenants: list[Tenant | None] = []
        self.finished = self.left = self.pushed = 0

    def handlers(self) -> dict[str, Any]:
        return {
            "Push": grpc.unary_stream_rpc_method_handler(self.push, bytes, bytes),
            "Fail": grpc.unary_stream_rpc_method_handler(self.fail, bytes, bytes),
            "Flood": grpc.unary_stream_rpc_method_handler(self.flood, bytes, bytes),
            "GiveUp": grpc.unary_stream_rpc_method_handler(self.give_up, bytes, bytes),
            "Wait": grpc.unary_unary_rpc_method_handler(self.wait, bytes, bytes),
            "Whose": grpc.unary_unary_rpc_method_handler(self.whose, bytes, bytes),
        }

    async def push(self, request: bytes, call: Any) -> None:
        """As many messages as it is asked for, in one go."""
        call.set_initial_metadata((("first", "1"),))
        call.set_trailing_metadata((("last", "2"),))
        for number in range(request[0]):
            call.write_now(b"%d" % number)

    async def fail(self, request: bytes, call: Any) -> None:
        call.set_initial_metadata((("first", "1"),))
        call.write_now(b"before")
        raise InvalidArgumentError("wrong", field="name")

    async def flood(self, request: bytes, call: Any) -> None:
        call.add_done_callback(self._leave)
        try:
            while True:
                if not call.is_ready():
                    await call.drained()
                    if call.done():
                        raise asyncio.CancelledError
                call.write_now(bytes(65_536))
                self.pushed += 1
        finally:
            self.finished += 1

    async def give_up(self, request: bytes, call: Any) -> None:
        over = asyncio.Event()
        call.add_done_callback(lambda _: over.set())
        asyncio.get_running_loop().call_later(0.05, call.give_up, grpc.StatusCode.DEADLINE_EXCEEDED, "too slow")
        if request:
            return await self.flood(request, call)
        try:
            await over.wait()
        finally:
            self.finished += 1

    async def whose(self, request: bytes, call: Any) -> bytes:
        self.tenants.append(call.tenant)
        return request

    async def wait(self, request: bytes, call: Any) -> bytes:
        self.tenants.append(call.tenant)
        await asyncio.Event().wait()
        return request

    def _leave(self, _: Any) -> None:
        self.left += 1


class Gate:
    asks_for_keys = True

    def let_in(self, method: str, headers: Any) -> Tenant | None:
        if (b"authorization", b"alice") not in headers:
            raise UnauthenticatedError(f"{method} is not for you")
        return ALICE

    def rank(self, headers: Any, tenant: Tenant | None) -> Rank:
        return Rank()


Serve = Callable[..., AbstractAsyncContextManager[tuple[str, Service]]]


@pytest.fixture
def serve(implementation) -> Serve:
    @asynccontextmanager
    async def serving(**options: Any) -> AsyncIterator[tuple[str, Service]]:
        server, service = ServiceServer("127.0.0.1", 0, [SERVICE], implementation=implementation, **options), Service()
        server.grpc.add_registered_method_handlers(SERVICE, service.handlers())
        port = await server.start()
        await server.set_serving(True)
        try:
            yield f"127.0.0.1:{port}", service
        finally:
            await server.stop(0)

    return serving


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_what_is_pushed_comes_in_order_between_the_metadata(serve) -> None:
    async with serve() as (address, _), grpc.aio.insecure_channel(address) as channel:
        for count in (1, 200, 0):
            call = channel.unary_stream(f"/{SERVICE}/Push")(bytes((count,)))
            assert [message async for message in call] == [b"%d" % number for number in range(count)]
            if count:  # grpcio's clients forget it where nothing stands between it and the end
                assert ("first", "1") in list(await call.initial_metadata())
            assert ("last", "2") in list(await call.trailing_metadata())


async def test_what_was_pushed_before_an_error_comes_before_it(serve) -> None:
    async with serve() as (address, _), grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_stream(f"/{SERVICE}/Fail")(b"")
        assert await call.read() == b"before"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "wrong")
        assert "grpc-status-details-bin" in dict(caught.value.trailing_metadata())


async def test_a_client_that_reads_slowly_holds_up_who_pushes_and_one_that_leaves_ends_it(serve) -> None:
    async with serve() as (address, service), grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_stream(f"/{SERVICE}/Flood")(b"")
        await call.read()
        before = -1
        while before != service.pushed:  # until nothing moves
            before = service.pushed
            await asyncio.sleep(0.2)
        assert before < 1000  # 64 MB
        for _ in range(before + 10):
            await call.read()
        call.cancel()
        await until(lambda: (service.finished, service.left) == (1, 1))


async def test_a_call_that_is_given_up_ends_with_its_status(serve) -> None:
    async with serve() as (address, service), grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_stream(f"/{SERVICE}/GiveUp")(b"").read()
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.DEADLINE_EXCEEDED, "too slow")
        await until(lambda: service.finished == 1)


async def test_a_call_whose_client_reads_nothing_ends_its_handler_when_it_is_given_up(serve) -> None:
    async with serve() as (address, service), grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_stream(f"/{SERVICE}/GiveUp")(b"flood")
        await until(lambda: service.finished == 1)
        call.cancel()
        await until(lambda: service.left == 1)


async def test_the_gate_says_whose_a_call_is_and_refuses_others(serve) -> None:
    async with serve(gate=Gate()) as (address, service), grpc.aio.insecure_channel(address) as channel:
        whose = channel.unary_unary(f"/{SERVICE}/Whose")
        assert await whose(b"a", metadata=(("authorization", "alice"),)) == b"a"
        assert service.tenants == [ALICE]
        for call in (whose(b"a"), channel.unary_stream(f"/{SERVICE}/Push")(b"\3").read()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{SERVICE}/None")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await check(b"") == b"\x08\x01"  # SERVING, for everybody


async def test_requests_that_are_too_large_are_refused(serve) -> None:
    async with serve(max_request_bytes=1000) as (address, _), grpc.aio.insecure_channel(address) as channel:
        whose = channel.unary_unary(f"/{SERVICE}/Whose")
        assert await whose(bytes(1000)) == bytes(1000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await whose(bytes(1001))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_certificates_are_followed_and_clients_are_asked_for_theirs(serve, tmp_path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    tls = ServerTls(tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem")

    def write(issuer: trustme.CA) -> None:
        issued = issuer.issue_cert("127.0.0.1")
        tls.key.write_bytes(issued.private_key_pem.bytes())
        tls.cert.write_bytes(issued.cert_chain_pems[0].bytes())
        (tmp_path / "ca.pem").write_bytes(issuer.cert_pem.bytes())

    async def ask(address: str, issuer: trustme.CA, shown: trustme.LeafCert | None) -> bytes:
        key = None if shown is None else shown.private_key_pem.bytes()
        chain = None if shown is None else shown.cert_chain_pems[0].bytes()
        credentials = grpc.ssl_channel_credentials(issuer.cert_pem.bytes(), key, chain)
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(address, credentials, options) as channel:
            answer: bytes = await channel.unary_unary(f"/{SERVICE}/Whose")(b"a")
            return answer

    write(authority)
    async with serve(tls=tls) as (address, _):
        assert await ask(address, authority, authority.issue_cert("client")) == b"a"
        for shown in (None, other.issue_cert("client")):
            with pytest.raises(grpc.aio.AioRpcError):
                await ask(address, authority, shown)
        write(other)
        assert await ask(address, other, other.issue_cert("client")) == b"a"
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(address, other, authority.issue_cert("client"))


async def test_a_unary_call_ends_when_its_key_is_revoked(serve, tmp_path: Path) -> None:
    key, path = make_key(), tmp_path / "keys"
    path.write_text(f"alice {hash_key(key)}\n")
    gate = Gate()
    keys = ApiKeys(path)
    gate.let_in = lambda method, headers: keys.check(f"Bearer {key}")  # type: ignore[method-assign]
    async with serve(gate=gate) as (address, service), grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Wait")(b"")
        await until(lambda: service.tenants)
        path.unlink()
        keys.refresh()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert (caught.value.code(), caught.value.details()) == (
            grpc.StatusCode.UNAUTHENTICATED,
            "the API key was revoked",
        )
