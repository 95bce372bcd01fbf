"""Runs the generations behind one HTTP request and sends their answer: in one piece, or as events while output comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol

import msgspec

from sapwood_net.pacing.heavy_work import A_FEW, LARGE, HeavyWork
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http1.head import Headers
from sapwood_router.edges.worker_names import WorkerNames
from sapwood_router.flow.client import Client
from sapwood_router.flow.generation import Generation, Pipeline
from sapwood_router.request.context import Delta, Finish, RequestContext
from sapwood_router.request.objective import STATUS_KEY, worst
from sapwood_router.request.output import Output, OutputBuffer

WORKER_HEADER, RESUMPTIONS_HEADER = b"x-sapwood-worker", b"x-sapwood-resumptions"
STATUS_HEADER = STATUS_KEY.encode()
NOTICE_HEADER = b"x-sapwood-notice"


class Events(Protocol):
    """Writes an API's events."""

    def begin(self) -> bytes:
        """What comes before any output."""
        ...

    def more(self, delta: Delta) -> bytes:
        """What tells of new output; nothing if it is empty. A generation's last delta comes here, too."""
        ...

    def end(self, finish: Finish, resumptions: int) -> Iterable[bytes]:
        """The parts after all output, each of one or several whole events: after a long part, other requests get a turn.

        Args:
            finish: Of the generation that ended last.
            resumptions: How often generations went on, on another worker.
        """
        ...


class Reader(Protocol):
    """Sees output before the events do.

    Attributes:
        silent: Whether it has to see no more than the first and the last delta of each generation.
    """

    silent: bool

    async def read(self, delta: Delta) -> None:
        """Takes a delta; it may change it."""
        ...


class Running:
    """Opens a run of each context; they end with the ``with`` block, and as soon as the client leaves."""

    def __init__(self, exchange: Exchange, pipeline: Pipeline, contexts: Sequence[RequestContext]) -> None:
        self._exchange = exchange
        self._pipeline = pipeline
        self._contexts = contexts
        self._runs: list[Generation] = []

    async def __aenter__(self) -> list[Generation]:
        runs = self._runs = await self._pipeline.open_all(self._contexts)
        self._exchange.on_disconnect(lambda: self._pipeline.close_all(runs))
        return runs

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pipeline.close_all(self._runs)


async def send_whole(
    exchange: Exchange,
    context: RequestContext,
    pipeline: Pipeline,
    make_body: Callable[[Output, Finish], msgspec.Struct | msgspec.Raw],
    reader: Reader | None = None,
) -> None:
    """Runs the request and sends its answer as one body; ``reader`` sees its output first.

    Raises:
        SapwoodError: It failed.
    """
    async with Running(exchange, pipeline, [context]) as runs:
        (whole,) = await collect(runs)
        assert whole.finish is not None, "a run ends with a finish or an error"
        if reader is not None:
            await reader.read(whole)
        body = msgspec.json.encode(make_body(whole.output, whole.finish))
        await exchange.send_body(200, body, told_headers(exchange.workers, [context]))


async def send_events(
    exchange: Exchange,
    contexts: Sequence[RequestContext],
    pipeline: Pipeline,
    events: Events,
    reader: Reader | None = None,
) -> None:
    """Runs the requests and sends events as output comes. The response starts with the first, so an error before it has a status.
    ``reader`` sees each delta before the events do.

    Raises:
        SapwoodError: One of the requests failed; the others are ended.
    """
    async with Running(exchange, pipeline, contexts) as runs:
        await _EventClient(exchange, contexts, events, reader, pipeline.heavy).carry(runs)


async def collect(runs: Sequence[Generation]) -> list[Delta]:
    """Each run's whole output; the last delta's finish is in it.

    Raises:
        SapwoodError: One of the requests failed; the caller ends the others.
    """
    client = _WholeClient(len(runs))
    await client.carry(runs)
    return client.wholes()


def told_headers(workers: WorkerNames, contexts: Sequence[RequestContext]) -> Headers:
    """The headers of an unstreamed answer about its generation, like gRPC's trailing metadata.

    Args:
        workers: Names workers for clients.
        contexts: The answer's.
    """
    resumptions = sum(context.resumptions for context in contexts)
    return (
        (WORKER_HEADER, workers.id_of(contexts[0].worker).encode()),
        (RESUMPTIONS_HEADER, b"%d" % resumptions),
        *((STATUS_HEADER, told.encode()) for told in (worst(context.objective for context in contexts),) if told),
        *_notice_headers(contexts[0]),
    )


def with_resumptions(events: bytes, resumptions: int) -> bytes:
    """The same events. If the answer went on, on another worker, the last object of them says how often in one more field:
    clients skip a field they do not know, few an event.
    """
    end = events.rfind(b"}\n") if resumptions else -1  # in JSON a line feed is escaped: it ends an event's data
    return events if end < 0 else b'%b,"%b":%d%b' % (events[:end], RESUMPTIONS_HEADER, resumptions, events[end:])


def with_objective(events: bytes, contexts: Sequence[RequestContext]) -> bytes:
    """The same events. If there is something to tell of objectives, the last object of them has it in one more field."""
    told = worst(context.objective for context in contexts)
    end = events.rfind(b"}\n") if told else -1
    return events if end < 0 else b'%b,"%b":"%b"%b' % (events[:end], STATUS_HEADER, told.encode(), events[end:])


def _notice_headers(context: RequestContext) -> Headers:
    """Notices for the client in addition to its answer, found by prepare: streams also begin with them."""
    return ((NOTICE_HEADER, context.notice.encode()),) if context.notice else ()


class _EventClient(Client):
    """Sends a generation's first and last events in the request's task, those between in the callback that brings their output.

    If another object must read all output first, everything is sent in the task.
    """

    def __init__(
        self,
        exchange: Exchange,
        contexts: Sequence[RequestContext],
        events: Events,
        reader: Reader | None,
        heavy: HeavyWork,
    ) -> None:
        super().__init__(heavy.stint(exchange.tenant) if len(contexts) > A_FEW else None)
        self._exchange = exchange
        self._contexts = contexts
        self._events = events
        self._reader = reader
        self._heavy = heavy
        self._at_once = reader is None or reader.silent
        """Whether deltas between the first and the last one are written as they come."""
        self._begun = False
        self._opened: set[int] = set()
        self._unfinished = len(contexts)
        self._pending: Delta | None = None
        """A delta that cannot be sent without awaiting something: :meth:`drained` sends it."""

    def writable(self) -> bool:
        return self._pending is None and self._exchange.writable()

    async def drained(self) -> None:
        delta = self._pending
        if delta is None:
            await self._exchange.drained()
            return
        written = b""
        if self._reader is not None:
            await self._reader.read(delta)
        if not self._begun:
            self._begun, written = True, self._events.begin()
            self._exchange.extra_headers = (*self._exchange.extra_headers, *_notice_headers(self._contexts[0]))
        self._opened.add(delta.index)
        written += self._events.more(delta)
        if delta.finish is not None:
            self._unfinished -= 1
            if not self._unfinished:
                written = await self._end(written, delta.finish)
        await self._exchange.send_events(written, last=not self._unfinished)
        self._pending = None

    async def _end(self, written: bytes, finish: Finish) -> bytes:
        """Sends the last events, after the ``written`` text, but returns a short rest instead of sending it."""
        for events in self._events.end(finish, sum(context.resumptions for context in self._contexts)):
            if written and len(written) + len(events) > LARGE:
                await self._exchange.send_events(written)
                written = b""
            written += events
            if len(events) > LARGE:
                await self._heavy.turn(self._exchange.tenant, goes_on=True)
        return with_objective(written, self._contexts)

    def write(self, delta: Delta) -> bool:
        if not self._at_once or delta.finish is not None or delta.index not in self._opened:
            self._pending = delta
            return False
        if written := self._events.more(delta):
            self._exchange.write_events(written)
        return True


class _WholeClient(Client):
    """Keeps the output of a request's runs until all of it is there."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._wholes: list[Delta | None] = [None] * count
        self._outputs: dict[int, OutputBuffer] = {}
        """Index of a run -> its output so far, for runs that send more than one delta."""

    def writable(self) -> bool:
        return True

    async def drained(self) -> None:
        """Returns at once: there is nothing to wait for."""

    def write(self, delta: Delta) -> bool:
        whole = self._wholes[delta.index]
        if whole is None:
            self._wholes[delta.index] = delta
            return True
        output = self._outputs.get(delta.index)
        if output is None:
            output = self._outputs[delta.index] = OutputBuffer()
            output.add(whole.output)
        output.add(delta.output)
        whole.token_ids += delta.token_ids
        whole.text_tokens += delta.text_tokens
        whole.logprobs = [*whole.logprobs, *delta.logprobs] if delta.logprobs else whole.logprobs
        whole.finish = delta.finish
        return True

    def wholes(self) -> list[Delta]:
        """Each run's output as one delta."""
        wholes = [whole for whole in self._wholes if whole is not None]
        for index, output in self._outputs.items():
            wholes[index].output = output.take()
        return wholes
