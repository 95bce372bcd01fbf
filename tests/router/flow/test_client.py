"""A request's runs and their client, where the client is ready, and not, at any moment."""

from __future__ import annotations

import asyncio

import pytest

from sapwood_net.pacing.heavy_work import HeavyWork, Stint
from sapwood_router.flow import client
from sapwood_router.request.context import Delta, Finish, FinishReason, Usage
from sapwood_router.request.output import Output

LAST = Delta(Output("x"), [1], Finish(FinishReason.LENGTH, Usage(1, 1, 0)))


class Client(client.Client):
    def __init__(self, stint: Stint | None = None) -> None:
        super().__init__(stint)
        self.open = True
        self.written: list[Delta] = []

    def writable(self) -> bool:
        return self.open

    async def drained(self) -> None:
        while not self.open:
            await asyncio.sleep(0)

    def write(self, delta: Delta) -> bool:
        self.written.append(delta)
        return True


class Run:
    """One delta, which waits where the client is not ready."""

    def __init__(self, client: Client, early: bool) -> None:
        self.client = client
        self.early = early
        self.waits = False

    async def start(self, sink: client.Client, index: int) -> None:
        self.sink = sink
        if self.early:
            self.come()

    def come(self) -> None:
        """The delta comes while the client is not ready, which it is again before anybody else has had a turn."""
        self.client.open = False
        self.waits = not self.sink.writable()
        if self.waits:
            self.sink.postpone(0)
        self.client.open = True

    def flush(self) -> None:
        if self.waits and self.sink.writable():
            self.waits = False
            self.sink.take(LAST)


@pytest.mark.parametrize("early", [True, False])
async def test_a_client_that_is_ready_again_at_once_gets_what_had_to_wait(early) -> None:
    client = Client()
    run = Run(client, early)
    carried = asyncio.ensure_future(client.carry([run]))
    for _ in range(3):
        await asyncio.sleep(0)
    if not early:
        run.come()
    await asyncio.wait_for(carried, 10)
    assert client.written == [LAST]


class Waiting:
    """Many runs, each with one delta that comes while the client is busy with another's."""

    def __init__(self) -> None:
        self.flushes = 0
        self.done = False

    async def start(self, sink: client.Client, index: int) -> None:
        self.sink, self.index = sink, index
        self.flush()

    def flush(self) -> None:
        self.flushes += 1
        if not self.done and not self.sink.writable():
            self.sink.postpone(self.index)
        elif not self.done:
            self.done = True
            self.sink.take(LAST)


class OneAtATime(Client):
    """Takes a delta only once the one before is sent."""

    def write(self, delta: Delta) -> bool:
        self.written.append(delta)
        self.open = False
        return False

    async def drained(self) -> None:
        self.open = True


async def test_of_a_thousand_runs_that_wait_each_is_asked_a_few_times() -> None:
    """Each delta made all the others try again: a thousand took half a second, in one turn of the event loop."""
    client, runs = OneAtATime(), [Waiting() for _ in range(1000)]
    await asyncio.wait_for(client.carry(runs), 10)
    assert len(client.written) == len(runs)
    assert sum(run.flushes for run in runs) <= 3 * len(runs)


async def test_what_is_done_for_very_many_runs_takes_turns(monkeypatch) -> None:
    monkeypatch.setattr("sapwood_net.pacing.heavy_work.PIECE", 0.0)
    heavy, turns = HeavyWork(rest=0.0), 0
    take = heavy.turn

    async def turn(*args: object, **more: bool) -> None:
        nonlocal turns
        turns += 1
        await take(*args, **more)

    heavy.turn = turn
    runs = [Waiting() for _ in range(100)]
    await asyncio.wait_for(OneAtATime(heavy.stint()).carry(runs), 10)
    assert turns >= len(runs)
