"""Has workers change their weights, sleep, wake up and pause, as trainers ask through the router.

An update of several workers is staged on all of them first; if one refuses, it is dropped everywhere and no weights have changed.
Then all exchange. Workers have different weights only while that lasts: as long as the slowest takes for a step and a copy.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeAlias, TypeVar

import grpc

from sapwood.v1 import worker_pb2, worker_pb2_grpc
from sapwood_common.errors import NotFoundError, SapwoodError, UnavailableError
from sapwood_common.network.channel import Dialer
from sapwood_common.status import from_rpc_error
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.worker import Worker

_SECONDS = 30.0
_LOAD_SECONDS = 900.0

AnswerT = TypeVar("AnswerT")
Stub: TypeAlias = "worker_pb2_grpc.WorkerAsyncStub"
InFlight = Literal["retract", "keep", "abort"]
Memory = Literal["weights", "kv_cache"]

_IN_FLIGHT = {
    "retract": worker_pb2.IN_FLIGHT_REQUESTS_RETRACT,
    "keep": worker_pb2.IN_FLIGHT_REQUESTS_KEEP,
    "abort": worker_pb2.IN_FLIGHT_REQUESTS_ABORT,
}
_MEMORY = {"weights": worker_pb2.MEMORY_WEIGHTS, "kv_cache": worker_pb2.MEMORY_KV_CACHE}


class WeightsControl:
    """Asks workers. Lives on one event loop.

    Args:
        registry: Knows them.
        dialer: Connects to them.
    """

    def __init__(self, registry: Registry, dialer: Dialer) -> None:
        self._registry = registry
        self._dialer = dialer

    def workers(self) -> list[Worker]:
        """All workers that are up, sleeping ones included.

        Raises:
            UnavailableError: There is none.
        """
        found = [worker for worker in self._registry.all() if worker.available and not worker.backend]
        if not found:
            raise UnavailableError("no worker is available", retry_after=1.0)
        return found

    def find(self, name: str, name_of: Callable[[str], str]) -> Worker:
        """The worker that is called so. Raises NotFoundError if there is none."""
        for worker in self.workers():
            if name_of(worker.address) == name:
                return worker
        raise NotFoundError(f"there is no worker {name!r}")

    async def update(
        self, workers: Sequence[Worker], path: str, version: str, in_flight: InFlight, *, flush: bool
    ) -> list[str]:
        """Gives workers the weights of a folder or a file; returns what these are called then.

        Args:
            workers: Which.
            path: On their machines.
            version: What to call them; empty: the workers count.
            in_flight: What becomes of requests that run.
            flush: Whether they empty their prefix caches.

        Raises:
            SapwoodError: A worker has refused them, and no worker has changed; or one failed while it exchanged them.
        """
        update = f"router-{secrets.token_hex(8)}"

        async def stage(stub: Stub) -> None:
            request = worker_pb2.UpdateWeightsRequest(path=path, update_id=update)
            await stub.UpdateWeights(iter([request]), timeout=_LOAD_SECONDS)

        try:
            await self._ask(workers, stage)
        except SapwoodError:
            await asyncio.gather(*(self.drop([each], update) for each in workers), return_exceptions=True)
            raise
        return await self.commit(workers, update, version, in_flight, flush=flush, partial=False)

    async def join_group(
        self, workers: Sequence[Worker], name: str, address: str, port: int, world_size: int, offset: int, backend: str
    ) -> None:
        """Has a worker join a group of torch.distributed that a trainer leads.

        Args:
            workers: That one: each worker has ranks of its own.
            name, address, port, world_size: The group's, and where its store is.
            offset: The rank of the worker's first rank.
            backend: By which tensors travel.

        Raises:
            SapwoodError: It does not come to stand.
        """
        request = worker_pb2.JoinWeightsGroupRequest(
            group=name,
            master_address=address,
            master_port=port,
            world_size=world_size,
            rank_offset=offset,
            backend=backend,
        )

        async def join(stub: Stub) -> None:
            await stub.JoinWeightsGroup(request, timeout=_LOAD_SECONDS)

        await self._ask(workers, join)

    async def leave_group(self, workers: Sequence[Worker], name: str) -> None:
        """Has workers leave such a group, those that are in it. Raises SapwoodError if one cannot."""

        async def leave(stub: Stub) -> None:
            await stub.LeaveWeightsGroup(worker_pb2.LeaveWeightsGroupRequest(group=name), timeout=_SECONDS)

        await self._ask(workers, leave)

    async def receive(
        self,
        workers: Sequence[Worker],
        name: str,
        tensors: Sequence[tuple[str, str, Sequence[int]]],
        version: str,
        in_flight: InFlight,
        *,
        flush: bool,
        staged: str = "",
    ) -> list[str]:
        """Has workers receive tensors that a group's trainer broadcasts, and use them; returns what their weights are called.

        Args:
            workers: All that are in the group.
            name: The group's.
            tensors: Names, dtypes and shapes, in the order of the broadcasts.
            version, in_flight, flush: As for :meth:`update`.
            staged: The update that they become part of, for :meth:`commit`; empty: they are an update of their own.

        Raises:
            SapwoodError: A worker has refused them.
        """
        described = [worker_pb2.WeightTensor(name=each, dtype=dtype, shape=shape) for each, dtype, shape in tensors]
        request = worker_pb2.UpdateWeightsRequest(
            group=name,
            tensors=described,
            partial=True,
            weight_version=version,
            in_flight=_IN_FLIGHT[in_flight],
            flush_cache=flush,
            update_id=staged,
        )

        async def receive(stub: Stub) -> str:
            return (await stub.UpdateWeights(iter([request]), timeout=_LOAD_SECONDS)).weights.version

        return await self._ask(workers, receive)

    async def commit(
        self,
        workers: Sequence[Worker],
        staged: str,
        version: str,
        in_flight: InFlight,
        *,
        flush: bool,
        partial: bool,
    ) -> list[str]:
        """Has workers use what was staged for an update; returns what their weights are called.

        Args:
            workers, version, in_flight, flush: As for :meth:`update`.
            staged: The update.
            partial: Whether tensors that are not in it stay as they are; else all are needed.

        Raises:
            SapwoodError: A worker has refused them.
        """
        request = worker_pb2.UpdateWeightsRequest(
            update_id=staged,
            commit=True,
            weight_version=version,
            partial=partial,
            in_flight=_IN_FLIGHT[in_flight],
            flush_cache=flush,
        )

        async def commit(stub: Stub) -> str:
            return (await stub.UpdateWeights(iter([request]), timeout=_LOAD_SECONDS)).weights.version

        return await self._ask(workers, commit)

    async def drop(self, workers: Sequence[Worker], staged: str) -> None:
        """Has workers forget what was staged for an update, if anything was. Raises SapwoodError if one does not answer."""
        request = worker_pb2.DropWeightsRequest(update_id=staged)

        async def drop(stub: Stub) -> None:
            await stub.DropWeights(request, timeout=_SECONDS)

        await self._ask(workers, drop)

    async def ranks(self, workers: Sequence[Worker]) -> int:
        """How many ranks workers have together. Raises SapwoodError if one does not answer."""

        async def get(stub: Stub) -> int:
            info = await stub.GetModelInfo(worker_pb2.GetModelInfoRequest(), timeout=_SECONDS)
            return max(1, info.tensor_parallel) * max(1, info.pipeline_parallel)

        return sum(await self._ask(workers, get))

    async def versions(self, workers: Sequence[Worker]) -> list[str]:
        """What the weights of workers are called. Raises SapwoodError if one does not answer."""

        async def get(stub: Stub) -> str:
            return (await stub.GetWeights(worker_pb2.GetWeightsRequest(), timeout=_SECONDS)).weights.version

        return await self._ask(workers, get)

    async def sleep(self, workers: Sequence[Worker], memory: Sequence[Memory], *, abort: bool) -> None:
        """Has workers give memory back; empty: all. Raises SapwoodError if one does not."""
        request = worker_pb2.SleepRequest(memory=[_MEMORY[each] for each in memory], abort=abort)

        async def sleep(stub: Stub) -> None:
            await stub.Sleep(request, timeout=_LOAD_SECONDS)

        await self._ask(workers, sleep)

    async def wake_up(self, workers: Sequence[Worker], memory: Sequence[Memory]) -> None:
        """Undoes :meth:`sleep`. Raises SapwoodError if a worker cannot."""
        request = worker_pb2.WakeUpRequest(memory=[_MEMORY[each] for each in memory])

        async def wake(stub: Stub) -> None:
            await stub.WakeUp(request, timeout=_LOAD_SECONDS)

        await self._ask(workers, wake)

    async def asleep(self, workers: Sequence[Worker]) -> bool:
        """Whether any of the workers sleeps, as they say themselves. Raises SapwoodError if one does not answer."""

        async def get(stub: Stub) -> bool:
            return bool((await stub.GetModelInfo(worker_pb2.GetModelInfoRequest(), timeout=_SECONDS)).asleep)

        return any(await self._ask(workers, get))

    async def pause(self, workers: Sequence[Worker], *, retract: bool, abort: bool) -> int:
        """Has workers compute nothing until :meth:`resume`; returns how many requests have ended.

        Raises:
            SapwoodError: A worker does not.
        """
        request = worker_pb2.PauseRequest(retract=retract, abort=abort)

        async def pause(stub: Stub) -> int:
            return (await stub.Pause(request, timeout=_SECONDS)).aborted

        return sum(await self._ask(workers, pause))

    async def resume(self, workers: Sequence[Worker]) -> None:
        """Ends a pause. Raises SapwoodError if a worker does not."""

        async def resume(stub: Stub) -> None:
            await stub.Resume(worker_pb2.ResumeRequest(), timeout=_SECONDS)

        await self._ask(workers, resume)

    async def flush(self, workers: Sequence[Worker]) -> None:
        """Empties workers' caches. Raises SapwoodError if one does not."""

        async def flush(stub: Stub) -> None:
            await stub.FlushCache(worker_pb2.FlushCacheRequest(), timeout=_SECONDS)

        await self._ask(workers, flush)

    async def loads(self, workers: Sequence[Worker]) -> list[tuple[int, int, int]]:
        """The running and the waiting requests of workers at this moment, and the tokens of those that run.

        Raises:
            SapwoodError: A worker does not answer.
        """

        async def load(stub: Stub) -> tuple[int, int, int]:
            call = stub.WatchLoad(worker_pb2.WatchLoadRequest(), timeout=_SECONDS)
            try:
                async for response in call:
                    found = response.load
                    return found.running_requests, found.waiting_requests, found.running_tokens
            finally:
                call.cancel()
            raise UnavailableError("a worker is shutting down", retry_after=1.0)

        return await self._ask(workers, load)

    async def _ask(self, workers: Sequence[Worker], ask: Callable[[Stub], Awaitable[AnswerT]]) -> list[AnswerT]:
        """Asks all and waits for all, also where one fails; then raises the first error."""
        found = await asyncio.gather(*(self._ask_one(each, ask) for each in workers), return_exceptions=True)
        answers: list[AnswerT] = []
        for each in found:
            if isinstance(each, BaseException):
                raise each
            answers.append(each)
        return answers

    async def _ask_one(self, worker: Worker, ask: Callable[[Stub], Awaitable[AnswerT]]) -> AnswerT:
        channel = self._dialer.open(worker.address)
        try:
            return await ask(worker_pb2_grpc.WorkerStub(channel))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            await channel.close()
