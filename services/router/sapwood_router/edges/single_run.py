"""Requests of which each is one run: their answer goes out whole, or as events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import msgspec

from sapwood_net.pacing.heavy_work import LARGE, HeavyWork
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.sse import with_field
from sapwood_router.edges.runs import Running
from sapwood_router.edges.whole import RESUMPTIONS_HEADER, collect, notice_headers, told_headers
from sapwood_router.flow.delivery import Delivery
from sapwood_router.flow.pipeline import Pipeline
from sapwood_router.request.context import Delta, Finish, RequestContext
from sapwood_router.request.output import Output
from sapwood_router.request.output_stream import Relay

Reader = Callable[[Delta], Awaitable[None]]
"""Takes a delta before it is told of."""


class Events(Protocol):
    """Writes an API's events."""

    def begin(self) -> bytes:
        """What comes before any output."""
        ...

    def more(self, delta: Delta) -> bytes:
        """What tells of new output; nothing if it is empty. The last delta comes here, too, then its finish to :meth:`end`."""
        ...

    def end(self, finish: Finish) -> Iterable[bytes]:
        """What comes after all output, each of one or several whole events: others go on after those that are long."""
        ...


async def send_whole(
    exchange: Exchange,
    context: RequestContext,
    pipeline: Pipeline,
    make_body: Callable[[Output, Finish], msgspec.Struct | msgspec.Raw],
    read: Reader | None = None,
) -> None:
    """Runs the request and sends its answer as one body; ``read`` sees its output first.

    Raises:
        SapwoodError: It failed.
    """
    async with Running(exchange, pipeline, [context]) as runs:
        (whole,) = await collect(runs)
        assert whole.finish is not None, "a run ends with a finish or an error"
        if read is not None:
            await read(whole)
        body = msgspec.json.encode(make_body(whole.output, whole.finish))
        await exchange.send_body(200, body, told_headers(exchange.workers, [context]))


async def send_events(
    exchange: Exchange, context: RequestContext, pipeline: Pipeline, events: Events, read: Reader | None = None
) -> None:
    """Runs the request and sends events as output comes. The response starts with the first, so an error before it has a status.
    ``read`` sees each delta before the events do.

    Raises:
        SapwoodError: It failed.
    """
    async with Running(exchange, pipeline, [context]) as runs:
        await Delivery(_EventClient(exchange, context, events, read, pipeline.heavy)).carry(runs)


class _EventClient:
    """Sends the first events and the last in the request's task, those between in the callback that brings their output.

    Where something is to read all output first, everything is sent in the task.
    """

    def __init__(
        self, exchange: Exchange, context: RequestContext, events: Events, read: Reader | None, heavy: HeavyWork
    ) -> None:
        self._read = read
        self._heavy = heavy
        self._exchange = exchange
        self._context = context
        self._events = events
        self._begun = False
        self._pending: Delta | None = None

    def writable(self) -> bool:
        """Whether no delta is pending, and the client reads."""
        return self._pending is None and self._exchange.writable()

    async def drained(self) -> None:
        """Sends the pending delta; if there is none, waits until the client has read enough."""
        delta = self._pending
        if delta is None:
            await self._exchange.drained()
            return
        written = b""
        if self._read is not None:
            await self._read(delta)
        if not self._begun:
            self._begun, written = True, self._events.begin()
            self._exchange.extra_headers = (*self._exchange.extra_headers, *notice_headers(self._context))
        written += self._events.more(delta)
        if delta.finish is not None:
            for events in self._events.end(delta.finish):
                if written and len(written) + len(events) > LARGE:
                    await self._exchange.send_events(written)
                    written = b""
                written += events
                if len(events) > LARGE:
                    await self._heavy.turn(self._exchange.tenant, goes_on=True)
            if self._context.resumptions:
                written = with_field(written, RESUMPTIONS_HEADER, self._context.resumptions)
        await self._exchange.send_events(written, last=delta.finish is not None)
        self._pending = None

    def write(self, index: int, delta: Delta) -> bool:
        if not self._begun or delta.finish is not None or self._read is not None:
            self._pending = delta
            return False
        if written := self._events.more(delta):
            self._exchange.write_events(written)
        return True

    def token_writer(self, index: int) -> Relay | None:
        """None: events tell no token ids."""
        return None
