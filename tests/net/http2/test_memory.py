"""What clients send in part, or much of, has a bound, for each and for all; anybody who sends little is never refused for it."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Hashable

import pytest
from h2.errors import ErrorCodes

from sapwood_common.errors import ResourceExhaustedError
from sapwood_net.http2.server import flow_control
from sapwood_net.http2.server.limits.frame_rates import OVERLOAD, RULES
from sapwood_net.http2.server.limits.shared import LEAST, StreamTotal, Unfoldings
from sapwood_net.http2.wire import encoding, frames
from sapwood_net.pacing.body_memory import BodyMemory
from sapwood_net.pacing.heavy_work import HeavyWork
from sapwood_net.pacing.time_share import TimeShare

KB, MB = 1024, 1024 * 1024


def send_part(wire, stream: int, size: int, of: int = 8 * MB, *, begin: bool = True) -> None:
    """Sends ``size`` bytes of a message of ``of`` bytes; with ``begin`` its head as well."""
    body = (b"\0" + of.to_bytes(4, "big") if begin else b"") + bytes(size)
    for at in range(0, len(body), frames.USUAL_FRAME):
        wire.send(frames.frame(frames.DATA, 0, stream, body[at : at + frames.USUAL_FRAME]))


async def test_half_messages_have_a_bound_and_the_largest_goes(make_wire) -> None:
    memory = BodyMemory(4 * MB)
    wire = make_wire(MB, memory=memory)
    calls = {}
    for stream in range(1, 121, 2):
        calls[stream] = wire.open(stream)
        send_part(wire, stream, 500 * KB if stream == 1 else 200 * KB, MB)
        assert memory.held <= memory.most
    assert isinstance(calls[1].overload, ResourceExhaustedError)
    assert calls[1].overload.retry_after
    left = [call for call in calls.values() if call.overload is None]
    assert 5 <= len(left) <= 10  # one connection may hold half of all memory
    wire.connection.connection_lost(None)
    assert memory.held == 0


async def test_of_all_connections_the_one_that_holds_most_gives_way(make_wire) -> None:
    memory = BodyMemory(4 * MB)
    greedy = [make_wire(8 * MB, memory=memory) for _ in range(4)]
    for wire in greedy:
        for stream in range(1, 9, 2):
            wire.open(stream)
            send_part(wire, stream, 400 * KB)
    modest = make_wire(8 * MB, memory=memory)
    call = modest.open(1)
    send_part(modest, 1, 400 * KB, 500 * KB)
    send_part(modest, 1, 100 * KB, begin=False)
    assert call.overload is None
    assert len(call.messages) == 1
    assert memory.held <= memory.most
    given_way = [call for wire in greedy for call in wire.calls.values() if call.overload is not None]
    assert len(given_way) >= 7
    for wire in (*greedy, modest):
        wire.connection.connection_lost(None)
    assert memory.held == 0


async def test_who_holds_the_most_too_often_is_told_and_held(make_wire) -> None:
    """To refuse thousands of calls a second would cost others as much as to serve them."""
    memory = BodyMemory(4 * MB)
    greedy, modest = make_wire(8 * MB, memory=memory), make_wire(8 * MB, memory=memory)
    most = RULES[OVERLOAD].burst
    call = modest.open(1)
    send_part(modest, 1, 400 * KB, 500 * KB)
    for stream in range(1, 2 * most + 100, 2):
        greedy.open(stream)
        send_part(greedy, stream, 500 * KB)
    assert sum(call.overload is not None for call in greedy.calls.values()) > most
    await asyncio.sleep(0)
    assert greedy.connection.idle
    assert RULES[OVERLOAD].name.encode() in bytes(greedy.transport.written)
    assert call.overload is None
    modest.connection.connection_lost(None)
    assert memory.held == 0


async def test_what_is_small_is_not_counted(make_wire) -> None:
    memory = BodyMemory(1)
    wire = make_wire(memory=memory)
    for stream in range(1, 201, 2):
        call = wire.open(stream)
        send_part(wire, stream, 3 * KB, 4 * KB)
        assert call.overload is None
    assert memory.held == 0


async def test_messages_without_content_count_as_what_they_take(make_wire, grpc_message) -> None:
    """Two hundred thousand such messages fit into a window of a megabyte."""
    memory = BodyMemory(4 * MB)
    wire = make_wire(memory=memory)
    call = wire.open(1)
    data = frames.frame(frames.DATA, 0, 1, grpc_message(b"") * 3000)
    for _ in range(60):
        if call.overload is not None:
            break
        wire.send(data)
    assert call.overload is not None
    assert len(call.messages) < 50_000


async def test_answers_that_a_client_does_not_take_count(make_wire) -> None:
    memory = BodyMemory(4 * MB)
    wire = make_wire(memory=memory)
    wire.send(frames.settings([(4, 0)]))
    calls = [wire.open(stream) for stream in range(1, 41, 2)]
    for call in calls:
        call.stream.write(bytes(200 * KB))
    assert memory.held <= memory.most
    ended = [call for call in calls if call.overload is not None]
    assert 8 <= len(ended) < len(calls)
    wire.send(frames.settings([(4, 1 << 20)]) + frames.window_update(0, 1 << 25))
    for call in calls:
        call.stream.finish(frames.literal(b"grpc-status", b"0"))
    while wire.connection.go_on(float("inf")):
        pass
    assert wire.connection.idle
    assert memory.held == 0


@pytest.mark.parametrize("holds", ["its window", "the connection's window", "the socket"])
async def test_calls_whose_client_reads_nothing_count_after_a_while_and_have_a_bound(
    make_wire, monkeypatch: pytest.MonkeyPatch, holds: str
) -> None:
    """Each call counts for all that works for it, however little it was sent."""
    now = [0.0]
    monkeypatch.setattr(flow_control.time, "monotonic", lambda: now[0])
    memory = BodyMemory(MB // 2)
    wire = make_wire(memory=memory)
    if holds == "its window":
        wire.send(frames.settings([(4, 0)]))
    elif holds == "the connection's window":
        wire.open(9999).stream.write(bytes(65_530))

    async def answer(streams: range) -> list[asyncio.Task[None]]:
        tasks = []
        for number in streams:
            stream = wire.open(number).stream
            if holds == "the socket":
                wire.connection.pause_writing()
            stream.write(b"a token")
            tasks.append(asyncio.ensure_future(stream.drained()))
            await asyncio.sleep(0)
            if holds == "the socket":
                wire.connection._flow.paused = False  # or no call begins
        wire.connection._flow.paused = holds == "the socket"
        return tasks

    waiting = await answer(range(10_001, 10_101, 2))
    assert memory.held == 0  # a client may be a moment late
    now[0] += 2.0
    waiting += await answer(range(10_101, 10_201, 2))
    ended = sum(call.overload is not None for call in wire.calls.values())
    assert 10 <= ended < 50
    assert 0 < memory.held <= memory.most
    now[0] += 0.5
    wire.connection.resume_writing()
    wire.send(frames.settings([(4, 1 << 20)]) + frames.window_update(0, 1 << 25))
    while wire.connection.go_on(float("inf")):
        pass
    await asyncio.gather(*waiting)
    assert memory.held == 0


async def test_a_large_message_counts_until_its_call_is_over(serve, request_block, grpc_message, until) -> None:
    memory = BodyMemory(8 * MB)
    async with serve(4 * MB, memory=memory) as running:
        client = await running.connect()
        body = grpc_message(bytes(MB))
        client.send(frames.header_frames(1, request_block("Wait"), frames.USUAL_FRAME))
        for at in range(0, len(body), frames.USUAL_FRAME):
            client.send(frames.frame(frames.DATA, 0, 1, body[at : at + frames.USUAL_FRAME]))
        client.send(frames.frame(frames.DATA, frames.END_STREAM, 1))
        await until(lambda: "Wait" in running.service.started)
        assert MB <= memory.held < 1.2 * MB
        client.send(frames.reset(1, 8))
        await until(lambda: memory.held == 0)


async def test_messages_that_wait_to_be_parsed_count_and_then_no_more(
    serve, request_block, grpc_message, until
) -> None:
    """Messages are parsed one at a time, because each may have thousands of fields."""
    memory, may_go_on, waiting = BodyMemory(8 * MB), asyncio.Event(), []

    class Turns(HeavyWork):
        async def turn(self, caller: Hashable = None, *, goes_on: bool = False) -> None:
            waiting.append(caller)
            await may_go_on.wait()

    async with serve(4 * MB, memory=memory) as running:
        running.server._shared.heavy = Turns()
        client = await running.connect()
        body = grpc_message(bytes(20 * KB))
        for stream in range(1, 41, 2):
            client.send(frames.header_frames(stream, request_block("Wait"), frames.USUAL_FRAME))
            client.send(frames.frame(frames.DATA, 0, stream, body[: frames.USUAL_FRAME]))
            client.send(frames.frame(frames.DATA, frames.END_STREAM, stream, body[frames.USUAL_FRAME :]))
        await until(lambda: len(waiting) == 20)
        assert memory.held == 20 * (20 + 8) * KB  # a message of 20 KB and 8 KB for its call
        assert "Wait" not in running.service.started
        may_go_on.set()
        await until(lambda: "Wait" in running.service.started and memory.held == 0)


async def test_a_message_that_unfolds_to_more_than_fits_ends_its_call_in_steps(
    serve, request_block, grpc_message
) -> None:
    """Other calls are answered between the steps."""
    memory = BodyMemory(4 * MB)
    async with serve(32 * MB, memory=memory) as running:
        client, other = await running.connect(), await running.connect()
        await other.ping()
        bomb = grpc_message(gzip.compress(bytes(31 * MB)), compressed=True)
        client.send(frames.header_frames(1, request_block("Echo", ("grpc-encoding", "gzip")), frames.USUAL_FRAME))
        for at in range(0, len(bomb), frames.USUAL_FRAME):
            client.send(frames.frame(frames.DATA, 0, 1, bomb[at : at + frames.USUAL_FRAME]))
        client.send(frames.frame(frames.DATA, frames.END_STREAM, 1))
        status = asyncio.create_task(client.status(1))
        pings = 0
        while not status.done() and pings < 500:  # the server would refuse twice as many pings
            await other.ping()
            pings += 1
        trailers = await status
        assert trailers["grpc-status"] == "8"
        assert "grpc-status-details-bin" in trailers
        assert pings > 3
        assert memory.held == 0


async def test_a_large_message_that_fits_is_unfolded_whole(serve, request_block, grpc_message) -> None:
    async with serve(4 * MB) as running:
        client = await running.connect()
        packed = grpc_message(gzip.compress(b"\5" + bytes(3 * MB)), compressed=True)
        client.send(frames.settings([(4, 1 << 25)]) + frames.window_update(0, 1 << 25))
        client.send(frames.header_frames(1, request_block("Repeat", ("grpc-encoding", "gzip")), frames.USUAL_FRAME))
        client.send(frames.frame(frames.DATA, frames.END_STREAM, 1, packed))
        got = 0
        while True:
            kind, flags, _, payload = await client.frame()
            if kind == frames.DATA:
                got += len(payload)
            elif kind == frames.HEADERS and flags & frames.END_STREAM:
                break
        assert got == 5 * (3 * MB + 1 + 5)


async def test_a_unary_call_has_one_request(serve, request_block, grpc_message) -> None:
    async with serve() as running:
        client = await running.connect()
        client.send(frames.header_frames(1, request_block("Wait"), frames.USUAL_FRAME))
        client.send(frames.frame(frames.DATA, 0, 1, grpc_message(b"first")))
        for _ in range(2000):
            client.send(frames.frame(frames.DATA, 0, 1, grpc_message(b"other") * 100))
        await client.ping()  # no byte of them is kept: the server has given the window back
        running.service.release.set()
        assert (await client.until(frames.DATA))[3] == grpc_message(b"first")


async def test_calls_of_all_connections_have_a_bound_of_which_each_has_a_part(make_wire, request_block) -> None:
    total = StreamTotal(40)
    total.connections = 4
    wires = [make_wire(total=total) for _ in range(4)]
    for stream in range(1, 81, 2):
        wires[0].open(stream)
    assert total.open == 40
    wires[0].send(frames.header_frames(81, request_block(), frames.USUAL_FRAME))
    refused = frames.reset(81, ErrorCodes.REFUSED_STREAM)
    assert bytes(wires[0].transport.written).endswith(refused)
    for stream in range(1, 21, 2):  # the client that came first has not taken the places of others
        wires[1].open(stream)
    wires[1].send(frames.header_frames(21, request_block(), frames.USUAL_FRAME))
    assert 21 not in wires[1].calls
    total.connections = 1000
    for stream in range(1, 2 * LEAST, 2):
        wires[2].open(stream)
    for wire in wires:
        wire.connection.connection_lost(None)
        while wire.connection.go_on(float("inf")):
            pass
    assert total.open == 0


async def test_however_many_messages_unfold_one_does_at_a_time_and_each_callers_in_turn() -> None:
    share = TimeShare()
    unfoldings, packed = Unfoldings(share), gzip.compress(bytes(2 * MB))
    unfolders: list[encoding.Unfolder] = []

    async def unfold(caller: str) -> bytes:
        unfolders.append(encoding.Unfolder(b"gzip", packed, 8 * MB))
        return await unfoldings.unfold(caller, unfolders[-1], lambda size: None)

    greedy = [asyncio.create_task(unfold("greedy")) for _ in range(20)]
    await asyncio.sleep(0)
    modest = asyncio.create_task(unfold("modest"))
    await asyncio.sleep(0)
    assert share.waiting == 1
    greedy[1].cancel()
    assert await modest == bytes(2 * MB)
    assert sum(unfolder.size > 0 for unfolder in unfolders[:20]) <= 3
    gone = greedy.pop()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    waiting = [work.unfolder for works in unfoldings._waiting.values() for work in works]
    assert waiting and unfolders[1] not in waiting and unfolders[19] not in waiting
    for task in greedy[2:]:
        assert len(await task) == 2 * MB
    assert share.waiting == 0


def test_a_message_that_waits_has_nothing_that_unfolds_it(monkeypatch) -> None:
    made, make = [], zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", lambda bits: made.append(bits) or make(bits))
    packed = gzip.compress(b"a" * 100)
    waiting = [encoding.Unfolder(b"gzip", packed, 1000) for _ in range(10)]
    assert not made
    assert waiting[0].step() == b"a" * 100
    assert len(made) == 1


async def test_of_many_messages_of_one_client_one_is_half_unfolded(
    serve, request_block, grpc_message, monkeypatch
) -> None:
    step, half, most = encoding.Unfolder.step, set(), 0

    def counted(unfolder: encoding.Unfolder) -> bytes | None:
        nonlocal most
        half.add(unfolder)
        if (whole := step(unfolder)) is not None:
            half.discard(unfolder)
        most = max(most, len(half))
        return whole

    monkeypatch.setattr(encoding.Unfolder, "step", counted)
    body = grpc_message(gzip.compress(bytes(MB // 8)), compressed=True)
    block = request_block("Crash", ("grpc-encoding", "gzip"))
    async with serve(2 * MB) as running:
        client = await running.connect()
        for stream in range(1, 41, 2):
            client.send(frames.header_frames(stream, block, frames.USUAL_FRAME))
            client.send(frames.frame(frames.DATA, frames.END_STREAM, stream, body))
        for stream in range(1, 41, 2):
            assert (await client.status(stream))["grpc-status"] == "2"
    assert most == 1
