"""KV events over ZeroMQ, in the msgpack format that vLLM, SGLang and Dynamo share.

A PUB socket sends ``[topic, sequence number as 8 bytes big endian, payload]`` for each batch. A ROUTER socket answers an 8-byte
big-endian number with every batch from that one on that is still kept, ``[number, payload]`` each, then ``[-1, empty]``.
The payload is a msgpack array ``[seconds since 1970, events, data parallel rank]``; an event is
``["BlockStored", hashes, parent hash, tokens, block size, LoRA id, medium, LoRA name]``, ``["BlockRemoved", hashes, medium]`` or
``["AllBlocksCleared"]``. A hash is an unsigned number, as in vLLM: the last 8 bytes of our 16.

PUB drops what a slow subscriber does not read: it sees a gap in the numbers and asks for a replay.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from sapwood_common.errors import ConfigError
from sapwood_worker.front.kv_event_stream import KvEventBatch
from sapwood_worker.records.kv_events import BlockRemoved, BlockStored, KvEvent, split_hashes

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

_SEND_HIGH_WATER = 100_000


class KvEventPublisher:
    """The two sockets. Life cycle: construct, :meth:`serve_replays` in a task, :meth:`close`.

    Args:
        host: Address to listen on.
        port: Port of the PUB socket; 0 takes a free one.
        replay_port: Port of the ROUTER socket; 0 takes a free one; None: no replay.
        topic: The topic of every message.
        keep: Batches kept for replay.
        block_size: Tokens in a block.

    Attributes:
        address: ``host:port`` of the PUB socket.
        replay_address: ``host:port`` of the ROUTER socket, if there is one.

    Raises:
        ConfigError: A port cannot be listened on.
    """

    def __init__(
        self, host: str, port: int, replay_port: int | None, *, topic: str, keep: int, block_size: int
    ) -> None:
        self._topic = topic.encode()
        self._block_size = block_size
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=keep)
        self._context = zmq.asyncio.Context()
        self._pub: zmq.Socket[bytes] = zmq.Context.shadow(self._context).socket(zmq.PUB)
        self._router: zmq.asyncio.Socket | None = None
        try:
            self._pub.set_hwm(_SEND_HIGH_WATER)
            self.address = _bind(self._pub, host, port, "--kv-events-port")
            self.replay_address: str | None = None
            if replay_port is not None:
                self._router = self._context.socket(zmq.ROUTER)
                self.replay_address = _bind(self._router, host, replay_port, "--kv-events-replay-port")
        except ConfigError:
            self.close()
            raise

    def publish(self, batch: KvEventBatch) -> None:
        """Sends a batch; never blocks."""
        payload = encode_batch(time.time(), batch.events, self._block_size)
        self._kept.append((batch.seq, payload))
        self._pub.send_multipart((self._topic, batch.seq.to_bytes(8, "big"), payload), zmq.NOBLOCK)

    async def serve_replays(self) -> None:
        """Answers requests for old batches, without end."""
        router = self._router
        while router is not None:
            client, *frames = await router.recv_multipart()
            if not frames or len(frames[-1]) != 8:
                continue
            first = int.from_bytes(frames[-1], "big")
            for seq, payload in tuple(self._kept):
                if seq >= first:
                    await router.send_multipart((client, b"", seq.to_bytes(8, "big"), payload))
            await router.send_multipart((client, b"", END_OF_REPLAY, b""))

    def close(self) -> None:
        """Closes the sockets; what is not sent yet is dropped."""
        self._pub.close(0)
        if self._router is not None:
            self._router.close(0)
        self._context.term()


def encode_batch(seconds: float, events: Sequence[KvEvent], block_size: int) -> bytes:
    """The msgpack payload of a batch, as the module describes it."""
    return msgspec.msgpack.encode([seconds, [_shared_format(event, block_size) for event in events], 0])


def _shared_format(event: KvEvent, block_size: int) -> list[Any]:
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


def _bind(socket: Any, host: str, port: int, flag: str) -> str:
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
        host = f"[{host.strip('[]')}]"
    try:
        socket.bind(f"tcp://{host}:{port or '*'}")
    except zmq.ZMQError as error:
        raise ConfigError(f"{flag}: cannot listen on {host}:{port}: {error}") from error
    address: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)
    return address.decode().rstrip("\0").removeprefix("tcp://")
