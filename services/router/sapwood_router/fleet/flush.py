"""Empties what the workers have cached of prefixes."""

from __future__ import annotations

import asyncio

import grpc

from sapwood.v1 import worker_pb2, worker_pb2_grpc
from sapwood_common.network.channel import Dialer
from sapwood_common.status import from_rpc_error
from sapwood_router.fleet.registry import Registry

_SECONDS = 30.0


class CacheFlusher:
    """Asks all workers that are up; backends have no such method.

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
            SapwoodError: A worker did not do so; others may have.
        """
        addresses = [worker.address for worker in self._registry.all() if worker.available and not worker.backend]
        return sum(await asyncio.gather(*map(self._flush, addresses)))

    async def _flush(self, address: str) -> int:
        channel = self._dialer.open(address)
        try:
            stub = worker_pb2_grpc.WorkerStub(channel)
            answer = await stub.FlushCache(worker_pb2.FlushCacheRequest(), timeout=_SECONDS)
            return answer.freed_pages
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            await channel.close()
