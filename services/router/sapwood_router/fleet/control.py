"""Commands to all workers together: to empty their caches, to pause and to continue."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

import grpc

from sapwood.v1 import worker_pb2, worker_pb2_grpc
from sapwood_common.network.channel import Dialer
from sapwood_common.status import from_rpc_error
from sapwood_router.fleet.registry import Registry

_SECONDS = 30.0


class FleetControl:
    """Asks all workers that are up; backends have no such methods. If one worker fails, the others may have succeeded.

    Args:
        registry: Knows them.
        dialer: Connects to them.
    """

    def __init__(self, registry: Registry, dialer: Dialer) -> None:
        self._registry = registry
        self._dialer = dialer

    async def flush(self) -> int:
        """Empties their caches; returns how many pages were freed. Running requests keep theirs.

        Raises:
            SapwoodError: A worker did not do so.
        """

        async def flush(stub: worker_pb2_grpc.WorkerAsyncStub) -> int:
            answer = await stub.FlushCache(worker_pb2.FlushCacheRequest(), timeout=_SECONDS)
            return answer.freed_pages

        return sum(await self._ask_all(flush))

    async def pause(self, *, retract: bool) -> None:
        """They compute nothing until :meth:`resume`.

        Args:
            retract: Whether the pages of running requests are freed; after the pause they are computed again.

        Raises:
            SapwoodError: A worker did not do so.
        """

        async def pause(stub: worker_pb2_grpc.WorkerAsyncStub) -> int:
            await stub.Pause(worker_pb2.PauseRequest(retract=retract), timeout=_SECONDS)
            return 1

        await self._ask_all(pause)

    async def resume(self) -> None:
        """They continue, if they were paused.

        Raises:
            SapwoodError: A worker did not do so.
        """

        async def resume(stub: worker_pb2_grpc.WorkerAsyncStub) -> int:
            await stub.Resume(worker_pb2.ResumeRequest(), timeout=_SECONDS)
            return 1

        await self._ask_all(resume)

    async def _ask_all(self, ask: Callable[[worker_pb2_grpc.WorkerAsyncStub], Awaitable[int]]) -> list[int]:
        async def ask_one(address: str) -> int:
            channel = self._dialer.open(address)
            try:
                return await ask(worker_pb2_grpc.WorkerStub(channel))
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
            finally:
                await channel.close()

        addresses = [worker.address for worker in self._registry.all() if worker.available and not worker.backend]
        return await asyncio.gather(*map(ask_one, addresses))


_PIN_SECONDS = 10.0


class WorkerPins:
    """Asks workers to pin and unpin.

    Args:
        dialer: Connects to them.
    """

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer

    async def pin(
        self, address: str, name: str, token_ids: Sequence[int], cache_salt: str, seconds: float, lora: str = ""
    ) -> int:
        """Pins what a worker has cached of a prefix; returns how many tokens. An older pin of this name is replaced.

        Args:
            address: The worker's.
            name: The pin's.
            token_ids: The prefix.
            cache_salt: The salt of the requests that are to find it.
            seconds: After which the worker unpins it by itself.
            lora: Their adapter; empty: none.

        Raises:
            SapwoodError: It did not.
        """
        request = worker_pb2.PinPrefixRequest(
            name=name,
            token_ids=token_ids,
            cache_salt=cache_salt,
            ttl_seconds=math.ceil(seconds),
            lora_name=lora,
        )
        channel = self._dialer.open(address)
        try:
            answer = await worker_pb2_grpc.WorkerStub(channel).PinPrefix(request, timeout=_PIN_SECONDS)
            return int(answer.pinned_tokens)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            await channel.close()

    async def unpin(self, address: str, name: str) -> None:
        """Lets go of a pin. Raises SapwoodError where the worker does not answer."""
        channel = self._dialer.open(address)
        try:
            await worker_pb2_grpc.WorkerStub(channel).UnpinPrefix(
                worker_pb2.UnpinPrefixRequest(name=name), timeout=_PIN_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            await channel.close()
