"""A process that runs the model or a part of it, as the front sees it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sapwood_net.pacing.silence import Silence
from sapwood_worker.config import WorkerConfig
from sapwood_worker.ipc.child_process import ChildProcess
from sapwood_worker.ipc.progress import ProgressView, progress_file


def last_words(folder: Path, rank: int) -> Path:
    """The file in which a process leaves what it ends with."""
    return folder / f"last-words-{rank}"


LOST_AFTER, LOST_AT_START_AFTER = 1.5, 30.0
"""Seconds without a sign of life after which a rank of several is lost: the others wait for it and can do nothing else. While it
loads its model, a slow disk may keep it still for longer."""
DOUBTFUL = 0.3
"""Seconds without a sign of life from which on the kernel is asked what the process does, which takes a millisecond."""


class RankTask(msgspec.Struct, frozen=True):
    """What a process that runs the model reads from its standard input: it may hold secrets.

    Attributes:
        config_class: ``module:class`` of the configuration.
        config: The worker's configuration, as JSON.
        runner: ``module:function`` that makes its runner.
        key: What ranks of other hosts say first when they connect to rank 0; empty: there are none.
    """

    config_class: str
    config: str
    runner: str
    key: bytes = b""


@dataclass(frozen=True)
class RankCommand:
    """How a process that runs the model or a part of it is started.

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
        progress: For how long it has been at its current step.
        number: The argument.
    """

    def __init__(self, folder: Path, number: int, size: int) -> None:
        self.number = number
        self.name = f"rank {number} of {size}" if size > 1 else "the scheduler process"
        self.progress = ProgressView(folder / progress_file(number))
        self._words = last_words(folder, number)
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
        """The pulse and the CPU time in kernel ticks: either has changed if the process has run since the last call.

        CPU time is needed beside the pulse, which cannot beat while something computes with the interpreter's lock held.
        """
        return self.progress.pulse(), self.process.cpu_ticks()

    def how_it_ended(self) -> str:
        """How the rank ended, in words for people."""
        if self.has_spoken:
            return self._words.read_text()
        code = self.process.returncode
        return f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"


class RankSilence:
    """Seconds since a rank last gave a sign of life.

    One whose threads wait for a CPU is not silent, but on a busy machine. Of one that is stopped the time counts, too, in which
    this process could not look.

    Args:
        rank: The rank.
        interval: Seconds between calls of :meth:`check`.

    Attributes:
        rank: The argument.
        seconds: Seconds without a sign of life, by the last :meth:`check`.
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
