"""TCP connections between the hosts of a group: each end shows that it knows the group's key before anything else is said.

The end that listens sends 32 random bytes. The other end answers with its purpose, 32 random bytes of its own, and an HMAC of
all of these under the key; it gets an HMAC of the same in return, or zeros. Nothing that follows is encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from sapwood_common.errors import ConfigError
from sapwood_common.secret_file import others_may_read

KEY_BYTES = 32
HELLO_SECONDS = 5.0
"""Seconds that either end gets to show that it knows the key."""
MOST_STRANGERS = 256
"""Connections to a port that have not yet shown it; beyond them the oldest is closed."""
_PATIENCE_SECONDS = 120.0
"""Seconds for which a rank waits until rank 0, which may still be starting, looks at who has come."""
_LEAST_SECRET = 16
_NONCE, _PROOF = 32, 32
_PURPOSE = struct.Struct("!4sI")
_RANK = b"rank"


class StrangerError(Exception):
    """The other end does not know the key."""


class Purpose(NamedTuple):
    """The purpose of a connection.

    Attributes:
        kind: Four bytes.
        number: A number, by the kind.
    """

    kind: bytes
    number: int


def read_key(path: Path, flag: str) -> bytes:
    """The key of a group of hosts, made of the content of a file that all of them have alike.

    Raises:
        ConfigError: There is no such file, or others may read it, or it holds too little to be a secret; names the flag.
    """
    try:
        with path.open("rb") as file:
            if others_may_read(file.fileno()):
                raise ConfigError(f"{flag}: other users may read or change {path}: chmod 600 {path}")
            secret = file.read().strip()
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}") from error
    if len(secret) < _LEAST_SECRET:
        raise ConfigError(
            f"{flag}: {path} holds fewer than {_LEAST_SECRET} bytes: (umask 077; openssl rand -hex 32 > {path})"
        )
    return derive(secret, "group")


def derive(key: bytes, use: str, salt: bytes = b"") -> bytes:
    """A separate key for each purpose; the original key cannot be derived from it."""
    return hmac.digest(key, use.encode() + b"\0" + salt, "sha256")


def listen(host: str) -> socket.socket:
    """A socket that listens at an address of rank 0's, on a free port.

    Raises:
        ConfigError: It cannot.
    """
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, 0), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(f"--rendezvous {host}: cannot listen there: {error}") from error


def connect(address: str, key: bytes, rank: int) -> Connection:
    """A rank's way to rank 0.

    Args:
        address: Where that listens, as HOST:PORT.
        key: What both know.
        rank: This rank's number.

    Raises:
        ConfigError: It cannot be reached, or does not know the key.
    """
    host, _, port = address.rpartition(":")
    try:
        way = socket.create_connection((host.strip("[]"), int(port)), timeout=HELLO_SECONDS)
        way.settimeout(_PATIENCE_SECONDS)
        message, expected = _introduction(key, Purpose(_RANK, rank), _receive(way, _NONCE))
        way.sendall(message)
        if not hmac.compare_digest(_receive(way, _PROOF), expected):
            raise OSError("who listens there does not know the key")
    except OSError as error:
        raise ConfigError(f"rank 0 cannot be reached at {address}: {error}") from error
    return _way(way)


def accept(listener: socket.socket, key: bytes, ranks: Sequence[int], seconds: float) -> list[Connection]:
    """Rank 0's ways to others, in their order. Strangers keep nobody waiting.

    Args:
        listener: Where they come.
        key: What all know.
        ranks: Those others.
        seconds: The time that they have.

    Raises:
        ConfigError: One did not come in time; says which.
    """
    found = asyncio.run(_gather(listener, key, ranks, seconds))
    missing = [rank for rank in ranks if rank not in found]
    if missing:
        for way in found.values():
            way.close()
        raise ConfigError(f"rank {missing[0]} did not come within {seconds:.0f} s")
    return [_way(found[rank]) for rank in ranks]


async def introduce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, purpose: Purpose) -> None:
    """Shows the end that listens that this one knows the key, and looks whether that does.

    Raises:
        StrangerError: It does not.
        OSError: It has left, or says nothing.
    """
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            message, expected = _introduction(key, purpose, await reader.readexactly(_NONCE))
            writer.write(message)
            if not hmac.compare_digest(await reader.readexactly(_PROOF), expected):
                raise StrangerError("it has another key")
    except EOFError:
        raise ConnectionResetError("it closed the connection") from None


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> Purpose:
    """Proves the key to the other end, checks its proof, and returns the purpose of the connection.

    Raises:
        StrangerError: It does not know the key.
    """

    async def write(data: bytes) -> None:
        writer.write(data)

    return await _greet(reader.readexactly, write, key)


class Strangers:
    """Connections that have not yet shown that they know the key, up to a limit."""

    def __init__(self) -> None:
        self._closers: dict[int, Callable[[], None]] = {}
        self._number = 0

    def enter(self, close: Callable[[], None]) -> int:
        """One more has come; ``close`` ends it. Closes the oldest if they are too many. Returns its number for :meth:`leave`."""
        self._number += 1
        self._closers[self._number] = close
        if len(self._closers) > MOST_STRANGERS:
            self._closers.pop(next(iter(self._closers)))()
        return self._number

    def leave(self, number: int) -> None:
        """One has shown the key, or is closed."""
        self._closers.pop(number, None)


async def _greet(
    read: Callable[[int], Awaitable[bytes]], write: Callable[[bytes], Awaitable[None]], key: bytes
) -> Purpose:
    ours = secrets.token_bytes(_NONCE)
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            await write(ours)
            said = await read(_PURPOSE.size + _NONCE + _PROOF)
            asked, proof = said[:-_PROOF], said[-_PROOF:]
            if not hmac.compare_digest(proof, _proof(key, b"comes", ours, asked)):
                await write(bytes(_PROOF))
                raise StrangerError("it has another key")
            await write(_proof(key, b"listens", ours, asked))
    except EOFError:
        raise StrangerError("it has left") from None
    except OSError as error:  # also where it says nothing
        raise StrangerError(str(error) or "it says nothing") from None
    return Purpose(*_PURPOSE.unpack_from(asked))


async def _gather(
    listener: socket.socket, key: bytes, ranks: Sequence[int], seconds: float
) -> dict[int, socket.socket]:
    """The ranks that came in time, by number."""
    loop, found, strangers = asyncio.get_running_loop(), dict[int, socket.socket](), Strangers()
    complete = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def read(way: socket.socket, count: int) -> bytes:
        said = b""
        while len(said) < count:
            part = await loop.sock_recv(way, count - len(said))
            if not part:
                raise EOFError
            said += part
        return said

    async def take(way: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        number = strangers.enter(task.cancel)  # type: ignore[arg-type]
        kept = False
        try:
            kind, rank = await _greet(partial(read, way), partial(loop.sock_sendall, way), key)
            if kind == _RANK and rank in ranks and rank not in found:
                found[rank], kept = way, True
                if len(found) == len(ranks):
                    complete.set()
        except StrangerError:
            pass
        finally:
            strangers.leave(number)
            if not kept:
                way.close()

    async def take_all() -> None:
        listener.setblocking(False)
        while True:
            try:
                way, _ = await loop.sock_accept(listener)
            except OSError:  # there are too many open files
                await asyncio.sleep(0.05)
                continue
            way.setblocking(False)
            task = asyncio.create_task(take(way))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    accepting = asyncio.create_task(take_all())
    deadline = time.monotonic() + seconds
    try:
        async with asyncio.timeout(max(deadline - time.monotonic(), 0.01)):
            await complete.wait()
    except TimeoutError:
        pass
    finally:
        for each in (accepting, *tasks):
            each.cancel()
        await asyncio.wait([accepting, *tasks])
    return found


def _introduction(key: bytes, purpose: Purpose, theirs: bytes) -> tuple[bytes, bytes]:
    """The connecting end's message, and the answer of an end that knows the key."""
    asked = _PURPOSE.pack(*purpose) + secrets.token_bytes(_NONCE)
    return asked + _proof(key, b"comes", theirs, asked), _proof(key, b"listens", theirs, asked)


def _proof(key: bytes, side: bytes, greeting: bytes, asked: bytes) -> bytes:
    return hmac.digest(key, side + b"\0" + greeting + asked, "sha256")


def _receive(way: socket.socket, count: int) -> bytes:
    """So many bytes; fewer if the other end closes."""
    said = b""
    while len(said) < count and (part := way.recv(count - len(said))):
        said += part
    return said


def _way(connected: socket.socket) -> Connection:
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connected.detach())
