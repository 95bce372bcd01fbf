"""Reads adapters (LoRA) beside the running steps, and drops them when no request needs them any more."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from sapwood_common.errors import InternalError, SapwoodError
from sapwood_worker.ipc.messages import Answered, CallFailed, DropLora, ReadLora
from sapwood_worker.records.lora import Lora, LoraFacts
from sapwood_worker.records.step import RankLostError

logger = logging.getLogger(__name__)

_THREADS = 2
"""Adapters that are read at a time: slow storage of one does not hold up all others."""


class LoraRunner(Protocol):
    """The part of a runner that keeps adapters; see :class:`~sapwood_worker.core.loaded_runner.LoadedRunner`."""

    def read_lora(self, lora: Lora) -> LoraFacts: ...

    def drop_lora(self, number: int) -> None: ...


class LoraUsers(Protocol):
    """The scheduler, as far as it knows which requests have which adapter."""

    def lora_requests(self, number: int) -> int: ...

    def forget_lora(self, number: int) -> None: ...


class LoraReads:
    """Adapters that are being read, and those that wait to be dropped. Its methods are called from one thread, the loop's.

    Its own threads are daemons: a process that ends does not wait for storage.

    Args:
        runner: Keeps the adapters.
        users: Knows which requests have them.
    """

    def __init__(self, runner: LoraRunner, users: LoraUsers) -> None:
        self._runner = runner
        self._users = users
        self._jobs: queue.SimpleQueue[ReadLora] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Callable[[], Answered | CallFailed]] = queue.SimpleQueue()
        self._threads = 0
        self._leaving: dict[int, int] = {}
        self.reading = 0
        """Adapters whose reading has not been answered."""

    def read(self, message: ReadLora) -> None:
        """Begins to read an adapter; :meth:`poll` answers."""
        self.reading += 1
        self._jobs.put(message)
        if self._threads < min(_THREADS, self.reading):
            self._threads += 1
            threading.Thread(target=self._work, name="adapters", daemon=True).start()

    def drop(self, message: DropLora) -> None:
        """Drops an adapter as soon as its requests have ended; :meth:`poll` answers."""
        self._leaving[message.number] = message.call

    def poll(self, seconds: float = 0.0) -> list[Answered | CallFailed]:
        """The answers since the last call; waits for so long for one, if adapters are being read.

        Raises:
            RankLostError: A rank was lost while it read.
        """
        answers: list[Answered | CallFailed] = []
        while self.reading:
            try:
                done = self._done.get(timeout=seconds) if seconds else self._done.get_nowait()
            except queue.Empty:
                break
            seconds = 0.0
            self.reading -= 1
            answers.append(done())
        for number, call in [*self._leaving.items()]:
            if not self._users.lora_requests(number):
                del self._leaving[number]
                self._users.forget_lora(number)
                self._runner.drop_lora(number)
                answers.append(Answered(call))
        return answers

    def _work(self) -> None:
        while True:
            message = self._jobs.get()
            self._done.put(self._read(message))

    def _read(self, message: ReadLora) -> Callable[[], Answered | CallFailed]:
        try:
            facts = self._runner.read_lora(message.lora)
            return lambda: Answered(message.call, lora=facts)
        except SapwoodError as error:
            failed = CallFailed(message.call, type(error).__name__, error.message, error.field)
            return lambda: failed
        except RankLostError as error:
            lost = error

            def fail() -> CallFailed:
                raise lost

            return fail
        except Exception as error:
            logger.exception("adapter %s could not be read", message.lora.name)
            unknown = CallFailed(message.call, InternalError.__name__, f"it could not be read: {error!r}", None)
            return lambda: unknown
