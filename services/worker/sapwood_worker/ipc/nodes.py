"""The hosts of a group: the first one, the others, and the link between them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import struct
import time
from collections.abc import Sequence
from importlib.metadata import version

import msgspec

from sapwood_common.errors import ConfigError
from sapwood_common.network.keyed_ways import (
    HELLO_SECONDS,
    KEY_BYTES,
    Purpose,
    StrangerError,
    Strangers,
    derive,
    greet,
    introduce,
    listen,
)
from sapwood_common.network.socket_folder import SocketFolder
from sapwood_common.network.stream_servers import ends_with_loop
from sapwood_common.serving.stop_signal import stop_signal
from sapwood_common.telemetry.logs import announce
from sapwood_net.pacing.silence import Silence
from sapwood_worker.config import WorkerConfig
from sapwood_worker.ipc.rank import (
    LOST_AFTER,
    LOST_AT_START_AFTER,
    Progress,
    Rank,
    RankProgress,
    RankSilence,
    rank_command,
)

# The other nodes of a group, as the first one sees them: they connect, start their ranks on its command, and are watched.


logger = logging.getLogger(__name__)


# The connection between the first node of a group and another: their messages, and heartbeats.


LINK, STORE = b"link", b"stor"
"""The purposes of a node's connection to the first one: to follow it, or to reach the store in which the ranks of an epoch
meet."""
STEPS = "steps"
"""The purpose from which the key of an epoch's connections is derived."""
_LENGTH = struct.Struct("!I")
_MOST_BYTES = 1 << 16
_BEAT_SECONDS = 0.1

_OWN = frozenset(
    (
        *("node_rank", "rendezvous_key", "model", "revision", "served_model_name", "threads", "device"),
        *("host", "port", "metrics_port", "health_port", "sglang"),
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
"""Settings that may differ between nodes."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A node's first message.

    Attributes:
        node: Its ``--node-rank``.
        version: Sapwood's version there.
        settings: The settings that must be equal on all nodes.
    """

    node: int
    version: str
    settings: dict[str, str]

    @staticmethod
    def of(config: WorkerConfig) -> Hello:
        """The message of a node with this configuration."""
        shared = {name: str(value) for name, value in config.model_dump(mode="json").items() if name not in _OWN}
        return Hello(config.node_rank, version("sapwood"), shared)

    def difference(self, other: Hello) -> str:
        """How another node differs, as text for people; empty: in nothing important."""
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
    """The node is to end its ranks and start them again.

    Attributes:
        epoch: Counts up.
        steps: Port at the first node where ranks get their steps.
        salt: The salt that derives the key of these connections from the group's key.
    """

    epoch: int
    steps: int
    salt: bytes


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """All ranks have loaded their model: from now on a shorter silence counts as a loss."""


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


class ProgressOfRanks(msgspec.Struct, tag=True, frozen=True):
    """How far the node's ranks have come.

    Attributes:
        epoch: As in :class:`Begin`.
        ranks: Of each.
    """

    epoch: int
    ranks: list[Progress]


class Beat(msgspec.Struct, tag=True, frozen=True):
    """A sign of life."""


Message = Hello | Refused | Begin | Loaded | End | RankEnded | ProgressOfRanks | Beat

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class LinkLostError(Exception):
    """The other end is gone, silent, or sends invalid messages."""


class NodeLink:
    """One end of a link. It sends heartbeats from construction to :meth:`close`.

    Args:
        reader: What the other end says.
        writer: The way there.
        silence: Seconds without a heartbeat after which the other end is lost. Time in which this process itself was stopped does
            not count.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence: float) -> None:
        self._reader, self._writer = reader, writer
        self._limit = silence
        self._silence = Silence(_BEAT_SECONDS, time.monotonic)
        self._silent = asyncio.get_running_loop().create_future()
        self._beating = asyncio.ensure_future(self._beat())

    def send(self, message: Message) -> None:
        """Queues a message; never blocks. Messages to an end that is gone are dropped."""
        data = _encoder.encode(message)
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(data)) + data)

    async def receive(self) -> Message:
        """The next message that is not a heartbeat.

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
    """Forwards all data between a connection and a port, in both directions, until either end closes."""
    try:
        theirs, back = await asyncio.open_connection(host, port)
    except OSError:
        writer.close()
        return
    await join_pair((reader, writer), (theirs, back))


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def join_pair(one: Streams, other: Streams) -> None:
    """Forwards all data between two connections until one closes; closes both."""
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


_FIRST_SECONDS = 120.0
"""Seconds for the other nodes to connect at the start. Later, a lost node is waited for without limit."""
_SILENCE_SECONDS = 1.5
_REMINDER_SECONDS = 30.0


class Meeting:
    """Where the ranks of one epoch meet: two listening sockets, which rank 0 gets.

    Args:
        host: Their address.
        key: The group's.

    Attributes:
        store: For torch's rendezvous, which asks for no key: only this host's processes reach it, others through :class:`Nodes`.
        steps: For connections by which ranks of other nodes get their steps.
        salt: Makes ``key`` of the group's.
        key: What those show that they know.
    """

    def __init__(self, host: str, key: bytes) -> None:
        self.store, self.steps = listen("127.0.0.1"), listen(host)
        self.salt = secrets.token_bytes(KEY_BYTES)
        self.key = derive(key, STEPS, self.salt)

    def close(self) -> None:
        """Closes this process's sockets."""
        self.store.close()
        self.steps.close()


class Nodes:
    """Listens for the other nodes and keeps the connections to them.

    Life cycle: construct, :meth:`start`, then for each epoch :meth:`gather`, :meth:`begin` and :meth:`end`; :meth:`close`.

    Args:
        config: This node's configuration.

    Attributes:
        host: The address at which ranks meet.
        key: The group's.
        one_left: Whether a node was lost in this epoch; it may connect again.
        progress_of_ranks: For each other node, the progress of its ranks in this epoch.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._hello = Hello.of(config)
        self.key = config.group_key
        self._strangers = Strangers()
        self._store_port = 0
        self._nnodes, self._each = config.nnodes, config.ranks // config.nnodes
        self._all = config.ranks
        self.host, self._port = config.meeting_place
        self._links: dict[int, NodeLink] = {}
        self._refusals: list[str] = []
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._epoch = 0
        self._was_whole = False
        self.one_left = False
        self.progress_of_ranks: dict[int, list[Progress]] = {}
        self._lost: asyncio.Future[tuple[int, str]] | None = None

    async def start(self) -> None:
        """Begins to listen.

        Raises:
            ConfigError: It cannot.
        """
        try:
            self._server = await asyncio.start_server(ends_with_loop(self._serve), self.host, self._port)
        except OSError as error:
            raise ConfigError(f"--rendezvous {self.host}:{self._port}: cannot listen there: {error}") from error
        logger.info("waiting for %d more nodes at %s:%d", self._nnodes - 1, self.host, self._port)

    async def gather(self) -> None:
        """Waits until all nodes are there.

        Raises:
            ConfigError: At the first start a node did not connect; the error names it, and the reason if known.
        """
        waited = 0.0
        while missing := [node for node in range(1, self._nnodes) if node not in self._links]:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), _REMINDER_SECONDS)
            except TimeoutError:
                waited += _REMINDER_SECONDS
                names = ", ".join(map(self._name, missing))
                why = f"; refused: {'; '.join(self._refusals)}" if self._refusals else ""
                said = f"{names} did not come to {self.host}:{self._port} within {waited:.0f} s{why}"
                if waited >= _FIRST_SECONDS and not self._was_whole:
                    raise ConfigError(said) from None
                logger.warning("%s: waiting", said)
        self._was_whole = True
        self._refusals.clear()

    def begin(self, meeting: Meeting) -> asyncio.Future[tuple[int, str]]:
        """Starts the nodes' ranks; the returned future has the first lost rank and how it was lost."""
        self._epoch += 1
        self.one_left = False
        self.progress_of_ranks = {}
        self._lost = asyncio.get_running_loop().create_future()
        self._store_port = meeting.store.getsockname()[1]
        message = Begin(self._epoch, meeting.steps.getsockname()[1], meeting.salt)
        for node in range(1, self._nnodes):
            if node in self._links:
                self._links[node].send(message)
            else:
                self.one_left = True
                self._lose(node * self._each, f"{self._name(node)} has left")
        return self._lost

    def loaded(self) -> None:
        """Tells the nodes that all ranks have loaded their model."""
        for link in self._links.values():
            link.send(Loaded())

    def end(self) -> None:
        """Has the nodes end their ranks."""
        for link in self._links.values():
            link.send(End())

    async def close(self) -> None:
        """Lets the nodes go. Never fails."""
        if self._server is not None:
            self._server.close()
        for link in list(self._links.values()):
            link.close()

    def _name(self, node: int) -> str:
        first = node * self._each
        ranks = f"rank {first}" if self._each == 1 else f"ranks {first} to {first + self._each - 1}"
        return f"node {node} ({ranks} of {self._all})"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stranger = self._strangers.enter(writer.close)
        try:
            kind, number = await greet(reader, writer, self.key)
        except StrangerError as error:
            logger.debug("a stranger at --rendezvous: %s", error)
            writer.close()
            return
        finally:
            self._strangers.leave(stranger)
        if kind == LINK:
            await self._serve_node(NodeLink(reader, writer, _SILENCE_SECONDS))
        elif kind == STORE and number == self._epoch:
            await join_streams(reader, writer, "127.0.0.1", self._store_port)
        else:
            writer.close()

    async def _serve_node(self, link: NodeLink) -> None:
        node = 0
        try:
            hello = await asyncio.wait_for(link.receive(), HELLO_SECONDS)
            if not isinstance(hello, Hello):
                raise LinkLostError("it said no hello")
            if reason := self._refusal(hello):
                logger.error("node %d is refused: %s", hello.node, reason)
                self._refusals = [*self._refusals[-3:], f"node {hello.node}: {reason}"]
                link.send(Refused(reason))
                return
            node = hello.node
            self._links[node] = link
            self._changed.set()
            logger.info("%s has come", self._name(node))
            while True:
                match await link.receive():
                    case RankEnded(epoch, rank, how):
                        if epoch == self._epoch:
                            self._lose(rank, f"rank {rank} of {self._all} (node {node}): {how}")
                    case ProgressOfRanks(epoch, ranks):
                        if epoch == self._epoch:
                            self.progress_of_ranks[node] = ranks
                    case _:
                        raise LinkLostError("it speaks another language")
        except (LinkLostError, TimeoutError) as error:
            if node:
                logger.error("%s is lost: %s", self._name(node), error)
                self.one_left = True
                self._lose(node * self._each, f"{self._name(node)} is lost: {error}")
        finally:
            if self._links.get(node) is link:
                del self._links[node]
            link.close()

    def _refusal(self, hello: Hello) -> str:
        if not 0 < hello.node < self._nnodes:
            return f"--node-rank {hello.node} is not from 1 to {self._nnodes - 1}"
        if hello.node in self._links:
            return f"node {hello.node} is there already"
        return self._hello.difference(hello)

    def _lose(self, rank: int, how: str) -> None:
        if self._lost is not None and not self._lost.done():
            self._lost.set_result((rank, how))


# A node of a group other than the first: it only runs ranks, on the first node's command.


_AGAIN_SECONDS = 0.5
_LEADER_SILENCE_SECONDS = 5.0
_POLL_SECONDS = 0.1


async def serve_node(config: WorkerConfig, runner: str) -> int:
    """Runs a node until it is stopped.

    Args:
        config: Its configuration; ``node_rank`` is at least 1.
        runner: What makes the runner in the ranks.

    Returns:
        The exit code: 0 after a signal, 1 if the first node does not come or refuses this one.
    """
    stopping = asyncio.ensure_future(stop_signal().wait())
    running = asyncio.ensure_future(_FollowerNode(config, runner).run())
    try:
        await asyncio.wait({stopping, running}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        return 0
    except ConfigError as error:
        logger.error("%s", error)
        return 1
    finally:
        stopping.cancel()
        running.cancel()
        await asyncio.wait({running})


class _FollowerNode:
    def __init__(self, config: WorkerConfig, runner: str) -> None:
        self._config, self._runner = config, runner
        self._host, self._port = config.meeting_place
        self._key = config.group_key
        self._ranks = _NodeRanks(config, runner)

    async def run(self) -> None:
        """Goes to the first node, again and again. Raises ConfigError if it cannot be one of the group."""
        waited, was_there = 0.0, False
        try:
            while True:
                where = f"{self._host}:{self._port}"
                try:
                    reader, writer = await self._reach()
                except StrangerError as error:
                    raise ConfigError(
                        f"--rendezvous-key: the node at {where} is none of this group: {error}"
                    ) from error
                except OSError as error:
                    if waited >= _FIRST_SECONDS and not was_there:
                        raise ConfigError(
                            f"--rendezvous {where}: no first node within {waited:.0f} s: {error}"
                        ) from error
                    waited += _AGAIN_SECONDS
                    await asyncio.sleep(_AGAIN_SECONDS)
                    continue
                was_there = True
                link = NodeLink(reader, writer, _LEADER_SILENCE_SECONDS)
                try:
                    await self._follow(link)
                except LinkLostError as error:
                    logger.error("the first node is lost: %s", error)
                finally:
                    link.close()
                    await self._ranks.end()
                await asyncio.sleep(_AGAIN_SECONDS)
        finally:
            await self._ranks.end()

    async def _reach(self) -> Streams:
        """Connects to the first node. Raises StrangerError, OSError."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            await introduce(reader, writer, self._key, Purpose(LINK, self._config.node_rank))
        except BaseException:
            writer.close()
            raise
        return reader, writer

    async def _follow(self, link: NodeLink) -> None:
        link.send(Hello.of(self._config))
        announce(logger, "following %s:%d", self._host, self._port)
        while True:
            match await link.receive():
                case Refused(reason):
                    raise ConfigError(f"the first node refuses this one: {reason}")
                case Begin() as begin:
                    await self._ranks.end()
                    await self._ranks.begin(begin, link)
                case Loaded():
                    self._ranks.loaded()
                case End():
                    await self._ranks.end()
                case _:
                    raise LinkLostError("it speaks another language")


class StoreTunnel:
    """A port of this host that forwards to the first node's store, in which ranks meet.

    Args:
        host: The first node's address.
        port: Its port.
        key: The group's.
        epoch: The epoch whose ranks meet.
    """

    def __init__(self, host: str, port: int, key: bytes, epoch: int) -> None:
        self._host, self._port = host, port
        self._key, self._purpose = key, Purpose(STORE, epoch)
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Listens; returns the port."""
        self._server = await asyncio.start_server(ends_with_loop(self._serve), "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        """Ends it, and the connections through it."""
        if self._server is not None:
            self._server.close()
        for task in self._serving:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            theirs, back = await asyncio.open_connection(self._host, self._port)
            try:
                await introduce(theirs, back, self._key, self._purpose)
                await join_pair((reader, writer), (theirs, back))
            finally:
                back.close()
        except (OSError, StrangerError) as error:
            logger.debug("the store is not reached: %s", error)
        finally:
            self._serving.discard(task)
            writer.close()


class _NodeRanks:
    """The ranks of this node, of one epoch after the other."""

    def __init__(self, config: WorkerConfig, runner: str) -> None:
        self._config, self._runner = config, runner
        self._key = config.group_key
        self._store: StoreTunnel | None = None
        self._folder: SocketFolder | None = None
        self._ranks: list[Rank] = []
        self._watching: asyncio.Future[None] | None = None
        self._limit = LOST_AT_START_AFTER

    async def begin(self, begin: Begin, link: NodeLink) -> None:
        """Starts them."""
        config = self._config
        host, port = config.meeting_place
        self._store = StoreTunnel(host, port, self._key, begin.epoch)
        store = await self._store.start()
        self._folder = SocketFolder("sapwood-worker-")
        each = config.ranks // config.nnodes
        numbers = range(config.node_rank * each, (config.node_rank + 1) * each)
        self._ranks = [Rank(self._folder.path, number, config.ranks) for number in numbers]
        self._limit = LOST_AT_START_AFTER
        key = derive(self._key, STEPS, begin.salt)
        for rank in self._ranks:
            way = ("--leader", f"{host}:{begin.steps}", "--rendezvous", f"tcp://{host}:{store}")
            flags = ("--rank", str(rank.number), *way)
            command = rank_command("rank_process", self._folder.path, config, self._runner, *flags, key=key)
            rank.start(command)
        logger.info("ranks %d to %d of %d start", numbers[0], numbers[-1], config.ranks)
        self._watching = asyncio.ensure_future(self._watch(begin.epoch, link, self._ranks))

    def loaded(self) -> None:
        """Notes that the ranks have loaded: from now on they may not be silent for long."""
        self._limit = LOST_AFTER

    async def end(self) -> None:
        """Ends them at once."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        for rank in self._ranks:
            if rank.running:
                rank.process.kill()
        for rank in self._ranks:
            await rank.process.wait()
        self._ranks = []
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    async def _watch(self, epoch: int, link: NodeLink, ranks: Sequence[Rank]) -> None:
        silences = [RankSilence(rank, _POLL_SECONDS) for rank in ranks]
        progress_of_ranks = [RankProgress(rank, _POLL_SECONDS) for rank in ranks]
        reported: set[int] = set()
        while True:
            # A rank that was killed or reports a reason is named before ranks that have only lost it.
            ended = [rank for rank in ranks if not rank.running]
            for rank in sorted(ended, key=lambda rank: (not rank.was_killed, not rank.has_spoken)):
                if rank.number not in reported:
                    reported.add(rank.number)
                    link.send(RankEnded(epoch, rank.number, rank.how_it_ended()))
            for each in silences:
                if each.check() > self._limit and each.rank.number not in reported:
                    reported.add(each.rank.number)
                    link.send(RankEnded(epoch, each.rank.number, f"no sign of life for {each.seconds:.1f} s"))
            link.send(ProgressOfRanks(epoch, [each.check() for each in progress_of_ranks]))
            await asyncio.sleep(_POLL_SECONDS)
