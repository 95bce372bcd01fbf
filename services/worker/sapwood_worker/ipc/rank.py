"""A rank's process and its progress, and the search for a rank that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sapwood_common.python_process import python_command, python_environment
from sapwood_net.pacing.silence import Silence
from sapwood_worker.config import WorkerConfig
from sapwood_worker.ipc.liveness import ProgressView, progress_file
from sapwood_worker.records.ranks import AT_REST, DEVICE, Shown

# A child process that an event loop can wait for, started without running anybody's fork handlers.


_PAGE = os.sysconf("SC_PAGE_SIZE")
_TELLS = Path("/proc/self/stat").exists()


class ChildProcess:
    """A Python process that is a child of this one.

    It is not asyncio's: uvloop forks, and a fork in a process where gRPC's threads run gives a child that now and then ends
    by SIGSEGV before it has become the program. ``subprocess`` calls vfork, which runs no fork handlers. A thread waits for
    the end.

    Args:
        command: The arguments of Python.
        said: The text for its standard input, which other users cannot see, unlike a command line.
        descriptors: File descriptors that it inherits, with the same numbers.
    """

    def __init__(self, command: Sequence[str], said: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        with tempfile.TemporaryFile() as file:  # not a pipe: it never blocks
            file.write(said)
            file.seek(0)
            self._process = subprocess.Popen(
                python_command(*command), stdin=file, pass_fds=descriptors, env=python_environment()
            )
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        threading.Thread(target=self._watch, args=(asyncio.get_running_loop(),), daemon=True).start()

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the number of the signal that ended it, or None while it runs."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """Waits for the end; returns :attr:`returncode`. May be cancelled, and be called by several."""
        return await asyncio.shield(self._ended)

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, or is about to, according to the kernel; False if the kernel does not say."""
        return _TELLS and self._stat()[:1] in ([], [b"Z"], [b"X"])

    def cpu_ticks(self) -> int:
        """The CPU time that it has used, in the kernel's ticks; 0 where the kernel does not tell."""
        fields = self._stat()
        return int(fields[11]) + int(fields[12]) if fields else 0

    def state(self) -> str:
        """What its main thread does: ``R`` runs or waits for a CPU, ``S`` sleeps, ``D`` waits for a disk, ``T`` is stopped;
        ``R`` where the kernel does not tell."""
        fields = self._stat()
        return fields[0].decode() if fields else "R"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it; False where the kernel does not tell."""
        return self.state() in ("T", "t")

    @property
    def wants_cpu(self) -> bool:
        """Whether one of its threads runs or waits for a CPU; False where the kernel does not tell."""
        try:
            threads = [each.name for each in Path(f"/proc/{self._process.pid}/task").iterdir()]
        except OSError:
            return False
        return any(_stat_of(f"{self._process.pid}/task/{thread}")[:1] == [b"R"] for thread in threads)

    def resident_bytes(self) -> int:
        """The memory that it uses, including shared memory; 0 if the kernel does not say."""
        fields = self._stat()
        return int(fields[21]) * _PAGE if fields else 0

    def show_stacks(self) -> None:
        """Makes it write its threads' stacks to standard error (``core/child.py``)."""
        self._process.send_signal(signal.SIGUSR2)

    def kill(self) -> None:
        """Sends SIGKILL; nothing happens after the end."""
        self._process.kill()

    def _stat(self) -> list[bytes]:
        return _stat_of(str(self._process.pid))

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._ended.set_result, code)


def _stat_of(task: str) -> list[bytes]:
    """The kernel's statistics of a process or thread, from its state on; empty if there are none."""
    try:
        stat = Path(f"/proc/{task}/stat").read_bytes()
    except OSError:
        return []
    return stat.rpartition(b")")[2].split()  # the name before may hold anything


def exit_reason(folder: Path, rank: int) -> Path:
    """The file in which a process leaves the reason for its end."""
    return folder / f"last-words-{rank}"


LOST_AFTER, LOST_AT_START_AFTER = 1.5, 30.0
"""Seconds without a heartbeat after which one of several ranks is lost, because the others only wait for it. While a rank loads
its model, a slow disk may stop it for longer."""
DOUBTFUL = 0.3
"""Seconds without a heartbeat after which the kernel is asked what the process does; that takes a millisecond."""


class RankTask(msgspec.Struct, frozen=True):
    """The standard input of a process that runs the model; it may hold secrets.

    Attributes:
        config_class: ``module:class`` of the configuration.
        config: The worker's configuration, as JSON.
        runner: ``module:function`` that makes its runner.
        key: The key that ranks of other hosts send first when they connect to rank 0; empty: there are no such ranks.
    """

    config_class: str
    config: str
    runner: str
    key: bytes = b""


@dataclass(frozen=True)
class RankCommand:
    """The command line and input that start a process for the model or a part of it.

    Attributes:
        arguments: Python's, which other users of the machine can see.
        task: Its standard input, a :class:`RankTask` as JSON.
    """

    arguments: list[str]
    task: bytes


def rank_command(
    module: str, folder: Path, config: WorkerConfig, runner: str, *flags: str, key: bytes = b""
) -> RankCommand:
    """The command of a process that runs the model or a part of it.

    Args:
        module: The module of ``sapwood_worker.core`` that it runs.
        folder: Where its files are.
        config: The worker's configuration.
        runner: ``module:function`` that makes its runner.
        *flags: Its own flags.
        key: As in :class:`RankTask`.
    """
    config_class = f"{type(config).__module__}:{type(config).__qualname__}"
    task = RankTask(config_class, config.model_dump_json(), runner, key)
    arguments = ["-m", f"sapwood_worker.core.{module}", "--folder", str(folder), "--parent", str(os.getpid()), *flags]
    return RankCommand(arguments, msgspec.json.encode(task))


class Rank:
    """The scheduler process (rank 0), or one that follows it.

    Args:
        folder: Where the sockets are; the process's progress and its last words are files there.
        number: The rank.
        size: Ranks in all.

    Attributes:
        name: For logs and errors.
        progress: How long it has been at its current step.
        number: The argument.
    """

    def __init__(self, folder: Path, number: int, size: int) -> None:
        self.number = number
        self.name = f"rank {number} of {size}" if size > 1 else "the scheduler process"
        self.progress = ProgressView(folder / progress_file(number))
        self._words = exit_reason(folder, number)
        self._process: ChildProcess | None = None

    def start(self, command: RankCommand, descriptors: Sequence[int] = ()) -> None:
        """Starts the process, which gets these file descriptors. Called on the event loop."""
        self._process = ChildProcess(command.arguments, command.task, descriptors)

    @property
    def process(self) -> ChildProcess:
        """The process, once it was started."""
        assert self._process is not None
        return self._process

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def was_killed(self) -> bool:
        """Whether a signal has ended it."""
        return (self.process.returncode or 0) < 0

    @property
    def has_spoken(self) -> bool:
        """Whether it has left last words."""
        return self._words.is_file()

    def signs_of_life(self) -> tuple[int, int]:
        """The heartbeat and the CPU time in kernel ticks. One of them has changed if the process has run since the last call.

        CPU time is needed too, because the heartbeat stops while code computes with the interpreter's lock held.
        """
        return self.progress.heartbeat(), self.process.cpu_ticks()

    def how_it_ended(self) -> str:
        """How the rank ended, in words for people."""
        if self.has_spoken:
            return self._words.read_text()
        code = self.process.returncode
        return f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"


class RankSilence:
    """Seconds since a rank's last heartbeat. A rank whose threads wait for a CPU does not count as silent, because the machine
    is busy. For a stopped rank, time in which this process could not look counts too.

    Args:
        rank: The rank.
        interval: Seconds between calls of :meth:`check`.

    Attributes:
        rank: The argument.
        seconds: Seconds without a heartbeat, at the last :meth:`check`.
    """

    def __init__(self, rank: Rank, interval: float) -> None:
        self.rank = rank
        self.seconds = 0.0
        self._silence = Silence(interval, time.monotonic)
        self._signs = rank.signs_of_life()
        self._heard = time.monotonic()

    def check(self) -> float:
        """Seconds without a sign of life."""
        before, self._signs = self._signs, self.rank.signs_of_life()
        if self._signs != before:
            self._hear()
        self.seconds = self._silence.check()
        if self.seconds >= DOUBTFUL:
            process = self.rank.process
            if process.is_stopped:
                self.seconds = time.monotonic() - self._heard
            elif process.wants_cpu:
                self._hear()
                self.seconds = 0.0
        return self.seconds

    def _hear(self) -> None:
        self._silence.heard()
        self._heard = time.monotonic()


# Which rank of a group hangs: the others wait for it, it waits for no rank, and it makes no progress.


_TICKS = os.sysconf("SC_CLK_TCK")
_LEAST_SECONDS = 1.5
"""Seconds that a rank may always take, even if the others were faster."""
_LEAST_DEVICE_SECONDS = 30.0
"""Seconds that devices may always take for a step which all ranks have launched."""
_MARGIN = 4.0
"""A rank may take this many times as long as the others for the same work."""


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """How far a rank has come.

    Attributes:
        rank: Its number.
        shown: What it shows of itself.
        seconds: Seconds without progress, minus those in which it waited for a CPU or a disk.
    """

    rank: int
    shown: Shown
    seconds: float


class RankProgress:
    """Looks how far a rank has come.

    Args:
        rank: The rank, which has started.
        interval: Seconds between calls of :meth:`check`.
    """

    def __init__(self, rank: Rank, interval: float) -> None:
        self._rank = rank
        self._most_a_check = 2 * interval
        self._seconds = 0.0
        self._moves = -1
        self._ticks = rank.process.cpu_ticks()
        self._checked = time.monotonic()

    def check(self) -> Progress:
        """How far it has come by now."""
        process, shown = self._rank.process, self._rank.progress.waits()
        now, ticks = time.monotonic(), process.cpu_ticks()
        passed, used = now - self._checked, (ticks - self._ticks) / _TICKS
        self._checked, self._ticks = now, ticks
        if shown.moves != self._moves:
            self._moves, self._seconds = shown.moves, 0.0
        else:
            state = process.state()
            if state == "S" and self._seconds >= DOUBTFUL and process.wants_cpu:
                state = "R"  # the main thread waits for another thread that wants to compute
            counts = {"R": min(used, passed), "S": passed}.get(state, 0.0)
            self._seconds += min(counts, self._most_a_check)
        return Progress(self._rank.number, shown, self._seconds)


def hung(progress_of_ranks: Sequence[Progress], stage: int, patience: float) -> Progress | None:
    """The rank that hangs, if one does.

    Ranks of a stage compute the same work: a rank hangs if it takes far longer than the others took, however long a step is.
    Ranks of different stages compute different work: such a rank is compared with its own earlier steps. The same holds for
        asynchronous devices: there a rank hangs if it still launches a step that another rank has launched.

    Args:
        progress_of_ranks: Of all ranks.
        stage: Ranks that compute the same, next to each other; 1: each computes something else.
        patience: Factor of all limits.
    """
    for waiting in progress_of_ranks:
        for rank in progress_of_ranks:
            alike = rank.rank // stage == waiting.rank // stage
            if waiting.shown.launched:
                limit = max(waiting.shown.allowed, rank.shown.allowed)
                behind = _launches_still(rank.shown, waiting.shown)
            else:
                limit = _MARGIN * waiting.shown.last if alike else rank.shown.allowed
                behind = _is_waited_for(rank, waiting, alike=alike)
            if behind and min(rank.seconds, waiting.seconds) >= patience * max(_LEAST_SECONDS, limit):
                return rank
    return None


def stuck(progress_of_ranks: Sequence[Progress], patience: float) -> float | None:
    """Seconds without progress on any device, if a device that all ranks have given work is far too late; None: no device is.
    The hosts cannot tell which device is at fault.

    Args:
        progress_of_ranks: Of all ranks.
        patience: Factor of all limits.
    """
    if not any(each.shown.waits_for == DEVICE for each in progress_of_ranks):
        return None
    seconds = min(each.seconds for each in progress_of_ranks)
    limit = max(_LEAST_DEVICE_SECONDS, *(each.shown.allowed for each in progress_of_ranks))
    launched = {each.shown.launched for each in progress_of_ranks}
    return seconds if len(launched) == 1 and seconds >= patience * limit else None


def _launches_still(rank: Shown, other: Shown) -> bool:
    """Whether the rank has not yet launched a step that another rank, which is not computing itself, has launched."""
    return rank.launched < other.launched and rank.waits_for in (0, AT_REST) and other.waits_for != 0


def _is_waited_for(rank: Progress, waiting: Progress, *, alike: bool) -> bool:
    """Whether another rank waits for it while it waits for no rank, or only for work that the waiting ranks have done long
    ago."""
    wanted = waiting.shown.waits_for
    if wanted in (0, AT_REST) or not wanted >> rank.rank & 1:
        return False
    if rank.shown.waits_for in (0, AT_REST):
        # Between steps the leader runs operators' commands, which may take long.
        return rank.rank > 0 or rank.shown.waits_for == 0
    return alike and rank.shown.entered < waiting.shown.entered
