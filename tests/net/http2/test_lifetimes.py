"""Connections on which nothing happens end: those that do not greet, do not answer, do not read, or have no calls."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys

import grpc
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from sapwood_net.http2.server import server
from sapwood_net.http2.server.limits.lifetime import Due, Lifetime, Timeouts
from sapwood_net.http2.wire import frames

TIMES = Timeouts(greeting=10, silence=20, idle=100, flush=5)
NEVER = 1e6
ECHO = "/test.Test/Echo"


class Life:
    """A lifetime looked at every second."""

    def __init__(self) -> None:
        self.lifetime = Lifetime(TIMES)
        self.seconds = itertools.count(1000)
        self.state = {"greeted": True, "busy": False, "last_stream": 0, "closing": False}

    def look(self, **state: object) -> Due:
        self.state |= state
        return self.lifetime.check(next(self.seconds), **self.state)

    def until_due(self, **state: object) -> tuple[int, Due]:
        """How many seconds pass until something is due, and what is due then."""
        for seconds in range(1000):
            due = self.look(**state)
            if due is not Due.NOTHING:
                return seconds, due
        return 1000, Due.NOTHING


def test_who_does_not_greet_is_given_up_whatever_he_sends() -> None:
    life = Life()
    for _ in range(10):
        life.lifetime.heard = True
        assert life.look(greeted=False) is Due.NOTHING
    assert life.until_due() == (0, Due.GIVE_UP)


def test_who_says_nothing_is_pinged_and_given_up_if_he_does_not_answer() -> None:
    for busy in (False, True):
        life = Life()
        assert life.until_due(busy=busy) == (20, Due.PING)
        assert life.until_due() == (19, Due.GIVE_UP)


def test_who_answers_lives_as_long_as_he_has_calls() -> None:
    life = Life()
    for _ in range(50):
        assert life.until_due(busy=True)[1] is Due.PING
        life.lifetime.heard = True


def test_who_has_had_no_calls_has_to_go() -> None:
    life, dues = Life(), []
    for _ in range(101):
        life.lifetime.heard = True
        dues.append(life.look())
    assert set(dues[:-1]) == {Due.NOTHING}
    assert dues[-1] is Due.RETIRE
    assert life.lifetime.retired
    assert life.until_due() == (19, Due.GIVE_UP)


def test_calls_between_two_looks_count() -> None:
    life = Life()
    for stream in range(1, 2001, 2):
        life.lifetime.heard = True
        assert life.look(last_stream=stream) is Due.NOTHING
        assert life.look() is Due.NOTHING


def test_who_is_told_to_go_has_its_calls_yet_and_no_say_in_staying() -> None:
    life = Life()
    for _ in range(101):
        life.lifetime.heard = True
        life.look()
    for _ in range(500):  # a call that was on its way
        life.lifetime.heard = True
        assert life.look(busy=True) is Due.NOTHING
    seconds = 0
    while life.look(busy=False) is not Due.GIVE_UP:
        life.lifetime.heard = True
        seconds += 1
    assert seconds == 119


def test_who_does_not_take_what_is_on_its_way_when_it_closes_is_given_up() -> None:
    life = Life()
    life.look()
    assert life.until_due(closing=True) == (5, Due.GIVE_UP)


async def test_an_idle_channel_is_told_to_go_and_calls_again_as_if_nothing_had_been(serve, until) -> None:
    async with serve(timeouts=Timeouts(idle=0.05)) as running, grpc.aio.insecure_channel(running.address) as channel:
        for _ in range(3):
            assert await channel.unary_unary(ECHO)(b"a") == b"a"
            await until(lambda: not running.server.connections)


async def test_a_call_on_its_way_when_the_client_is_told_to_go_is_answered(
    running, request_block, grpc_message
) -> None:
    client = await running.connect()
    await client.ping()
    (connection,) = running.server.connections
    connection.check(0.0)
    connection.check(NEVER)
    goodbye, ping = await client.until(frames.GOAWAY), await client.until(frames.PING)
    assert goodbye[3] == frames.LAST_STREAM.to_bytes(4, "big") + bytes(4)
    block = frames.header_frames(1, request_block(), frames.USUAL_FRAME)
    client.send(block + frames.frame(frames.DATA, frames.END_STREAM, 1, grpc_message(b"x")))
    client.send(frames.frame(frames.PING, frames.ACK, 0, ping[3]))
    client.send(frames.header_frames(3, request_block(), frames.USUAL_FRAME))  # after the end was announced: refused
    assert (await client.until(frames.GOAWAY))[3] == (1).to_bytes(4, "big") + bytes(4)
    assert (await client.until(frames.RST_STREAM, 3))[3] == ErrorCodes.REFUSED_STREAM.to_bytes(4, "big")
    assert (await client.status(1))["grpc-status"] == "0"
    await client.closed()
    client.writer.close()


async def test_who_does_not_greet_is_closed(serve) -> None:
    async with serve(timeouts=Timeouts(greeting=0.02)) as running:
        for sent in (b"", frames.PREFACE[:20], frames.PREFACE, frames.PREFACE + frames.settings(())[:8]):
            client = await running.connect(greet=False)
            client.send(sent)
            await client.closed()
            client.writer.close()


async def test_who_says_nothing_and_answers_no_pings_is_closed_and_its_calls_end(serve, request_block, until) -> None:
    async with serve(timeouts=Timeouts(silence=0.05)) as running:
        mute = await running.connect()
        mute.send(frames.header_frames(1, request_block("Listen"), frames.USUAL_FRAME))
        await mute.until(frames.HEADERS, 1)
        await mute.closed()
        await until(lambda: running.service.finished == ["Listen"])
        mute.writer.close()


async def test_who_does_not_read_its_last_answers_is_closed(serve, request_block, grpc_message, until) -> None:
    async with serve(64 << 20, timeouts=Timeouts(flush=0.05)) as running:
        client = await running.connect()
        client.writer.transport.pause_reading()
        client.send(frames.settings([(SettingCodes.INITIAL_WINDOW_SIZE, 1 << 30)]) + frames.window_update(0, 1 << 30))
        client.send(frames.header_frames(1, request_block("Flood"), frames.USUAL_FRAME))
        client.send(frames.frame(frames.DATA, frames.END_STREAM, 1, grpc_message(b"")))
        await until(lambda: running.server.connections)
        (connection,) = running.server.connections
        await until(lambda: not connection.writable)
        connection.close_gently()
        client.send(frames.reset(1, ErrorCodes.CANCEL))
        await until(lambda: not running.server.connections)
        client.writer.transport.abort()


async def test_a_half_closed_socket_is_closed(running) -> None:
    client = await running.connect()
    await client.ping()
    client.writer.write_eof()
    await client.closed()
    client.writer.close()


CLIENT = """
import socket, sys
from sapwood_net.http2.wire import frames
client = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
client.sendall(bytes.fromhex(sys.argv[2]))
print("sent", flush=True)
while client.recv(65536):
    pass
"""


async def test_a_client_that_is_stopped_is_given_up(running, request_block, grpc_message, until) -> None:
    data = frames.PREFACE + frames.settings(()) + frames.header_frames(1, request_block("Wait"), 16_384)
    data += frames.frame(frames.DATA, frames.END_STREAM, 1, grpc_message(b""))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, str(running.port), data.hex(), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"sent\n"
    await until(lambda: running.service.started == ["Wait"])
    os.kill(process.pid, signal.SIGSTOP)
    try:
        (connection,) = running.busy_connections()
        for now in (0.0, 100.0, 200.0):
            connection.check(now)
        await until(lambda: running.service.finished == ["Wait"])
        await until(lambda: running.service.called_back == 1)
    finally:
        process.kill()
        await process.wait()


async def test_of_too_many_connections_the_oldest_without_calls_makes_room(
    serve, request_block, grpc_message, until, monkeypatch
) -> None:
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 3)
    async with serve() as running:
        busy = await running.connect()
        busy.send(frames.header_frames(1, request_block("Wait"), frames.USUAL_FRAME))
        busy.send(frames.frame(frames.DATA, frames.END_STREAM, 1, grpc_message(b"")))
        await until(lambda: running.service.started == ["Wait"])
        idle = [await running.connect() for _ in range(3)]
        for client in idle[1:]:
            await client.ping()
        await idle[0].closed()
        running.service.release.set()
        assert (await busy.status(1))["grpc-status"] == "0"
