"""The connection between the first node of a group and another: what they tell each other, and signs of life."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from importlib.metadata import version

import msgspec

from sapwood_net.pacing.silence import Silence
from sapwood_worker.config import WorkerConfig
from sapwood_worker.ipc.standing import Standing

LINK, STORE = b"link", b"stor"
"""What a node connects to the first one for: to follow it; to reach the store by which the ranks of an epoch meet."""
STEPS = "steps"
"""What the key of an epoch's connections is for."""
_LENGTH = struct.Struct("!I")
_MOST_BYTES = 1 << 16
_BEAT_SECONDS = 0.1

_OWN = frozenset(
    (
        *("node_rank", "rendezvous_key", "model", "revision", "served_model_name", "threads", "device"),
        *("host", "port", "metrics_port", "health_host", "health_port", "sglang"),
        *("log_level", "log_format", "trace_endpoint", "tls_cert", "tls_key", "tls_client_ca"),
        *(
            "kv_events_port",
            "kv_events_replay_port",
            "kv_events",
            "crash_dump_folder",
            "grpc_server",
            "drain_timeout",
        ),
    )
)
"""Settings that each node may have its own of."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A node's first message.

    Attributes:
        node: Its ``--node-rank``.
        version: Sapwood's version there.
        settings: What all nodes must have alike.
    """

    node: int
    version: str
    settings: dict[str, str]

    @staticmethod
    def of(config: WorkerConfig) -> Hello:
        """What a node with this configuration says."""
        shared = {name: str(value) for name, value in config.model_dump(mode="json").items() if name not in _OWN}
        return Hello(config.node_rank, version("sapwood"), shared)

    def difference(self, other: Hello) -> str:
        """How another node differs, as a text for people; empty: in nothing that matters."""
        if other.version != self.version:
            return f"it runs sapwood {other.version}, this one {self.version}"
        for name, value in self.settings.items():
            if other.settings.get(name) != value:
                return f"its --{name.replace('_', '-')} is {other.settings.get(name)}, here it is {value}"
        return ""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The node cannot be one of the group."""

    reason: str


class Begin(msgspec.Struct, tag=True, frozen=True):
    """The node is to end the ranks that it has and to start them anew.

    Attributes:
        epoch: Counts up.
        steps: Port at the first node where ranks get their steps.
        salt: Makes the key of these connections of the group's.
    """

    epoch: int
    steps: int
    salt: bytes


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """All ranks have loaded their model: from now on silence means more."""


class End(msgspec.Struct, tag=True, frozen=True):
    """The node is to end its ranks."""


class RankEnded(msgspec.Struct, tag=True, frozen=True):
    """A rank of the node has ended.

    Attributes:
        epoch: As in :class:`Begin`.
        rank: Its number.
        how: For people.
    """

    epoch: int
    rank: int
    how: str


class Standings(msgspec.Struct, tag=True, frozen=True):
    """How far the node's ranks have come.

    Attributes:
        epoch: As in :class:`Begin`.
        ranks: Of each.
    """

    epoch: int
    ranks: list[Standing]


class Beat(msgspec.Struct, tag=True, frozen=True):
    """A sign of life."""


Message = Hello | Refused | Begin | Loaded | End | RankEnded | Standings | Beat

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class LinkLostError(Exception):
    """The other end is gone, silent, or says what makes no sense."""


class NodeLink:
    """One end. Gives signs of life from construction to :meth:`close`.

    Args:
        reader: What the other end says.
        writer: The way there.
        silence: Seconds without a sign of life after which the other end is lost. What this process slept itself does not count.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence: float) -> None:
        self._reader, self._writer = reader, writer
        self._limit = silence
        self._silence = Silence(_BEAT_SECONDS, time.monotonic)
        self._silent = asyncio.get_running_loop().create_future()
        self._beating = asyncio.ensure_future(self._beat())

    def send(self, message: Message) -> None:
        """Queues a message; never blocks. To an end that is gone nothing is sent."""
        data = _encoder.encode(message)
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(data)) + data)

    async def receive(self) -> Message:
        """The next message that is more than a sign of life.

        Raises:
            LinkLostError: The other end is lost.
        """
        reading = asyncio.ensure_future(self._read())
        try:
            await asyncio.wait({reading, self._silent}, return_when=asyncio.FIRST_COMPLETED)
            if self._silent.cancelled():
                raise LinkLostError("the connection is closed here")
            if not reading.done():
                raise LinkLostError(f"no sign of life for {self._silent.result():.1f} s")
            return reading.result()
        finally:
            reading.cancel()

    def close(self) -> None:
        """Ends the connection, once what was sent is gone."""
        self._beating.cancel()
        self._silent.cancel()
        self._writer.close()

    async def _read(self) -> Message:
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                if length > _MOST_BYTES:
                    raise LinkLostError("it speaks another language")
                message = _decoder.decode(await self._reader.readexactly(length))
                self._silence.heard()
                if not isinstance(message, Beat):
                    return message
        except (OSError, EOFError) as error:
            raise LinkLostError("the connection has ended") from error
        except msgspec.MsgspecError as error:
            raise LinkLostError("it speaks another language") from error

    async def _beat(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.send(Beat())
                await asyncio.sleep(_BEAT_SECONDS)
                seconds = self._silence.check()
                if seconds > self._limit and not self._silent.done():
                    self._silent.set_result(seconds)


async def join_streams(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    """Hands on all that comes over a connection to a port, and all that comes back, until either end closes."""
    try:
        theirs, back = await asyncio.open_connection(host, port)
    except OSError:
        writer.close()
        return
    await join_pair((reader, writer), (theirs, back))


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def join_pair(one: Streams, other: Streams) -> None:
    """Hands on all that comes over either of two connections to the other one, until one closes; closes both."""
    ways = [asyncio.ensure_future(_copy(one[0], other[1])), asyncio.ensure_future(_copy(other[0], one[1]))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        one[1].close()
        other[1].close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(_MOST_BYTES):
            target.write(data)
            await target.drain()
