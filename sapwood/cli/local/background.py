"""A cluster that a thread of this process looks after, while the program does something else."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TextIO, TypeVar

import grpc

from sapwood.cli.local.cluster import Cluster, DiedError, Endpoints
from sapwood.cli.services import Services
from sapwood.errors import SapwoodError, UnavailableError

ResultT = TypeVar("ResultT")

_POLL_SECONDS = 0.5


class BackgroundCluster:
    """Starts a cluster, starts its tokenizer and workers again when they end, and stops it.

    Life cycle: construct, :meth:`start`, :meth:`stop`. The processes end with this one, however it ends.

    Args:
        services: The services to start.
        logs: Gets their lines; None: the lines are dropped.
    """

    def __init__(self, services: Services, logs: TextIO | None) -> None:
        self._cluster = Cluster(services, _writer(logs), lambda _: None)
        self._ready: concurrent.futures.Future[Endpoints] = concurrent.futures.Future()
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
        self._thread = threading.Thread(target=self._run, name="sapwood cluster", daemon=True)
        self._stopping = asyncio.Event()
        self._problem = "it is not started"

    def start(self) -> Endpoints:
        """Starts everything and returns once all answer; at once where it runs.

        Raises:
            UnavailableError: A service ended meanwhile; the message has its last lines. Or it was stopped before.
        """
        if self._thread.ident is not None:
            self.check()
            return self._ready.result()
        self._loop = self._runner.get_loop()
        self._thread.start()
        try:
            return self._ready.result()
        except BaseException:
            self.kill()
            raise

    def submit(self, work: Coroutine[Any, Any, ResultT]) -> concurrent.futures.Future[ResultT]:
        """Runs ``work`` in the thread's event loop. Raises UnavailableError if the cluster does not run."""
        try:
            self.check()
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except BaseException:
            work.close()
            raise

    def wait(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Runs ``work`` in the thread's event loop to its end; an exception here, such as Ctrl-C, cancels it.

        Raises:
            UnavailableError: The cluster does not run, or ended meanwhile.
        """
        future = self.submit(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:  # the thread's event loop has ended
            self.check()
            raise
        except BaseException:
            future.cancel()
            raise

    def check(self) -> None:
        """Raises UnavailableError if the cluster does not run."""
        if self._problem:
            raise _unavailable(self._problem)

    def stop(self) -> None:
        """Lets running requests finish and stops everything; an exception here, such as Ctrl-C, kills. May be called again."""
        self._tell(self._stopping.set)
        try:
            self._join()
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Ends everything at once."""

        def kill() -> None:
            self._stopping.set()
            self._cluster.kill()

        self._tell(kill)
        self._join()

    def _tell(self, action: Callable[[], object]) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(action)

    def _join(self) -> None:
        while self._thread.is_alive():  # in slices, so that a signal is handled
            self._thread.join(_POLL_SECONDS)

    def _run(self) -> None:
        with self._runner as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        life = asyncio.create_task(self._serve())
        stop = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([life, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        error = life.exception() if life.done() else None
        self._problem = "it is closed" if error is None else f"it has ended: {error}"
        life.cancel()
        await asyncio.wait([life])
        try:
            await self._cluster.stop()
        finally:
            self._cluster.kill()
            if not self._ready.done():
                failed = _unavailable(str(error)) if isinstance(error, DiedError) else error
                self._ready.set_exception(failed or _unavailable("it was closed while it started"))

    async def _serve(self) -> None:
        self._ready.set_result(await self._started())
        await self._cluster.watch()

    async def _started(self) -> Endpoints:
        endpoints = await self._cluster.start()
        self._problem = ""
        return endpoints


def _unavailable(problem: str) -> SapwoodError:
    return UnavailableError(grpc.StatusCode.UNAVAILABLE, problem)


def _writer(logs: TextIO | None) -> Callable[[str, str], None]:
    def write(name: str, line: str) -> None:
        try:
            print(f"{name:<9} | {line}", file=logs, flush=True)
        except (OSError, ValueError):  # nobody reads it any more
            return

    return (lambda name, line: None) if logs is None else write
