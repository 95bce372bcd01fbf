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

import socket
import time
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from sapwood_common.errors import ConfigError
from sapwood_common.network.socket_folder import SocketFolder
from sapwood_net.sockets.listen import listen
from sapwood_worker.front.kv_event_door import MOST_REPLAYS, Door, Way
from sapwood_worker.front.kv_event_replay import ReplayServer, Subscribers
from sapwood_worker.front.kv_event_stream import KvEventBatch
from sapwood_worker.records.kv_events import BlockRemoved, BlockStored, KvEvent, Medium, split_hashes
from sapwood_worker.settings.names import KvEventsFormat

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
        keys: As of :class:`~sapwood_worker.front.kv_event_replay.Subscribers`.

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
