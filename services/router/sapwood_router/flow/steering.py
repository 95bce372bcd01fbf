"""What operators do to all requests: they end, pause and resume them, and empty the caches."""

from __future__ import annotations

import enum

from sapwood_router.fleet.control import FleetControl
from sapwood_router.flow.running import RunningRequests


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
            SapwoodError: A worker did not go on; new requests wait no longer all the same.
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
