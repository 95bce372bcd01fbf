"""Pins of prefixes at workers, which keep them from eviction."""

from __future__ import annotations

import math
from collections.abc import Sequence

import grpc

from sapwood.v1 import worker_pb2, worker_pb2_grpc
from sapwood_common.network.channel import Dialer
from sapwood_common.status import from_rpc_error

_SECONDS = 10.0


class WorkerPins:
    """Asks workers to pin and unpin.

    Args:
        dialer: Connects to them.
    """

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer

    async def pin(self, address: str, name: str, token_ids: Sequence[int], cache_salt: str, seconds: float) -> int:
        """Pins what a worker has cached of a prefix; returns how many tokens. An older pin of this name is replaced.

        Args:
            address: The worker's.
            name: The pin's.
            token_ids: The prefix.
            cache_salt: The salt of the requests that are to find it.
            seconds: After which the worker unpins it by itself.

        Raises:
            SapwoodError: It did not.
        """
        request = worker_pb2.PinPrefixRequest(
            name=name, token_ids=token_ids, cache_salt=cache_salt, ttl_seconds=math.ceil(seconds)
        )
        channel = self._dialer.open(address)
        try:
            answer = await worker_pb2_grpc.WorkerStub(channel).PinPrefix(request, timeout=_SECONDS)
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
                worker_pb2.UnpinPrefixRequest(name=name), timeout=_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            await channel.close()
