"""Starts the scheduler process, talks to it over ZeroMQ, and notices its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable

import zmq
import zmq.asyncio

from sapwood_common.errors import ConfigError
from sapwood_common.network.socket_folder import SocketFolder
from sapwood_worker.config import WorkerConfig
from sapwood_worker.ipc.messages import (
    Failed,
    FromScheduler,
    Ready,
    Shutdown,
    ToScheduler,
    encode,
    from_scheduler_decoder,
)
from sapwood_worker.ipc.progress import ProgressView
from sapwood_worker.ipc.rank import Rank
from sapwood_worker.records.model_info import ModelInfo

logger = logging.getLogger(__name__)

MODEL_RUNNER = "sapwood_worker.model.runner.factory:make_runner"
"""``module:function`` that makes the runner in the scheduler process. The front itself never imports torch."""

_LAST_WORDS_SECONDS = 1.0
_EXIT_SECONDS = 10.0


class SchedulerProcess:
    """The scheduler process and the sockets to it.

    Life cycle: construct, :meth:`start`, :meth:`ready`, :meth:`run` in a task, :meth:`stop`.

    Args:
        config: The worker's configuration, handed on as it is.
        runner: ``module:function`` that makes the runner there from the configuration.
    """

    def __init__(self, config: WorkerConfig, runner: str = MODEL_RUNNER) -> None:
        self._config = config
        self._runner = runner
        self._folder = SocketFolder("sapwood-worker-")
        self.ranks = [Rank(self._folder.path, rank, config.ranks) for rank in range(config.ranks)]
        """The process, and those that run the model together with it."""
        self._context = zmq.asyncio.Context()
        self._outbox: zmq.Socket[bytes] = zmq.Context.shadow(self._context).socket(zmq.PUSH)
        self._inbox = self._context.socket(zmq.PULL)
        self._ready = False
        self._ended: Rank | None = None
        self._reason = ""

    @property
    def progress(self) -> ProgressView:
        """For how long the process has been at its current step."""
        return self.ranks[0].progress

    def start(self) -> None:
        """Starts the process, and those of the other ranks with a socket to it each. Called on the event loop."""
        for box, name in ((self._outbox, "to-scheduler"), (self._inbox, "from-scheduler")):
            box.set_hwm(0)
            box.setsockopt(zmq.LINGER, 0)
            box.bind(f"ipc://{self._folder.path}/{name}")
        leader, *followers = self.ranks
        pairs = [socket.socketpair() for _ in followers]
        ends = [ours.fileno() for ours, _ in pairs]
        leader.start(self._command("scheduler_process", "--followers", ",".join(map(str, ends))), ends)
        for rank, (_, theirs) in zip(followers, pairs, strict=True):
            flags = ("--rank", str(rank.number), "--leader", str(theirs.fileno()))
            rank.start(self._command("rank_process", *flags), [theirs.fileno()])
        for pair in pairs:
            for end in pair:
                end.close()

    def _command(self, module: str, *flags: str) -> list[str]:
        config_class = type(self._config)
        return [
            *(sys.executable, "-m", f"sapwood_worker.core.{module}"),
            *("--folder", str(self._folder.path)),
            *("--parent", str(os.getpid())),
            *("--config-class", f"{config_class.__module__}:{config_class.__qualname__}"),
            *("--config", self._config.model_dump_json()),
            *("--runner", self._runner),
            *flags,
        ]

    async def ready(self) -> ModelInfo:
        """Waits until the process has loaded its model.

        Raises:
            ConfigError: It could not start; the message says why.
        """
        exited = asyncio.ensure_future(self._first_end())
        first = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait({exited, first}, return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                await asyncio.wait({first}, timeout=_LAST_WORDS_SECONDS)
            if not first.done():
                what = "the scheduler process" if len(self.ranks) == 1 else "the group of ranks"
                raise ConfigError(f"{what} ended while starting: {self._how_it_ended()}")
            match first.result():
                case Ready(info):
                    self._ready = True
                    return info
                case Failed(message):
                    raise ConfigError(message)
                case other:
                    raise AssertionError(f"unexpected first message {other}")
        finally:
            exited.cancel()
            first.cancel()

    def send(self, message: ToScheduler) -> None:
        """Queues a message; never blocks. Once the process has ended, the message is dropped."""
        with contextlib.suppress(zmq.Again):  # nobody is at the other end
            self._outbox.send(encode(message), zmq.NOBLOCK)

    async def run(self, receive: Callable[[FromScheduler], None]) -> str:
        """Hands each message to ``receive`` until one of the processes ends, and ends the others; returns how it ended."""
        exited = asyncio.ensure_future(self._first_end())
        reader = asyncio.ensure_future(self._read(receive))
        try:
            await asyncio.wait({exited, reader}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                await reader  # it ends only by an error of ours
        finally:
            reader.cancel()
            exited.cancel()
        self.kill()
        return self._how_it_ended()

    @property
    def lost(self) -> Rank | None:
        """The rank by which :meth:`run` has ended; None: it has not."""
        return self._ended

    def kill(self, reason: str = "", rank: Rank | None = None) -> None:
        """Ends the processes at once, whatever they do; :meth:`run` returns, with the reason and the rank if they are given."""
        self._reason = self._reason or reason
        self._ended = self._ended or rank
        for each in self.ranks:
            if each.running:
                each.process.kill()

    async def stop(self) -> None:
        """Asks the process to exit, kills it if it does not or is still loading, and removes the sockets. Never fails."""
        leader = self.ranks[0]
        if leader.running and self._ready and self._ended is None:
            self.send(Shutdown())
            try:
                await asyncio.wait_for(leader.process.wait(), _EXIT_SECONDS)
            except TimeoutError:
                logger.warning("the scheduler process does not exit: killing it")
        self.kill()  # followers hold nothing that they would have to put away
        for rank in self.ranks:
            if rank.running:
                await rank.process.wait()
        self._inbox.close()
        self._outbox.close()
        self._context.term()
        self._folder.remove()

    async def _first_end(self) -> Rank:
        """Waits until one of the processes has ended."""
        waits = {asyncio.ensure_future(rank.process.wait()): rank for rank in self.ranks}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            # The others end soon after, because of it; which one began it is seen when all that have ended by now are known.
            gone = [each for each, rank in waits.items() if each not in done and rank.process.is_gone]
            if gone:
                done |= (await asyncio.wait(gone, timeout=_LAST_WORDS_SECONDS))[0]
        finally:
            for wait in waits:
                wait.cancel()
        if self._ended is None:
            ended = (waits[each] for each in done)
            self._ended = min(ended, key=lambda rank: (not rank.was_killed, not rank.has_spoken, rank.number))
        return self._ended

    def _how_it_ended(self) -> str:
        if self._reason:
            return self._reason
        assert self._ended is not None
        how = self._ended.how_it_ended()
        return how if len(self.ranks) == 1 else f"{self._ended.name}: {how}"

    async def _receive(self) -> FromScheduler:
        message: FromScheduler = from_scheduler_decoder.decode(await self._inbox.recv())
        return message

    async def _read(self, receive: Callable[[FromScheduler], None]) -> None:
        while True:
            receive(await self._receive())
