"""KV events over ZeroMQ, in the msgpack format that vLLM, SGLang and Dynamo share.

A PUB socket sends ``[topic, sequence number as 8 bytes big endian, payload]`` for each batch. A ROUTER socket answers an 8-byte
big-endian number with every batch from that one on that is still kept, ``[topic, number, payload]`` each, then
``[empty, -1, empty]``.

The payload is a msgpack array ``[seconds since 1970, events, data parallel rank]``. An event is a map: ``type`` is BlockStored,
BlockRemoved or AllBlocksCleared, and the other keys are those of vLLM 0.33 and SGLang 0.5.23. Of either, all keys are there that
its decoder requires. A hash is an unsigned number, as in vLLM: the last 8 bytes of our 16. A medium is named as in SGLang: GPU,
CPU_PINNED (the host's memory) or EXTERNAL (a store).

The format ``array`` is the one both had before: an event is
``["BlockStored", hashes, parent hash, tokens, block size, LoRA id, medium, LoRA name]``, ``["BlockRemoved", hashes, medium]`` or
``["AllBlocksCleared"]``, a medium is GPU, CPU_TIER1 or CPU_TIER2, and answers of the ROUTER socket have no topic.

PUB drops what a slow subscriber does not read: it sees a gap in the numbers and asks for a replay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from sapwood_common.errors import ConfigError
from sapwood_common.network.socket_folder import SocketFolder
from sapwood_common.network.stream_servers import ends_with_loop
from sapwood_common.secret_file import warn_of_readers
from sapwood_net.sockets.listen import listen
from sapwood_net.sockets.newcomers import source
from sapwood_worker.front.kv_event_stream import KvEventBatch
from sapwood_worker.records.kv_events import BlockRemoved, BlockStored, KvEvent, Medium, split_hashes
from sapwood_worker.settings import KvEventsFormat

logger = logging.getLogger(__name__)


_SEND_HIGH_WATER = 100_000
_MEDIUM: dict[Medium, str] = {"GPU": "GPU", "CPU_TIER1": "CPU_PINNED", "CPU_TIER2": "EXTERNAL"}


class KvEventPublisher:
    """The two sockets, each with a thread. Life cycle: construct, :meth:`close`.

    Args:
        host: Address to listen on.
        port: Port of the PUB socket; 0 takes a free one.
        replay_port: Port of the ROUTER socket; 0 takes a free one; None: no replay.
        topic: The topic of every message.
        keep: Batches kept for replay.
        block_size: Tokens in a block.
        rank: The data-parallel rank whose cache it is.
        form: The format of the events.
        keys: See :class:`~sapwood_worker.front.kv_event_publisher.Subscribers`.

    Attributes:
        address: ``host:port`` of the PUB socket.
        replay_address: ``host:port`` of the ROUTER socket, if there is one.

    Raises:
        ConfigError: A port cannot be listened on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        replay_port: int | None,
        *,
        topic: str,
        keep: int,
        block_size: int,
        rank: int = 0,
        form: KvEventsFormat = "map",
        keys: Path | None = None,
    ) -> None:
        self._topic = topic.encode()
        self._block_size = block_size
        self._rank = rank
        self._form = form
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=keep)
        self._context = zmq.Context()
        self._folder = SocketFolder("sapwood-kv-events-")
        self._door: Door | None = None
        self._replays: ReplayServer | None = None
        self._subscribers: Subscribers | None = None
        try:
            self._subscribers = Subscribers(self._context, keys)
            ways = [Way(_listen(host, port, "--kv-events-port"), self._folder.path / "pub")]
            self.address = _shown(ways[0].listener)
            pub = self._context.socket(zmq.PUB)
            self._door = Door(ways, pub)
            self._subscribers.guard(pub)
            pub.set_hwm(_SEND_HIGH_WATER)
            pub.bind(f"ipc://{ways[0].inside}")
            self.replay_address: str | None = None
            if replay_port is not None:
                listener = _listen(host, replay_port, "--kv-events-replay-port")
                ways.append(Way(listener, self._folder.path / "replay", MOST_REPLAYS))
                self.replay_address = _shown(listener)
                router = self._context.socket(zmq.ROUTER)
                self._subscribers.guard(router)
                frames = () if form == "array" else (self._topic,)
                self._replays = ReplayServer(router, lambda: tuple(self._kept), frames)
                router.bind(f"ipc://{ways[1].inside}")
                self._replays.start()
            self._door.start()
        except ConfigError:
            self.close()
            raise

    def publish(self, batch: KvEventBatch) -> None:
        """Sends a batch; never blocks."""
        payload = encode_batch(time.time(), batch.events, self._block_size, self._rank, self._form)
        self._kept.append((batch.seq, payload))
        assert self._door is not None, "it was made at the start"
        self._door.send((self._topic, batch.seq.to_bytes(8, "big"), payload))

    def close(self) -> None:
        """Closes the sockets; what is not sent yet is dropped."""
        if self._door is not None:
            self._door.close()
        if self._replays is not None:
            self._replays.close()
        if self._subscribers is not None:
            self._subscribers.close()
        self._context.term()
        self._folder.remove()


def encode_batch(
    seconds: float, events: Sequence[KvEvent], block_size: int, rank: int = 0, form: KvEventsFormat = "map"
) -> bytes:
    """The msgpack payload of a batch, as the module describes it."""
    shared = _as_array if form == "array" else _as_map
    return msgspec.msgpack.encode([seconds, [shared(event, block_size) for event in events], rank])


def _as_map(event: KvEvent, block_size: int) -> dict[str, Any]:
    match event:
        case BlockStored(hashes, parent, token_ids, medium, lora):
            return {
                "type": "BlockStored",
                "block_hashes": _numbers(hashes),
                "parent_block_hash": _number(parent) if parent else None,
                "token_ids": array("I", token_ids).tolist(),
                "block_size": block_size,
                "lora_id": None,
                "medium": _MEDIUM[medium],
                "lora_name": lora or None,
            }
        case BlockRemoved(hashes, medium):
            return {"type": "BlockRemoved", "block_hashes": _numbers(hashes), "medium": _MEDIUM[medium]}
        case _:
            return {"type": "AllBlocksCleared"}


def _as_array(event: KvEvent, block_size: int) -> list[Any]:
    match event:
        case BlockStored(hashes, parent, token_ids, medium, lora):
            tokens = array("I", token_ids).tolist()
            above = _number(parent) if parent else None
            return ["BlockStored", _numbers(hashes), above, tokens, block_size, None, medium, lora or None]
        case BlockRemoved(hashes, medium):
            return ["BlockRemoved", _numbers(hashes), medium]
        case _:
            return ["AllBlocksCleared"]


def _numbers(hashes: bytes) -> list[int]:
    return [_number(block) for block in split_hashes(hashes)]


def _number(block: bytes) -> int:
    return int.from_bytes(block[-8:], "big")


def _listen(host: str, port: int, flag: str) -> socket.socket:
    try:
        return listen("0.0.0.0" if host == "*" else host, port)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error


def _shown(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# Answers subscribers that missed KV events, in a thread of its own, so that many requests do not block the front.


END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
Batches = Sequence[tuple[int, bytes]]

_SERVER, _CLIENTS = "server.key_secret", "clients"
_MOST_QUESTION = 1024
"""Bytes of a frame that a subscriber sends, of a handshake too; the connection of one that sends a longer one is closed."""
_MOST_WAITING = 256
"""Subscribers whose questions wait; further questions are dropped."""
_MOST_AT_ONCE = 8
"""Subscribers that are answered at a time."""
_SLICE, _FRAMES = 64, 256
"""Messages that are sent, and frames of questions that are taken, in a piece of work."""
_REST = 4.0
"""How long the thread rests after a piece of work, in times that it took: it has a fifth of a core at most."""
_BLOCKED_SECONDS = 0.005
_MOST_BLOCKED_SECONDS = 1.0
"""After which a subscriber that reads nothing of its answer gives its place to one that waits."""


class Subscribers:
    """Who may subscribe to KV events: those whose public keys are in a folder (CURVE), or without one everybody who reaches the
    port.

    Args:
        context: The sockets'.
        keys: A folder with ``server.key_secret`` and, in ``clients``, the public keys (``NAME.key``), as
            ``zmq.auth.create_certificates`` makes them; None: no keys are asked for.

    Raises:
        ConfigError: The folder lacks something.
    """

    def __init__(self, context: Any, keys: Path | None) -> None:
        self._pair: tuple[bytes, bytes] | None = None
        self._authenticator: Any = None
        if keys is None:
            return
        if not zmq.has("curve"):
            raise ConfigError("--kv-events key_folder: ZeroMQ is built without CURVE here")
        try:
            public, secret = zmq.auth.load_certificate(keys / _SERVER)
            clients = zmq.auth.load_certificates(keys / _CLIENTS)
            warn_of_readers(keys / _SERVER, "--kv-events key_folder")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--kv-events key_folder: {keys}: {error}") from error
        if secret is None or not clients:
            raise ConfigError(f"--kv-events key_folder: {keys} needs {_SERVER} and public keys in {_CLIENTS}")
        self._pair = public, secret
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve(domain="*", location=str(keys / _CLIENTS))

    def guard(self, socket: Any) -> None:
        """Makes a socket require keys, before it is bound."""
        socket.setsockopt(zmq.MAXMSGSIZE, _MOST_QUESTION)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        if self._pair is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = self._pair

    def close(self) -> None:
        """Ends the thread that looks at keys."""
        if self._authenticator is not None:
            self._authenticator.stop()


class ReplayServer:
    """A bound ROUTER socket and the thread that answers on it. Life cycle: construct, :meth:`start`, :meth:`close`.

    An 8-byte big-endian number asks for all batches from that one on. A subscriber that asks again before it is answered is
    answered once more, for its last question only.

    Args:
        router: The socket; the thread's alone from now on.
        kept: Gives the batches that are kept now.
        topic: Begins each answer, as frames.
    """

    def __init__(self, router: Any, kept: Callable[[], Batches], topic: tuple[bytes, ...]) -> None:
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # it would drop what a slow subscriber has no room for
        self._router, self._kept, self._topic = router, kept, topic
        self._waiting: dict[bytes, int] = {}
        self._asking: bytes | None = None
        """The subscriber whose message has come in part."""
        self._running: dict[bytes, Iterator[tuple[bytes, ...]]] = {}
        self._unsent: dict[bytes, tuple[bytes, ...]] = {}
        self._blocked: dict[bytes, float] = {}
        """Subscribers that are being answered and read nothing -> since when."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-event-replay", daemon=True)

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and closes the socket."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._router.close(0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            asked = self._router.poll(0 if self._running else 100)
            began = time.monotonic()
            if asked:
                self._take_questions()
            went_on = self._answer()
            spent = time.monotonic() - began
            self._stopping.wait(max(_REST * spent, 0.0 if went_on or not self._running else _BLOCKED_SECONDS))

    def _take_questions(self) -> None:
        """Takes some frames: a message may have thousands of them, so its rest may have to wait for the next turn."""
        with suppress(zmq.Again):
            for _ in range(_FRAMES):
                frame = self._router.recv(zmq.NOBLOCK)
                if self._asking is None:
                    self._asking = client = frame
                    question = b""
                else:
                    client, question = self._asking, frame
                if self._router.rcvmore:
                    continue
                self._asking = None
                if len(question) == 8 and (client in self._waiting or len(self._waiting) < _MOST_WAITING):
                    self._waiting[client] = int.from_bytes(question, "big")

    def _answer(self) -> bool:
        """Sends a slice to each subscriber that is being answered; says whether anything was sent."""
        if self._waiting and len(self._running) >= _MOST_AT_ONCE:
            self._make_room(time.monotonic() - _MOST_BLOCKED_SECONDS)
        for client in list(self._waiting):
            if len(self._running) < _MOST_AT_ONCE and client not in self._running:
                self._running[client] = self._messages(client, self._waiting.pop(client))
        sent = [self._go_on(client) for client in list(self._running)]
        return any(sent)

    def _make_room(self, before: float) -> None:
        """Puts subscribers that have read nothing since ``before`` back into the queue, with the rest of their answers; if many
        wait, without it."""
        for client in [each for each, since in self._blocked.items() if since <= before]:
            del self._running[client], self._blocked[client]
            *_, number, _ = self._unsent.pop(client)
            if len(self._waiting) < _MOST_WAITING // 2:
                self._waiting.setdefault(client, int.from_bytes(number, "big"))

    def _go_on(self, client: bytes) -> bool:
        """Sends the next messages to one subscriber; says whether it took any."""
        messages, sent = self._running[client], False
        for _ in range(_SLICE):
            message = self._unsent.pop(client, None) or next(messages, None)
            if message is None:
                del self._running[client]
                break
            try:
                self._router.send_multipart(message, zmq.NOBLOCK)
                sent = True
                self._blocked.pop(client, None)
            except zmq.Again:
                self._unsent[client] = message
                self._blocked.setdefault(client, time.monotonic())
                break
            except zmq.ZMQError:  # it has left
                del self._running[client]
                self._blocked.pop(client, None)
                break
        return sent

    def _messages(self, client: bytes, first: int) -> Iterator[tuple[bytes, ...]]:
        for seq, payload in self._kept():
            if seq >= first:
                yield (client, b"", *self._topic, seq.to_bytes(8, "big"), payload)
        yield (client, b"", *(b"" for _ in self._topic), END_OF_REPLAY, b"")


# The ports of KV events: they let subscribers in, and bound what each says and how many there are.
#
# A PUB socket keeps every subscription and adds each in the thread that publishes: one subscriber with 150 000 of them
# costs 7 GB and stops the publisher for seconds. So subscribers connect to this port, which hands their bytes on to the
# socket, at most ``MOST_SAID`` from each connection. A subscriber that says more is closed, and with it goes what it
# asked for. The socket is a thread's, together with the ports: whatever is asked of it, the front goes on. Replays'
# port is one of these, too: their socket knows no addresses and answers its connections in turn, so that an address may
# have a few of them at a time.


MOST_SAID = 16 * 1024
"""Bytes that a subscriber may say on one connection: greeting, keys, subscriptions and signs of life."""
MOST_SUBSCRIBERS = 128
"""Connections to a port at a time. Beyond that the oldest of the address with the most leaves."""
MOST_REPLAYS = 32
"""Connections of an address to replays' port at a time. Beyond that its oldest leaves."""
_MOST_UNSENT = 100_000
_PIECE = 256 * 1024
_SENT_AT_ONCE = 256
"""Messages that are sent between looks at the port."""

Message = tuple[bytes, ...]


@dataclass(slots=True, eq=False)
class Way:
    """A port and where it leads.

    Attributes:
        listener: The port, listening.
        inside: The Unix socket that ZeroMQ's is bound to.
        most_of_address: Connections of an address at a time.
        guests: For each connection, the function that closes it and its address, the oldest first.
    """

    listener: socket.socket
    inside: Path
    most_of_address: int = MOST_SUBSCRIBERS
    guests: dict[Callable[[], None], str | bytes] = field(default_factory=dict)

    def enter(self, leave: Callable[[], None], address: str | bytes) -> None:
        """Counts a connection; closes one that has no place by it."""
        self.guests[leave] = address
        counts = Counter(self.guests.values())
        crowded = address
        if counts[address] <= self.most_of_address:
            if len(self.guests) <= MOST_SUBSCRIBERS:
                return
            ((crowded, _),) = counts.most_common(1)
        oldest = next(each for each, known in self.guests.items() if known == crowded)
        del self.guests[oldest]
        oldest()


class Door:
    """A thread with a PUB socket and the ports. Life cycle: construct, :meth:`start`, :meth:`close`.

    Args:
        ways: The ports.
        pub: The socket; the thread's alone from now on.
    """

    def __init__(self, ways: Sequence[Way], pub: Any) -> None:
        self._ways, self._pub = ways, pub
        self._unsent: deque[Message] = deque(maxlen=_MOST_UNSENT)
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def start(self) -> None:
        """Lets subscribers in."""
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queues a message; never blocks. Where the thread is far behind the oldest is dropped: subscribers see a gap."""
        self._unsent.append(message)
        self._loop.call_soon_threadsafe(self._news.set)

    def close(self) -> None:
        """Ends the thread and closes the socket; what is not sent yet is dropped."""
        self._stopping = True
        if self._thread.ident is not None:
            self._loop.call_soon_threadsafe(self._news.set)
            self._thread.join()
        self._loop.close()
        for way in self._ways:
            way.listener.close()
        self._pub.close(0)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        servers = [
            await asyncio.start_server(ends_with_loop(partial(self._let_in, way)), sock=way.listener)
            for way in self._ways
        ]
        while not self._stopping:
            await self._news.wait()
            self._news.clear()
            while self._unsent and not self._stopping:
                for _ in range(min(_SENT_AT_ONCE, len(self._unsent))):
                    with contextlib.suppress(zmq.Again):
                        self._pub.send_multipart(self._unsent.popleft(), zmq.NOBLOCK)
                await asyncio.sleep(0)
        for server in servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _let_in(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        leave = writer.transport.abort
        way.enter(leave, source(writer.get_extra_info("peername")))
        inner: asyncio.StreamWriter | None = None
        try:
            answers, inner = await asyncio.open_unix_connection(way.inside)
            passing = [
                asyncio.ensure_future(self._pass_on(reader, inner, MOST_SAID)),
                asyncio.ensure_future(self._pass_on(answers, writer, None)),
            ]
            try:
                await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in passing:
                    one.cancel()
        except OSError as error:
            logger.debug("a subscriber of KV events is lost: %s", error)
        finally:
            way.guests.pop(leave, None)
            leave()
            if inner is not None:
                inner.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_PIECE):
                if most is not None:
                    most -= len(data)
                    if most < 0:
                        logger.info("a subscriber of KV events says more than %d bytes: it is closed", MOST_SAID)
                        return
                writer.write(data)
                await writer.drain()
