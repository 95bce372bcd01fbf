"""The generations under way, and what operators do to all of them: they end, pause and resume them, and empty the caches."""

from __future__ import annotations

import asyncio
import enum
from typing import Protocol

from sapwood_common.errors import DeadlineExceededError
from sapwood_router.fleet.control import FleetControl


class Abortable(Protocol):
    """A run.

    Attributes:
        tenant, request_id: Whose it is, and what its client calls it.
    """

    @property
    def tenant(self) -> str: ...

    @property
    def request_id(self) -> str: ...

    def abort(self) -> None:
        """Ends it with what there is of its answer."""
        ...


class RunningRequests:
    """Counts, aborts and pauses. Lives on one event loop."""

    def __init__(self) -> None:
        self._runs: dict[Abortable, None] = {}
        self._waiting: dict[Abortable, asyncio.Future[None]] = {}
        self.paused = False
        """Whether new ones wait."""

    @property
    def count(self) -> int:
        """How many are under way, waiting ones included."""
        return len(self._runs)

    def add(self, run: Abortable) -> None:
        """There is one more."""
        self._runs[run] = None

    def remove(self, run: Abortable) -> None:
        """It is over, also where it waits."""
        self._runs.pop(run, None)
        self._let_go(run)

    def abort(self, tenant: str, request_id: str) -> int:
        """Aborts a tenant's request; returns how many runs it had. O(runs)."""
        return self._abort([run for run in self._runs if (run.tenant, run.request_id) == (tenant, request_id)])

    def abort_all(self) -> int:
        """Aborts all; returns how many runs there were."""
        return self._abort([*self._runs])

    def pause(self) -> None:
        """New ones wait from now on."""
        self.paused = True

    def resume(self) -> None:
        """Those that wait go on."""
        self.paused = False
        for run in [*self._waiting]:
            self._let_go(run)

    async def wait(self, run: Abortable, deadline: float) -> None:
        """Returns once they are not paused, or the run is over.

        Raises:
            DeadlineExceededError: It took too long.
        """
        if not self.paused:
            return
        future = self._waiting[run] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(deadline):
                await future
        except TimeoutError:
            raise DeadlineExceededError("the deadline passed while generation was paused") from None
        finally:
            self._waiting.pop(run, None)

    def _let_go(self, run: Abortable) -> None:
        future = self._waiting.pop(run, None)
        if future is not None and not future.done():
            future.set_result(None)

    @staticmethod
    def _abort(runs: list[Abortable]) -> int:
        for run in runs:
            run.abort()
        return len(runs)


class PauseMode(enum.Enum):
    """What becomes of requests that run; named as in SGLang."""

    ABORT = "abort"
    """They end with what there is of their answers."""
    IN_PLACE = "in_place"
    """They stand still, and keep what is cached for them."""
    RETRACT = "retract"
    """They stand still, and what was cached for them is computed again after the pause."""


class Steering:
    """Steers the requests of a pipeline.

    Args:
        running: They.
        fleet: Asks the workers.
    """

    def __init__(self, running: RunningRequests, fleet: FleetControl) -> None:
        self._running = running
        self._fleet = fleet

    async def pause(self, mode: PauseMode) -> int:
        """New requests wait from now on, each until its deadline; returns how many were aborted.

        Raises:
            SapwoodError: A worker did not pause.
        """
        self._running.pause()
        if mode is PauseMode.ABORT:
            return self._running.abort_all()
        await self._fleet.pause(retract=mode is PauseMode.RETRACT)
        return 0

    async def resume(self) -> None:
        """Ends a pause of any mode.

        Raises:
            SapwoodError: A worker did not resume. New requests no longer wait even then.
        """
        self._running.resume()
        await self._fleet.resume()

    def abort_all(self) -> int:
        """Ends all requests with what there is of their answers; returns how many they were."""
        return self._running.abort_all()

    def abort(self, tenant: str, request_id: str) -> int:
        """Ends a tenant's request of this id so; returns how many answers it had."""
        return self._running.abort(tenant, request_id)

    async def flush(self) -> int:
        """Empties the workers' caches; returns how many pages were freed.

        Raises:
            SapwoodError: A worker did not do so.
        """
        return await self._fleet.flush()
