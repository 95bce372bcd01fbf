"""Starts the scheduler process, talks to it over ZeroMQ, and notices its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable

import zmq
import zmq.asyncio

from sapwood_common.errors import ConfigError
from sapwood_common.network.socket_folder import SocketFolder
from sapwood_worker.config import WorkerConfig
from sapwood_worker.ipc.child_process import ChildProcess
from sapwood_worker.ipc.messages import (
    Failed,
    FromScheduler,
    Ready,
    Shutdown,
    ToScheduler,
    encode,
    from_scheduler_decoder,
)
from sapwood_worker.ipc.progress import PROGRESS_FILE, ProgressView
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
        self.progress = ProgressView(self._folder.path / PROGRESS_FILE)
        """For how long the process has been at its current step."""
        self._context = zmq.asyncio.Context()
        self._outbox: zmq.Socket[bytes] = zmq.Context.shadow(self._context).socket(zmq.PUSH)
        self._inbox = self._context.socket(zmq.PULL)
        self._process: ChildProcess | None = None
        self._ready = False

    def start(self) -> None:
        """Starts the process. Called on the event loop."""
        for socket, name in ((self._outbox, "to-scheduler"), (self._inbox, "from-scheduler")):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(f"ipc://{self._folder.path}/{name}")
        config_class = type(self._config)
        self._process = ChildProcess(
            [
                *(sys.executable, "-m", "sapwood_worker.core.scheduler_process"),
                *("--folder", str(self._folder.path)),
                *("--parent", str(os.getpid())),
                *("--config-class", f"{config_class.__module__}:{config_class.__qualname__}"),
                *("--config", self._config.model_dump_json()),
                *("--runner", self._runner),
            ]
        )

    async def ready(self) -> ModelInfo:
        """Waits until the process has loaded its model.

        Raises:
            ConfigError: It could not start; the message says why.
        """
        assert self._process is not None
        exited = asyncio.ensure_future(self._process.wait())
        first = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait({exited, first}, return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                await asyncio.wait({first}, timeout=_LAST_WORDS_SECONDS)
            if not first.done():
                raise ConfigError(f"the scheduler process ended while starting: {self._how_it_ended()}")
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
        """Hands each message to ``receive`` until the process ends; returns how it ended."""
        assert self._process is not None
        exited = asyncio.ensure_future(self._process.wait())
        reader = asyncio.ensure_future(self._read(receive))
        try:
            await asyncio.wait({exited, reader}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                await reader  # it ends only by an error of ours
        finally:
            reader.cancel()
            exited.cancel()
        return self._how_it_ended()

    def signs_of_life(self) -> tuple[int, int]:
        """The pulse and the CPU time in kernel ticks: either has changed if the process has run since the last call.

        CPU time is needed beside the pulse, which cannot beat while something computes with the interpreter's lock held.
        """
        assert self._process is not None
        return self.progress.pulse(), self._process.cpu_ticks()

    def kill(self) -> None:
        """Ends the process at once, whatever it does; :meth:`run` returns."""
        assert self._process is not None
        self._process.kill()

    async def stop(self) -> None:
        """Asks the process to exit, kills it if it does not or is still loading, and removes the sockets. Never fails."""
        if self._process is not None and self._process.returncode is None:
            if self._ready:
                self.send(Shutdown())
            else:
                self._process.kill()
            try:
                await asyncio.wait_for(self._process.wait(), _EXIT_SECONDS)
            except TimeoutError:
                logger.warning("the scheduler process does not exit: killing it")
                self._process.kill()
                await self._process.wait()
        self._inbox.close()
        self._outbox.close()
        self._context.term()
        self._folder.remove()

    def _how_it_ended(self) -> str:
        assert self._process is not None
        code = self._process.returncode
        return f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    async def _receive(self) -> FromScheduler:
        message: FromScheduler = from_scheduler_decoder.decode(await self._inbox.recv())
        return message

    async def _read(self, receive: Callable[[FromScheduler], None]) -> None:
        while True:
            receive(await self._receive())
