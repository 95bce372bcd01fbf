"""Hosts of a group know each other by their key, and strangers learn nothing and keep nobody waiting."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sapwood_common.errors import ConfigError
from sapwood_common.network import keyed_ways
from sapwood_common.network.keyed_ways import (
    Purpose,
    StrangerError,
    Strangers,
    accept,
    connect,
    derive,
    greet,
    introduce,
    listen,
    read_key,
)

KEY = derive(b"secret", "test")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1") as found:
        yield found


def at(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_ranks_come_in_any_order_past_silent_slow_and_wrong_strangers(listener: socket.socket) -> None:
    with contextlib.ExitStack() as strangers, ThreadPoolExecutor(4) as pool:
        accepted = pool.submit(accept, listener, KEY, range(1, 4), 60.0)
        for said in (b"", b"\0", b"x" * 500, b"GET / HTTP/1.1\r\n\r\n") * 20:
            stranger = strangers.enter_context(socket.create_connection(listener.getsockname()))
            stranger.sendall(said)
        with pytest.raises(ConfigError, match="does not know the key"):
            connect(at(listener), derive(b"other", "test"), 1)
        ways = dict(zip((3, 1, 2), pool.map(lambda rank: connect(at(listener), KEY, rank), (3, 1, 2)), strict=True))
        for rank, way in zip((1, 2, 3), accepted.result(timeout=60), strict=True):
            ways[rank].send_bytes(b"%d" % rank)
            assert way.recv_bytes() == b"%d" % rank
            way.send_bytes(b"back")
            assert ways[rank].recv_bytes() == b"back"


def test_what_is_said_once_opens_no_second_connection(listener: socket.socket) -> None:
    with ThreadPoolExecutor(1) as pool, listen("127.0.0.1") as tap:
        heard: list[bytes] = []

        def overhear() -> None:
            theirs, _ = tap.accept()
            with theirs, socket.create_connection(listener.getsockname()) as there:
                theirs.sendall(there.recv(32))
                heard.append(theirs.recv(4096))
                there.sendall(heard[0])
                theirs.sendall(there.recv(4096))

        thread = threading.Thread(target=overhear)
        thread.start()
        accepted = pool.submit(accept, listener, KEY, [1, 2], 2.0)
        connect(at(tap), KEY, 1).close()
        thread.join()
        assert KEY not in heard[0]
        with socket.create_connection(listener.getsockname()) as again:
            again.recv(32)
            again.sendall(heard[0])
            assert again.recv(4096) == bytes(32)
        with pytest.raises(ConfigError, match="rank 2 did not come within 2 s"):
            accepted.result(timeout=60)


def test_a_rank_or_a_kind_that_is_not_expected_is_closed(listener: socket.socket) -> None:
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept, listener, KEY, [1], 60.0)
        with pytest.raises(EOFError):
            connect(at(listener), KEY, 7).recv_bytes()
        connect(at(listener), KEY, 1)
        assert len(accepted.result(timeout=60)) == 1


async def test_both_ends_of_streams_show_the_key_and_a_listener_without_it_is_refused() -> None:
    found: list[Purpose] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(StrangerError):
            found.append(await greet(reader, writer, KEY))
        writer.close()

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(32))
        await reader.readexactly(72)
        writer.write(b"z" * 32)

    for handler, key, refused in ((serve, KEY, False), (serve, b"other", True), (lie, KEY, True)):
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        with pytest.raises(StrangerError) if refused else contextlib.nullcontext():
            await introduce(reader, writer, key, Purpose(b"link", 3))
        writer.close()
        server.close()
    assert found == [Purpose(b"link", 3)]


async def test_silence_is_ended_and_an_end_is_told_apart_from_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_ways, "HELLO_SECONDS", 0.05)
    ended: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await greet(reader, writer, KEY)
        except StrangerError as error:
            ended.append(str(error))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    assert len(await reader.read()) == 32
    assert ended == ["it says nothing"]
    writer.close()
    server.close()
    closing = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*closing.sockets[0].getsockname())
    with pytest.raises(OSError, match="closed the connection"):
        await introduce(reader, writer, KEY, Purpose(b"link", 3))
    writer.close()
    closing.close()


def test_of_too_many_strangers_the_oldest_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_ways, "MOST_STRANGERS", 2)
    closed: list[str] = []
    strangers = Strangers()
    strangers.enter(lambda: closed.append("a"))
    known = strangers.enter(lambda: closed.append("b"))
    strangers.leave(known)
    strangers.enter(lambda: closed.append("c"))
    strangers.enter(lambda: closed.append("d"))
    assert closed == ["a"]


def test_a_key_is_made_of_a_files_content_and_a_short_one_is_refused(tmp_path: Path) -> None:
    for name in ("one", "other", "short"):
        (tmp_path / name).touch(0o600)
    (tmp_path / "one").write_text("0123456789abcdef\n")
    (tmp_path / "other").write_text("0123456789abcdef")
    assert read_key(tmp_path / "one", "--flag") == read_key(tmp_path / "other", "--flag")
    assert b"0123456789abcdef" not in read_key(tmp_path / "one", "--flag")
    (tmp_path / "short").write_text("0123456789abcde\n\n")
    with pytest.raises(ConfigError, match=r"^--flag: .* fewer than 16 bytes"):
        read_key(tmp_path / "short", "--flag")
    with pytest.raises(ConfigError, match=r"^--flag: cannot read"):
        read_key(tmp_path / "none", "--flag")


@pytest.mark.parametrize(
    ("mode", "fine"), [(0o600, True), (0o400, True), (0o640, False), (0o604, False), (0o666, False)]
)
def test_a_key_that_others_may_read_or_change_is_refused(tmp_path: Path, mode: int, fine: bool) -> None:
    path = tmp_path / "key"
    path.write_text("0123456789abcdef")
    path.chmod(mode)
    if fine:
        read_key(path, "--flag")
    else:
        with pytest.raises(ConfigError, match=r"^--flag: other users may read or change .*chmod 600"):
            read_key(path, "--flag")


def test_a_group_may_read_a_key_that_belongs_to_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So Kubernetes gives secrets to processes that are not root."""
    path = tmp_path / "key"
    path.write_text("0123456789abcdef")
    path.chmod(0o440)
    monkeypatch.setattr("os.geteuid", lambda: path.stat().st_uid + 1)
    read_key(path, "--flag")
