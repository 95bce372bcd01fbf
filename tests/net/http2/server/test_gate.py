"""Who is let in is known from the headers: before a message is read, unfolded or parsed, and before there are many calls."""

from __future__ import annotations

import asyncio
import gzip

import pytest
from h2.settings import SettingCodes

from sapwood_common.errors import ResourceExhaustedError, UnauthenticatedError
from sapwood_common.tenants.tenant import Tenant, TenantSettings
from sapwood_net.http2.server.connection import MOST_STREAMS, MOST_UNKNOWN_STREAMS
from sapwood_net.http2.server.limits.frame_rates import REFUSED, RULES
from sapwood_net.http2.server.limits.lifetime import Timeouts
from sapwood_net.http2.server.limits.shared import MOST_UNKNOWN, SharedLimits
from sapwood_net.http2.server.stream import WINDOW
from sapwood_net.http2.server.waiting_line import Rank
from sapwood_net.http2.wire import frames
from sapwood_net.pacing.body_memory import BodyMemory
from sapwood_net.pacing.tarpit import Tarpit
from sapwood_net.pacing.time_share import TimeShare

HALF = frames.frame(frames.DATA, 0, 1, b"\0" + (1 << 20).to_bytes(4, "big") + bytes(1000))


class KeyGate:
    """Wants ``authorization: key``; lets everybody call Tell."""

    asks_for_keys = True

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.tenants = {name: Tenant(TenantSettings(name), lambda: 0.0) for name in ("key", "slow")}

    def let_in(self, method, headers):
        self.asked.append(method)
        key = dict(headers).get(b"authorization", b"").decode()
        if key == "slow":
            raise ResourceExhaustedError("too many", retry_after=3.0)
        if key not in self.tenants and not method.endswith("/Tell"):
            raise UnauthenticatedError("a key is needed")
        return self.tenants.get(key)

    def rank(self, headers, tenant):
        return Rank(caller=None if tenant is None else tenant.name, stranger=tenant is None)


@pytest.fixture
async def running(serve):
    async with serve(gate=KeyGate()) as started:
        yield started


async def test_who_has_no_key_is_told_so_before_his_message_is_here(running, request_block) -> None:
    client = await running.connect()
    client.send(frames.header_frames(1, request_block("Echo"), frames.USUAL_FRAME) + HALF)
    trailers = await client.status(1)
    assert trailers["grpc-status"] == "16"
    assert trailers["grpc-message"] == "a key is needed"
    assert (await client.until(frames.RST_STREAM))[3] == bytes(4)
    client.send(HALF * 100)  # messages that were on their way are passed over
    await client.ping()
    assert running.busy_connections() == []
    assert running.service.started == []


async def test_a_message_without_a_key_is_not_unfolded(running, request_block, grpc_message, monkeypatch) -> None:
    unfolded: list[bytes] = []
    monkeypatch.setattr("zlib.decompressobj", lambda *_: unfolded.append(b"") or 1 / 0)
    client = await running.connect()
    body = grpc_message(gzip.compress(bytes(1 << 20)), compressed=True)
    client.send(
        frames.header_frames(1, request_block("Echo", ("grpc-encoding", "gzip")), frames.USUAL_FRAME)
        + frames.frame(frames.DATA, frames.END_STREAM, 1, body)
    )
    assert (await client.status(1))["grpc-status"] == "16"
    assert unfolded == []


async def test_a_client_that_asks_too_often_is_told_when_to_come_again(running, request_block) -> None:
    client = await running.connect()
    headers = frames.header_frames(1, request_block("Echo", ("authorization", "slow")), frames.USUAL_FRAME)
    client.send(headers)
    trailers = await client.status(1)
    assert trailers["grpc-status"] == "8"
    assert "grpc-status-details-bin" in trailers
    block = request_block("Echo", ("authorization", "slow"))
    many = RULES[REFUSED].burst + 1000  # so many refusals do not end the calls that run meanwhile
    client.send(b"".join(frames.header_frames(2 * n + 3, block, frames.USUAL_FRAME, end=True) for n in range(many)))
    assert (await client.status(2 * many + 1))["grpc-status"] == "8"
    await client.ping()


@pytest.mark.parametrize("kind", ["no key", "no method", "no POST", "no gRPC"])
async def test_who_is_refused_again_and_again_loses_the_connection(running, request_block, kind) -> None:
    block = {
        "no key": request_block("Echo"),
        "no method": request_block("Nothing", ("authorization", "key")),
        "no POST": request_block("Echo").replace(b"POST", b"HEAD"),
        "no gRPC": request_block("Echo").replace(b"application/grpc", b"application/json"),
    }[kind]
    client = await running.connect()
    many = RULES[REFUSED].burst + 500
    client.send(b"".join(frames.header_frames(2 * n + 1, block, frames.USUAL_FRAME, end=True) for n in range(many)))
    payload = (await client.until(frames.GOAWAY))[3]
    assert RULES[REFUSED].name.encode() in payload
    await client.closed()
    other = await running.connect()
    await other.ping()


async def test_a_client_has_few_streams_until_it_has_shown_a_key(running, request_block, grpc_message) -> None:
    client = await running.connect()
    settings = dict(frames.parse_settings((await client.until(frames.SETTINGS))[3]))
    assert settings[SettingCodes.MAX_CONCURRENT_STREAMS] == MOST_UNKNOWN_STREAMS < 100
    tell = request_block("Tell")
    for number in range(MOST_UNKNOWN_STREAMS + 1):
        client.send(frames.header_frames(2 * number + 1, tell, frames.USUAL_FRAME))
    refused = await client.until(frames.RST_STREAM)
    assert refused[2] == 2 * MOST_UNKNOWN_STREAMS + 1
    client.send(frames.reset(1, 8))
    keyed = request_block("Wait", ("authorization", "key"))
    client.send(frames.header_frames(201, keyed, frames.USUAL_FRAME))
    settings = dict(frames.parse_settings((await client.until(frames.SETTINGS))[3]))
    assert settings == {SettingCodes.MAX_CONCURRENT_STREAMS: MOST_STREAMS}
    body = frames.frame(frames.DATA, frames.END_STREAM, 0, grpc_message(b"x"))
    for stream in range(203, 803, 2):
        data = body[:5] + stream.to_bytes(4, "big") + body[9:]
        client.send(frames.header_frames(stream, keyed, frames.USUAL_FRAME) + data)
    await client.ping()
    running.service.release.set()
    ended: set[int] = set()
    while len(ended) < 300:
        kind, flags, stream, payload = await client.frame()
        assert kind != frames.RST_STREAM
        if kind == frames.HEADERS and flags & frames.END_STREAM:
            assert (b"grpc-status", b"0") in client.decoder.decode(payload, raw=True)
            ended.add(stream)


async def test_a_call_that_needs_no_key_has_a_small_message(running, request_block, grpc_message) -> None:
    client = await running.connect()
    client.send(
        frames.header_frames(1, request_block("Tell"), frames.USUAL_FRAME)
        + frames.frame(frames.DATA, 0, 1, b"\0" + (1 << 17).to_bytes(4, "big"))
    )
    assert (await client.status(1))["grpc-status"] == "8"
    keyed = request_block("Echo", ("authorization", "key"))
    client.send(frames.header_frames(3, keyed, frames.USUAL_FRAME))
    body = grpc_message(b"x" * (1 << 17))
    for at in range(0, len(body), 16_384):
        client.send(frames.frame(frames.DATA, 0, 3, body[at : at + 16_384]))
    client.send(frames.frame(frames.DATA, frames.END_STREAM, 3) + frames.window_update(0, 1 << 20))
    client.send(frames.window_update(3, 1 << 20))
    assert (await client.status(3))["grpc-status"] == "0"


async def test_each_connection_without_a_key_begins_its_calls_in_turn_with_others(
    running, request_block, grpc_message
) -> None:
    """A thousand calls of one do not hold up the one call of another."""
    crowd, other = await running.connect(), await running.connect()
    body = frames.frame(frames.DATA, frames.END_STREAM, 0, grpc_message(b"x"))

    def call(stream: int) -> bytes:
        data = body[:5] + stream.to_bytes(4, "big") + body[9:]
        return frames.header_frames(stream, request_block("Tell"), frames.USUAL_FRAME) + data

    await crowd.ping()
    await other.ping()
    crowd.send(b"".join(call(2 * number + 1) for number in range(MOST_UNKNOWN_STREAMS)))
    other.send(call(1))
    first, second = (
        asyncio.create_task(crowd.status(2 * MOST_UNKNOWN_STREAMS - 1)),
        asyncio.create_task(other.status(1)),
    )
    await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
    assert second.done()
    await first


async def test_a_call_without_a_key_waits_for_none_of_those_who_come_after_it_with_many(
    running, request_block, grpc_message
) -> None:
    tell = request_block("Tell")
    body = frames.frame(frames.DATA, frames.END_STREAM, 0, grpc_message(b"x"))

    def call(stream: int) -> bytes:
        return frames.header_frames(stream, tell, frames.USUAL_FRAME) + body[:5] + stream.to_bytes(4, "big") + body[9:]

    clients = [await running.connect() for _ in range(40)]
    other, last = clients[20], clients[-1]
    let_go = running.keep_waiting()
    for client in clients:
        count = 1 if client is other else MOST_UNKNOWN_STREAMS
        client.send(b"".join(call(2 * number + 1) for number in range(count)))
        await client.ping()
    let_go()
    answers = [asyncio.create_task(client.status(1)) for client in (other, last)]
    await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
    assert answers[0].done()
    await asyncio.gather(*answers)


async def test_a_stranger_who_breaks_a_rule_is_informed_and_held_until_the_end(serve, request_block) -> None:
    async with serve(gate=KeyGate(), timeouts=Timeouts(held=3600.0)) as running:
        client = await running.connect()
        client.send(
            b"".join(frames.header_frames(number, request_block("Echo"), 16384) for number in range(1, 1000, 2))
        )
        goodbye = await client.until(frames.GOAWAY)
        assert RULES[REFUSED].name in goodbye[3][8:].decode()
        other = await running.connect(greet=False)
        other.send(b"GET / HTTP/1.1\r\n\r\n")
        assert b"HTTP/1.1 400" in await other.reader.readuntil(b"\n")
        assert not running.server.connections
        assert not client.reader.at_eof()
        assert not other.reader.at_eof()
        await running.server.stop(0)
        for each in (client, other):
            await each.closed()


@pytest.mark.parametrize("key", [(), (("authorization", "key"),)], ids=["stranger", "known"])
async def test_what_a_stranger_has_too_much_of_shares_the_strangers_time(make_wire, request_block, key) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    shared = SharedLimits(BodyMemory(1 << 30), TimeShare(clock), strangers=TimeShare(clock), tarpit=Tarpit(0))
    wire = make_wire(shared=shared, stranger=True, greet=False)
    wire.send(frames.PREFACE + frames.settings(()))
    wire.open(1)
    if key:
        wire.connection.know()
    wire.send(frames.header_frames(3, request_block(), 16384) * 1 + frames.frame(frames.DATA, 0, 3, bytes(64)) * 100)
    assert (shared.time.waiting, shared.strangers.waiting) == ((1, 0) if key else (0, 1))
    held = WINDOW if not key else (1 << 29)
    assert wire.connection._messages.most == held
    wire.connection.connection_lost(None)


async def test_calls_of_all_strangers_have_a_common_bound_until_a_key_is_shown(running, request_block) -> None:
    shared = running.server._shared
    clients = [await running.connect() for _ in range(MOST_UNKNOWN // MOST_UNKNOWN_STREAMS + 1)]
    tell, keyed = request_block("Tell"), request_block("Tell", ("authorization", "key"))
    for client in clients:
        client.send(
            b"".join(
                frames.header_frames(2 * number + 1, tell, frames.USUAL_FRAME) for number in range(MOST_UNKNOWN_STREAMS)
            )
        )
        await client.ping()
    late = await running.connect()
    late.send(b"".join(frames.header_frames(stream, tell, frames.USUAL_FRAME) for stream in (1, 3)))
    await late.ping()  # the late connection has its part of the calls
    assert shared.strangers_calls.open < MOST_UNKNOWN + MOST_UNKNOWN_STREAMS
    assert shared.calls.open == 0
    before = shared.strangers_calls.open
    late.send(frames.header_frames(5, keyed, frames.USUAL_FRAME))
    await late.ping()
    assert (shared.strangers_calls.open, shared.calls.open) == (before - 2, 3)
    for client in (*clients, late):
        client.writer.transport.abort()
    async with asyncio.timeout(10):
        while shared.strangers_calls.open or shared.calls.open:
            await asyncio.sleep(0.01)


async def test_of_a_stranger_a_window_of_messages_is_held_and_no_more(make_wire) -> None:
    """Small messages take more bytes in memory than on the wire."""
    many = frames.frame(frames.DATA, 0, 1, b"\0\0\0\0\0" * 1000) * 20
    wire = make_wire(stranger=True)
    call = wire.open(1)
    wire.send(many)
    assert isinstance(call.overload, ResourceExhaustedError)
    assert wire.connection._messages.total <= WINDOW
    wire = make_wire()
    call = wire.open(1)
    wire.send(many)
    assert call.overload is None
