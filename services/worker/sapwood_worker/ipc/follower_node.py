"""A node of a group other than the first: runs ranks, as the first node tells it, and nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from sapwood_common.errors import ConfigError
from sapwood_common.network.keyed_ways import Purpose, StrangerError, derive, introduce
from sapwood_common.network.socket_folder import SocketFolder
from sapwood_common.serving.stop_signal import stop_signal
from sapwood_common.telemetry.logs import announce
from sapwood_worker.config import WorkerConfig
from sapwood_worker.ipc.node_link import (
    LINK,
    STEPS,
    STORE,
    Begin,
    End,
    Hello,
    LinkLostError,
    Loaded,
    NodeLink,
    RankEnded,
    Refused,
    Standings,
    Streams,
    join_pair,
)
from sapwood_worker.ipc.rank import LOST_AFTER, LOST_AT_START_AFTER, Rank, RankSilence, rank_command
from sapwood_worker.ipc.standing import RankStanding

logger = logging.getLogger(__name__)

_FIRST_SECONDS = 120.0
"""Seconds for which the first node is looked for at the start. Once it was there it is waited for without end."""
_AGAIN_SECONDS = 0.5
_SILENCE_SECONDS = 5.0
_POLL_SECONDS = 0.1


async def serve_node(config: WorkerConfig, runner: str) -> int:
    """Runs a node until it is told to stop.

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
                link = NodeLink(reader, writer, _SILENCE_SECONDS)
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
    """A port of this host's own behind which the first node's store is, by which ranks meet.

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
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
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
        standings = [RankStanding(rank, _POLL_SECONDS) for rank in ranks]
        told: set[int] = set()
        while True:
            # Who was killed or says why comes before those that have only lost it.
            ended = [rank for rank in ranks if not rank.running]
            for rank in sorted(ended, key=lambda rank: (not rank.was_killed, not rank.has_spoken)):
                if rank.number not in told:
                    told.add(rank.number)
                    link.send(RankEnded(epoch, rank.number, rank.how_it_ended()))
            for each in silences:
                if each.check() > self._limit and each.rank.number not in told:
                    told.add(each.rank.number)
                    link.send(RankEnded(epoch, each.rank.number, f"no sign of life for {each.seconds:.1f} s"))
            link.send(Standings(epoch, [each.check() for each in standings]))
            await asyncio.sleep(_POLL_SECONDS)
