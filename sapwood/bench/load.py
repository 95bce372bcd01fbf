"""Sends conversations to a target: as clients that wait for their answers (closed loop), or at given times (open loop)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field

from sapwood.bench.data.conversation import Api, Conversation, Conversations, History
from sapwood.bench.lag import LagMeter
from sapwood.bench.targets.record import INTERRUPTED, Record, clock
from sapwood.bench.targets.target import Asked

_PROGRESS_SECONDS = 0.25


@dataclass
class Run:
    """The record of a load; it grows while the load runs.

    Attributes:
        began: When the load began, on :data:`~sapwood.bench.targets.record.clock`.
        records: One for each request, in the order of sending.
        ended: The finished requests, in the order in which they ended.
        failures: How many of these failed.
        lag: How late the load generator was.
        open_loop: Whether requests were sent at given times.
        interrupted: Whether the load was stopped before its end.
    """

    began: float
    open_loop: bool
    records: list[Record] = field(default_factory=list)
    ended: list[Record] = field(default_factory=list)
    failures: int = 0
    lag: LagMeter = field(default_factory=LagMeter)
    interrupted: bool = False


class Load:
    """One load on a target.

    Args:
        target: Is asked.
        conversations: Its questions; the load ends with the last one.
        api: How the turns of a conversation follow each other.
        requests: After this many no more are sent; None for no limit.
        seconds: After this many no more are sent; None for no limit. What was sent is waited for.
        keep_texts: Whether the records keep the answers, which take more memory than all else.
        on_progress: Called a few times a second while the load runs.
    """

    def __init__(
        self,
        target: Asked,
        conversations: Conversations,
        api: Api,
        *,
        requests: int | None = None,
        seconds: float | None = None,
        keep_texts: bool = False,
        on_progress: Callable[[Run], None] = lambda run: None,
    ) -> None:
        self._target = target
        self._conversations = conversations
        self._api = api
        self._requests = requests
        self._seconds = seconds
        self._keep_texts = keep_texts
        self._on_progress = on_progress
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Ends the load now: what runs is broken off and noted as interrupted."""
        self._stop.set()

    async def closed(self, concurrency: int) -> Run:
        """``concurrency`` clients, each with one request at a time."""
        run = Run(clock(), open_loop=False)

        async def client() -> None:
            while self._goes_on(run) and (conversation := next(self._conversations, None)) is not None:
                await self._converse(run, conversation, clock())

        async def clients() -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(client())

        return await self._supervise(run, clients())

    async def open(self, arrivals: Iterator[float]) -> Run:
        """Conversations at given times, in seconds after the start, whether or not those before were answered."""
        run = Run(clock(), open_loop=True)

        async def dispatch() -> None:
            started = 0
            async with asyncio.TaskGroup() as group:
                # The next conversation is made before its time has come.
                for conversation, offset in zip(self._conversations, arrivals, strict=False):
                    if self._seconds is not None and offset >= self._seconds:
                        break
                    due = run.began + offset
                    await asyncio.sleep(max(0.0, due - clock()))
                    if self._requests is not None and max(started, len(run.records)) >= self._requests:
                        break
                    group.create_task(self._converse(run, conversation, due))
                    started += 1

        return await self._supervise(run, dispatch())

    async def _supervise(self, run: Run, work: Coroutine[None, None, None]) -> Run:
        """Runs the work until it is done or the load is stopped."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stop.wait())
        try:
            async with run.lag:
                while not task.done() and not self._stop.is_set():
                    await asyncio.wait((task, stopped), timeout=_PROGRESS_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    self._on_progress(run)
            if not task.done():
                run.interrupted = True
                task.cancel()
                await asyncio.wait((task,))
            if not task.cancelled():
                task.result()
        finally:
            task.cancel()
            stopped.cancel()
        return run

    def _goes_on(self, run: Run) -> bool:
        """Whether another request may be sent."""
        if self._requests is not None and len(run.records) >= self._requests:
            return False
        return self._seconds is None or clock() - run.began < self._seconds

    async def _converse(self, run: Run, conversation: Conversation, due: float) -> None:
        """Asks turn after turn; a turn that fails ends the conversation."""
        history = History(self._api)
        for number, turn in enumerate(conversation.turns):
            if number > 0:
                if not self._goes_on(run):
                    return
                due = clock()
            record = Record(due=due)
            run.records.append(record)
            try:
                await self._target.ask(history.extend(turn), record)
            except asyncio.CancelledError:
                record.ended = record.ended or clock()
                record.fail(INTERRUPTED)
                raise
            run.ended.append(record)
            if record.error:
                run.failures += 1
                return
            history.answered(record.text)
            if not self._keep_texts:
                record.pieces.clear()
