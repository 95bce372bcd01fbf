"""Keeps a scheduler process running: starts it, sees its end, starts another."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

from sapwood_common.errors import ConfigError
from sapwood_common.network.socket_folder import SocketFolder
from sapwood_worker.config import WorkerConfig
from sapwood_worker.ipc.liveness import Liveness, ProgressView
from sapwood_worker.ipc.messages import (
    Failed,
    FromScheduler,
    Ready,
    Shutdown,
    ToScheduler,
    encode,
    from_scheduler_decoder,
)
from sapwood_worker.ipc.nodes import Meeting, Nodes
from sapwood_worker.ipc.rank import (
    LOST_AFTER,
    LOST_AT_START_AFTER,
    Progress,
    Rank,
    RankCommand,
    RankProgress,
    RankSilence,
    hung,
    rank_command,
    stuck,
)
from sapwood_worker.records.model_info import ModelInfo

logger = logging.getLogger(__name__)


# Starts the scheduler process, talks to it over ZeroMQ, and notices its end.


MODEL_RUNNER = "sapwood_worker.model.runner.factory:make_runner"
"""``module:function`` that makes the runner in the scheduler process. The front itself never imports torch."""

_LAST_WORDS_SECONDS = 1.0
_NEWS_SECONDS = 3.0
"""Seconds to wait for another host to report why a rank here has lost a rank there; it takes 0.2 s."""
_EXIT_SECONDS = 10.0
_STACKS_SECONDS = 0.1
"""Seconds in which a process writes its threads' stacks."""


class SchedulerProcess:
    """The scheduler process and the sockets to it.

    Life cycle: construct, :meth:`start`, :meth:`ready`, :meth:`run` in a task, :meth:`stop`.

    Args:
        config: The worker's configuration, handed on as it is.
        runner: ``module:function`` that makes the runner there from the configuration.
        nodes: The other hosts with ranks; None: there are none.

    Attributes:
        size: Ranks on all hosts.
        ranks: The process, and those on this host that run the model together with it.
    """

    def __init__(self, config: WorkerConfig, runner: str = MODEL_RUNNER, nodes: Nodes | None = None) -> None:
        self._config = config
        self._runner = runner
        self._folder = SocketFolder("sapwood-worker-")
        self._nodes = nodes
        self.size = config.ranks
        self.ranks = [Rank(self._folder.path, rank, self.size) for rank in range(self.size // config.nnodes)]
        self._context = zmq.asyncio.Context()
        self._outbox: zmq.Socket[bytes] = zmq.Context.shadow(self._context).socket(zmq.PUSH)
        self._inbox = self._context.socket(zmq.PULL)
        self._ready = False
        self._elsewhere: asyncio.Future[tuple[int, str]] | None = None
        self._lost: int | None = None
        self._reason = ""

    @property
    def progress(self) -> ProgressView:
        """Seconds that the process has been at its current step."""
        return self.ranks[0].progress

    @property
    def progress_elsewhere(self) -> list[Progress]:
        """The progress of the ranks on other hosts."""
        return [] if self._nodes is None else [each for node in self._nodes.progress_of_ranks.values() for each in node]

    @property
    def alike(self) -> int:
        """How many neighbouring ranks compute the same work."""
        return 1 if self._config.data_parallel_attention else self._config.tensor_parallel

    def start(self) -> None:
        """Binds the sockets and starts the processes, unless other hosts come first (:meth:`meet`). Called on the event loop."""
        for box, name in ((self._outbox, "to-scheduler"), (self._inbox, "from-scheduler")):
            box.set_hwm(0)
            box.setsockopt(zmq.LINGER, 0)
            box.bind(f"ipc://{self._folder.path}/{name}")
        if self._nodes is None:
            self._launch()

    async def meet(self) -> None:
        """Starts the processes once the other hosts are there, if there are any.

        Raises:
            ConfigError: One does not come; the message says which.
        """
        if self._nodes is not None:
            await self._nodes.gather()
            self._launch()

    def _launch(self) -> None:
        """Starts the scheduler process, and the other ranks' processes, each with a socket to it."""
        leader, *followers = self.ranks
        where = f"file://{self._folder.path}/rendezvous"
        meeting: Meeting | None = None
        remote: list[str] = []
        if self._nodes is not None:
            meeting = Meeting(self._nodes.host, self._nodes.key)
            store, steps = meeting.store.fileno(), meeting.steps.fileno()
            where = f"tcp://{self._nodes.host}:{meeting.store.getsockname()[1]}"
            remote = ["--store", str(store), "--steps", str(steps)]
        pairs = [socket.socketpair() for _ in followers]
        ends = [ours.fileno() for ours, _ in pairs]
        flags = ("--followers", ",".join(map(str, ends)), "--rendezvous", where, *remote)
        given = ends if meeting is None else [*ends, meeting.store.fileno(), meeting.steps.fileno()]
        key = b"" if meeting is None else meeting.key
        leader.start(self._command("scheduler_process", *flags, key=key), given)
        for rank, (_, theirs) in zip(followers, pairs, strict=True):
            flags = ("--rank", str(rank.number), "--leader", str(theirs.fileno()), "--rendezvous", where)
            rank.start(self._command("rank_process", *flags), [theirs.fileno()])
        for pair in pairs:
            for end in pair:
                end.close()
        if self._nodes is not None and meeting is not None:
            self._elsewhere = self._nodes.begin(meeting)
            meeting.close()

    def _command(self, module: str, *flags: str, key: bytes = b"") -> RankCommand:
        return rank_command(module, self._folder.path, self._config, self._runner, *flags, key=key)

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
                what = "the scheduler process" if self.size == 1 else "the group of ranks"
                raise ConfigError(f"{what} ended while starting: {self._reason}")
            match first.result():
                case Ready(info):
                    self._ready = True
                    if self._nodes is not None:
                        self._nodes.loaded()
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
                await reader  # it ends only through a bug in Sapwood
        finally:
            reader.cancel()
            exited.cancel()
        self.kill()
        return self._reason

    @property
    def lost(self) -> int | None:
        """The rank by which :meth:`run` has ended; None: it has not."""
        return self._lost

    @property
    def waits_for_a_node(self) -> bool:
        """Whether it has ended because another host is gone; that host may return."""
        return self._nodes is not None and self._nodes.one_left

    def kill(self, reason: str = "", rank: int | None = None) -> None:
        """Kills the processes at once; :meth:`run` then returns, with the reason and the rank if they are given."""
        self._reason = self._reason or reason
        self._lost = rank if self._lost is None else self._lost
        if self._nodes is not None:
            self._nodes.end()
        for each in self.ranks:
            if each.running:
                each.process.kill()

    async def end_hung(self, rank: int, seconds: float) -> None:
        """Ends the processes because a rank made no progress for ``seconds``; if it is on this host, its log says where it
        hangs."""
        here = next((each for each in self.ranks if each.number == rank), None)
        if here is not None and here.running:
            logger.error("%s hangs: its threads' stacks follow", here.name)
            here.process.show_stacks()
            await asyncio.sleep(_STACKS_SECONDS)
        self.kill(
            f"rank {rank} of {self.size} hangs: others wait for it, and for {seconds:.1f} s it has come no further",
            rank,
        )

    async def stop(self) -> None:
        """Asks the process to exit, kills it if it does not or is still loading, and removes the sockets. Never fails."""
        leader = self.ranks[0]
        if leader.running and self._ready and self._lost is None:
            self.send(Shutdown())
            try:
                await asyncio.wait_for(leader.process.wait(), _EXIT_SECONDS)
            except TimeoutError:
                logger.warning("the scheduler process does not exit: killing it")
        self.kill()  # followers hold nothing that needs an orderly end
        for rank in self.ranks:
            if rank.running:
                await rank.process.wait()
        self._inbox.close()
        self._outbox.close()
        self._context.term()
        self._folder.remove()

    async def _first_end(self) -> None:
        """Waits until one of the processes has ended, here or on another host, and notes which and how."""
        waits = {asyncio.ensure_future(rank.process.wait()): rank for rank in self.ranks}
        elsewhere = self._elsewhere
        try:
            every: list[asyncio.Future[Any]] = [*waits, *([] if elsewhere is None else [elsewhere])]
            await asyncio.wait(every, return_when=asyncio.FIRST_COMPLETED)
            # The others end soon after, because of it. Which one was the first is seen once all that have ended by now are known.
            gone = [each for each, rank in waits.items() if not each.done() and rank.process.is_gone]
            if gone:
                await asyncio.wait(gone, timeout=_LAST_WORDS_SECONDS)
            ended = [rank for each, rank in waits.items() if each.done()]
            first = min(ended, key=lambda rank: (not rank.was_killed, not rank.has_spoken, rank.number), default=None)
            knows = first is not None and (first.was_killed or first.has_spoken)
            if elsewhere is not None and not knows:  # it has only lost another rank; that rank's host reports the end
                await asyncio.wait({elsewhere}, timeout=_NEWS_SECONDS)
        finally:
            for wait in waits:
                wait.cancel()
        if elsewhere is not None and elsewhere.done() and not knows:
            self._note(*elsewhere.result())
        elif first is not None:
            how = first.how_it_ended()
            self._note(first.number, how if self.size == 1 else f"{first.name}: {how}")

    def _note(self, rank: int, how: str) -> None:
        self._reason = self._reason or how
        self._lost = rank if self._lost is None else self._lost

    async def _receive(self) -> FromScheduler:
        message: FromScheduler = from_scheduler_decoder.decode(await self._inbox.recv())
        return message

    async def _read(self, receive: Callable[[FromScheduler], None]) -> None:
        while True:
            receive(await self._receive())


_POLL_SECONDS = 0.1
_LEAST_FROZEN = 0.5
"""A silence shorter than this many seconds is not reported, because the heartbeat is also late when CPU is short."""
_MOST_PATIENCE = 16.0
"""After repeated ends of hung ranks, the time limit for a hang grows up to this multiple."""


class Supervisor:
    """Holds the current scheduler process.

    Life cycle: construct, :meth:`start`, :meth:`ready`, then :meth:`run` and, when that returns, :meth:`start` and
    :meth:`ready` again; :meth:`stop` in the end.

    Args:
        make: Makes a process.
        watchdog_timeout: Seconds after which a step, or a process without a sign of life, counts as stuck.
        watchdog_restart: Seconds after which the process is ended.
    """

    def __init__(self, make: Callable[[], SchedulerProcess], watchdog_timeout: float, watchdog_restart: float) -> None:
        self._make = make
        self._timeout = watchdog_timeout
        self._restart = watchdog_restart
        self._process: SchedulerProcess | None = None
        self._pauses = Pauses(time.monotonic)
        self._was_ready = False
        self._patience = 1.0

    async def start(self) -> None:
        """Starts a process after the last one is wholly gone; after a pause, if processes end again and again."""
        await self.stop()
        if seconds := self._pauses.seconds:
            logger.error("it has ended %d times in a row: it starts again in %.0f s", self._pauses.ends, seconds)
            await asyncio.sleep(seconds)
        self._process = self._make()
        self._process.start()

    async def ready(self) -> ModelInfo:
        """Waits until the process has loaded its model.

        Where it had done so before, it is started until it does. If a host with some of the ranks leaves, the supervisor waits
        for it and starts all ranks again.

        Raises:
            ConfigError: It cannot.
        """
        while True:
            await self._current.meet()
            watching = asyncio.ensure_future(self._watch_start(self._current))
            try:
                info = await self._current.ready()
            except ConfigError as error:
                if not (self._was_ready or self._current.waits_for_a_node):
                    raise
                logger.error("%s", error)
                if not self._current.waits_for_a_node:
                    self._pauses.has_ended()
            else:
                self._pauses.is_up()
                self._was_ready = True
                return info
            finally:
                watching.cancel()
            await self.start()

    def send(self, message: ToScheduler) -> None:
        """Queues a message for the process; never blocks."""
        self._current.send(message)

    async def run(
        self, receive: Callable[[FromScheduler], None], liveness: Liveness, on_change: Callable[[], None]
    ) -> str:
        """Runs until the process ends; returns how it ended.

        Args:
            receive: Gets each message.
            liveness: Kept up to date.
            on_change: Called when ``liveness.well`` has changed.
        """
        watching = asyncio.ensure_future(self._watch(self._current, liveness, on_change))
        try:
            return await self._current.run(receive)
        finally:
            watching.cancel()
            if self._current.lost is not None:
                liveness.losses[self._current.lost] += 1
            liveness.reset()
            on_change()
            self._pauses.has_ended()

    async def stop(self) -> None:
        """Ends the process, if there is one. Never fails."""
        if self._process is not None:
            await self._process.stop()
            self._process = None

    @property
    def _current(self) -> SchedulerProcess:
        assert self._process is not None
        return self._process

    async def _watch_start(self, process: SchedulerProcess) -> None:
        silences = [RankSilence(rank, _POLL_SECONDS) for rank in process.ranks]
        while not _end_if_lost(process, silences, LOST_AT_START_AFTER):
            await asyncio.sleep(_POLL_SECONDS)
            for each in silences:
                each.check()

    async def _watch(self, process: SchedulerProcess, liveness: Liveness, on_change: Callable[[], None]) -> None:
        interval = min(_POLL_SECONDS, self._timeout / 4)
        silences = [RankSilence(rank, interval) for rank in process.ranks]
        progress_of_ranks = [RankProgress(rank, interval) for rank in process.ranks if process.size > 1]
        while True:
            silent = [each.check() for each in silences]
            was_well, was_stuck = liveness.well, liveness.stuck
            liveness.silent = [seconds if seconds >= _LEAST_FROZEN else 0.0 for seconds in silent]
            liveness.resident = [rank.process.resident_bytes() for rank in process.ranks]
            liveness.frozen = max(liveness.silent)
            liveness.step = process.progress.seconds()
            worst = max(liveness.frozen, liveness.step)
            liveness.stuck = worst > self._timeout
            if liveness.stuck and not was_stuck:
                logger.error("nothing done for %.1f s: the worker is stuck", worst)
            elif was_stuck and not liveness.stuck:
                logger.warning("the worker is no longer stuck")
            elif liveness.well != was_well:
                logger.warning("the scheduler process %s", "lives" if liveness.well else "gives no sign of life")
            if liveness.well != was_well:
                on_change()
            if _end_if_lost(process, silences, LOST_AFTER):
                return
            found = [*(each.check() for each in progress_of_ranks), *process.progress_elsewhere]
            rank, seconds = hung(found, process.alike, self._patience), stuck(found, self._patience)
            if rank is not None or seconds is not None:
                self._patience = min(2 * self._patience, _MOST_PATIENCE)  # were it only slow, it would be so again
                if rank is not None:
                    await process.end_hung(rank.rank, rank.seconds)
                else:
                    process.kill(f"the ranks' devices hang: all {process.size} have had a step for {seconds:.1f} s")
                return
            if worst > self._restart:
                logger.error("nothing done for %.1f s: its process is ended", worst)
                process.kill(f"nothing done for {worst:.1f} s")
                return
            await asyncio.sleep(interval)


def _end_if_lost(process: SchedulerProcess, silences: list[RankSilence], limit: float) -> bool:
    """Ends the processes of a group if one of them has sent no heartbeat for this many seconds; returns whether it ended them."""
    for each in silences:
        if process.size > 1 and each.seconds > limit:
            process.kill(f"{each.rank.name} has given no sign of life for {each.seconds:.1f} s", each.rank.number)
            return True
    return False


# Pauses before restarts of something that ends again and again.
LASTING_SECONDS = 120.0
"""What was up for so long did not end because of its start."""
_AT_ONCE = 2
_FIRST_SECONDS = 2.0
_LONGEST_SECONDS = 60.0


class Pauses:
    """How long to wait before a process that ended is started again.

    Not at all after the first two ends in a row, then 2 s, twice as long after each further one, and 60 s at most.

    Args:
        clock: Seconds, monotonic.

    Attributes:
        ends: Ends in a row; the process was not up for ``LASTING_SECONDS`` before any of them but the first.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._up_since: float | None = None
        self.ends = 0

    def is_up(self) -> None:
        """Notes that the process has started."""
        self._up_since = self._clock()

    def has_ended(self) -> None:
        """Notes that the process has ended, or could not start."""
        lasted = self._up_since is not None and self._clock() - self._up_since >= LASTING_SECONDS
        self._up_since = None
        self.ends = 1 if lasted else self.ends + 1

    @property
    def seconds(self) -> float:
        """How long to wait before the next restart."""
        beyond = self.ends - _AT_ONCE
        return 0.0 if beyond <= 0 else min(_FIRST_SECONDS * 2.0 ** min(beyond - 1, 30), _LONGEST_SECONDS)
