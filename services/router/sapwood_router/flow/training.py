"""What trainers have the workers do: other weights, sleep, pauses. One worker or all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.fleet.weights_control import InFlight, WeightsControl
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.steering import RunningRequests

_LEAVE_SECONDS = 2.0
"""What a worker may take to let go of requests that were aborted."""
_LOOK_SECONDS = 0.02
_BEGUN = "begun"
"""What workers call an update of several calls."""

Memory = Literal["weights", "kv_cache"]
"""What a worker gives back while it sleeps."""
PauseHow = Literal["abort", "retract", "keep", "wait"]
"""``abort`` ends requests, ``retract`` frees their pages, ``keep`` leaves them as they are, ``wait`` waits for their end."""


class TrainedWorker(NamedTuple):
    """A worker, as trainers know it."""

    address: str
    model: str
    weight_version: str
    asleep: bool


class TrainingLoad(NamedTuple):
    """A worker's requests, and the tokens that those running have."""

    running: int
    waiting: int
    tokens: int


class TrainingTargets:
    """The workers that a call is for.

    Args:
        workers: They.
        control: Asks them.
        running: The router's requests; None: the call is for one worker only.
        begun: The addresses of workers whose update has begun, in the sense of :meth:`begin`; changed here.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        control: WeightsControl,
        running: RunningRequests | None,
        begun: set[str],
    ) -> None:
        self._workers = workers
        self._control = control
        self._running = running
        self._begun = begun

    async def update(self, path: str, version: str, in_flight: InFlight, *, flush: bool) -> str:
        """Gives them the weights at a path, staged on all before any exchanges; returns what these are called. Raises as
        :meth:`WeightsControl.update`."""
        return (await self._control.update(self._workers, path, version, in_flight, flush=flush))[0]

    async def join_group(self, name: str, address: str, port: int, world_size: int, offset: int, backend: str) -> None:
        """Has the worker join a group that a trainer leads.

        Raises:
            InvalidArgumentError: There are several workers, each with another offset; or the group does not come to stand.
        """
        if len(self._workers) > 1:
            raise InvalidArgumentError(
                f"there are {len(self._workers)} workers, each with a rank_offset of its own: call the URLs of /workers",
                field="rank_offset",
            )
        await self._control.join_group(self._workers, name, address, port, world_size, offset, backend)

    async def leave_group(self, name: str) -> None:
        """Has them leave such a group, if they are in it."""
        await self._control.leave_group(self._workers, name)

    async def receive(
        self,
        name: str,
        tensors: Sequence[tuple[str, str, Sequence[int]]],
        version: str,
        in_flight: InFlight,
        *,
        flush: bool,
    ) -> str:
        """Has them receive what a group's trainer broadcasts; returns what their weights are called then."""
        begun = [each.address in self._begun for each in self._workers]
        if any(begun) and not all(begun):
            raise InvalidArgumentError("an update has begun for some of the workers only", field="names")
        staged = _BEGUN if any(begun) else ""
        found = await self._control.receive(
            self._workers, name, tensors, version, in_flight, flush=flush, staged=staged
        )
        return found[0]

    async def begin(self) -> None:
        """Begins an update: what comes by :meth:`receive` from now on is used only from :meth:`finish` on."""
        await self._control.drop(self._workers, _BEGUN)
        self._begun.update(each.address for each in self._workers)

    async def finish(self) -> str:
        """Has them use what they have received since :meth:`begin`; returns what their weights are called then.

        Raises:
            InvalidArgumentError: No update has begun.
        """
        if not all(each.address in self._begun for each in self._workers):
            raise InvalidArgumentError("no update has begun")
        self._begun.difference_update(each.address for each in self._workers)
        found = await self._control.commit(self._workers, _BEGUN, "", "retract", flush=True, partial=True)
        return found[0]

    async def ranks(self) -> int:
        """How many ranks they have together."""
        return await self._control.ranks(self._workers)

    async def versions(self) -> list[str]:
        """What their weights are called, each name once."""
        return list(dict.fromkeys(await self._control.versions(self._workers)))

    async def sleep(self, memory: Sequence[Memory], *, abort: bool) -> None:
        """Has them give memory back; empty: all."""
        await self._control.sleep(self._workers, memory, abort=abort)

    async def wake_up(self, memory: Sequence[Memory]) -> None:
        """Undoes :meth:`sleep`."""
        await self._control.wake_up(self._workers, memory)

    async def asleep(self) -> bool:
        """Whether any of them sleeps."""
        return await self._control.asleep(self._workers)

    async def pause(self, how: PauseHow) -> int:
        """Has them compute nothing until :meth:`resume`, and new requests wait; returns how many have ended.

        If the caller leaves while requests end, nothing is paused.
        """
        paused_before = self._running is not None and self._running.paused
        if self._running is not None:
            self._running.pause()
        if how == "wait":
            try:
                # They are other processes: only their loads show when the last request has ended.
                while any(load.running or load.waiting for load in await self.loads()):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_SECONDS)
            except BaseException:
                if self._running is not None and not paused_before:
                    self._running.resume()
                raise
        return await self._control.pause(self._workers, retract=how == "retract", abort=how == "abort")

    async def resume(self) -> None:
        """Ends a pause."""
        if self._running is not None:
            self._running.resume()
        await self._control.resume(self._workers)

    async def flush(self, *, only_idle: bool) -> bool:
        """Empties their caches; returns whether it did. With ``only_idle`` it does nothing while requests run or wait: what was
        aborted leaves its worker a moment later, so workers are looked at again when the router has no requests."""
        until = time.monotonic() + _LEAVE_SECONDS
        while only_idle and any(load.running or load.waiting for load in await self.loads()):
            if self._running is None or self._running.count or time.monotonic() > until:
                return False
            await asyncio.sleep(_LOOK_SECONDS)
        await self._control.flush(self._workers)
        return True

    async def loads(self) -> list[TrainingLoad]:
        """Their loads now."""
        return [TrainingLoad(*each) for each in await self._control.loads(self._workers)]


class Training:
    """Finds the workers of calls.

    Args:
        control: Asks workers.
        running: The router's requests.
    """

    def __init__(self, control: WeightsControl, running: RunningRequests) -> None:
        self._control = control
        self._running = running
        self._begun: set[str] = set()

    def workers(self) -> list[TrainedWorker]:
        """All that are up. Raises UnavailableError if there is none."""
        return [
            TrainedWorker(each.address, each.model.model, each.model.weight_version, each.model.asleep)
            for each in self._control.workers()
            if each.model is not None
        ]

    def targets(self, worker: str | None, name_of: Callable[[str], str]) -> TrainingTargets:
        """The workers of a call.

        Args:
            worker: What clients call the one that is meant; None: all.
            name_of: Makes such a name of an address.

        Raises:
            NotFoundError: There is no such worker.
            UnavailableError: There is none at all.
        """
        if worker is None:
            return TrainingTargets(self._control.workers(), self._control, self._running, self._begun)
        return TrainingTargets([self._control.find(worker, name_of)], self._control, None, self._begun)
