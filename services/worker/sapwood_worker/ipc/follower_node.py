"""A node of a group other than the first: runs ranks, as the first node tells it, and nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from sapwood_common.errors import ConfigError
from sapwood_common.network.socket_folder import SocketFolder
from sapwood_common.serving.stop_signal import stop_signal
from sapwood_common.telemetry.logs import announce
from sapwood_worker.config import WorkerConfig
from sapwood_worker.ipc.node_link import (
    Begin,
    End,
    Hello,
    LinkLostError,
    Loaded,
    NodeLink,
    RankEnded,
    Refused,
    Standings,
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
        self._ranks = _NodeRanks(config, runner)

    async def run(self) -> None:
        """Goes to the first node, again and again. Raises ConfigError if it cannot be one of the group."""
        waited, was_there = 0.0, False
        try:
            while True:
                try:
                    reader, writer = await asyncio.open_connection(self._host, self._port)
                except OSError as error:
                    if waited >= _FIRST_SECONDS and not was_there:
                        where = f"{self._host}:{self._port}"
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

    async def _follow(self, link: NodeLink) -> None:
        link.send(Hello.of(self._config))
        announce(logger, "following %s:%d", self._host, self._port)
        while True:
            match await link.receive():
                case Refused(reason):
                    raise ConfigError(f"the first node refuses this one: {reason}")
                case Begin() as begin:
                    await self._ranks.end()
                    self._ranks.begin(begin, link)
                case Loaded():
                    self._ranks.loaded()
                case End():
                    await self._ranks.end()
                case _:
                    raise LinkLostError("it speaks another language")


class _NodeRanks:
    """The ranks of this node, of one epoch after the other."""

    def __init__(self, config: WorkerConfig, runner: str) -> None:
        self._config, self._runner = config, runner
        self._folder: SocketFolder | None = None
        self._ranks: list[Rank] = []
        self._watching: asyncio.Future[None] | None = None
        self._limit = LOST_AT_START_AFTER

    def begin(self, begin: Begin, link: NodeLink) -> None:
        """Starts them."""
        config = self._config
        host, _ = config.meeting_place
        self._folder = SocketFolder("sapwood-worker-")
        each = config.ranks // config.nnodes
        numbers = range(config.node_rank * each, (config.node_rank + 1) * each)
        self._ranks = [Rank(self._folder.path, number, config.ranks) for number in numbers]
        self._limit = LOST_AT_START_AFTER
        for rank in self._ranks:
            way = ("--leader", f"{host}:{begin.steps}", "--rendezvous", f"tcp://{host}:{begin.store}")
            flags = ("--rank", str(rank.number), *way)
            command = rank_command("rank_process", self._folder.path, config, self._runner, *flags, key=begin.key)
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
