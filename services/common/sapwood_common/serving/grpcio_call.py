"""A call of grpcio's asyncio server, for servicers that push their responses."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Never, cast

import grpc

from sapwood_common.tenants.tenant import Tenant


class GrpcioCall:
    """What servicers use of a call, around grpcio's context. Implements :class:`PushCall`. Made in the handler's task.

    Args:
        context: grpcio's.
        tenant: The tenant whose key the call came with; None where no key is asked for.
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], tenant: Tenant | None) -> None:
        self.tenant = tenant
        self.invocation_metadata = context.invocation_metadata
        self.set_trailing_metadata = context.set_trailing_metadata
        self.time_remaining = context.time_remaining
        self.done = context.done
        self._context = context
        self._handler = asyncio.current_task()
        self._initial: Iterable[tuple[str, str | bytes]] | None = None
        self._unsent: deque[Any] = deque()
        self._writer: asyncio.Task[None] | None = None
        """Sends the unsent responses; None where there are none."""
        self._given_up: tuple[grpc.StatusCode, str] | None = None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Adds a callback for the end of the call, also when the client leaves. It is given grpcio's context."""
        self._context.add_done_callback(cast(Any, callback))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> Never:
        """Ends the call with a status, after the responses."""
        await self.flush()
        await self._context.abort(code, details, trailing_metadata)
        raise AssertionError("abort returned")

    def is_ready(self) -> bool:
        return self._writer is None

    def write_now(self, message: Any) -> None:
        self._unsent.append(message)
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write())

    async def drained(self) -> None:
        if self._writer is not None:
            await asyncio.wait((self._writer,))

    def set_initial_metadata(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        self._initial = metadata

    def give_up(self, code: grpc.StatusCode, details: str) -> None:
        """Cancels the handler. A client that reads nothing learns of it once it reads."""
        self._given_up = (code, details)
        if self._writer is not None:
            self._writer.cancel()
        if self._handler is not None:
            self._handler.cancel()

    async def end_if_given_up(self) -> None:
        """Tells a cancelled handler why: raises AbortError if :meth:`give_up` cancelled it."""
        if self._given_up is not None and not self._context.done():
            await self._context.abort(*self._given_up)

    async def flush(self) -> None:
        """Returns once the metadata and all responses are sent."""
        await self.drained()
        await self._begin()

    async def _begin(self) -> None:
        initial, self._initial = self._initial, None
        if initial is not None:
            await self._context.send_initial_metadata(tuple(initial))

    async def _write(self) -> None:
        try:
            await self._begin()
            while self._unsent:
                await self._context.write(self._unsent.popleft())
        except Exception:
            self._unsent.clear()  # the client has left, and grpcio cancels the handler
        finally:
            self._writer = None
