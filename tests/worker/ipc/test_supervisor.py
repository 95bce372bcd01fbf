"""A scheduler process that ends again and again: it is started again, later each time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from sapwood_common.errors import ConfigError
from sapwood_worker.ipc.liveness import Liveness
from sapwood_worker.ipc.messages import FromScheduler
from sapwood_worker.ipc.supervisor import LASTING_SECONDS, Pauses, SchedulerProcess, Supervisor


def test_pauses_grow_while_ends_follow_each_other() -> None:
    now = 0.0
    pauses = Pauses(lambda: now)
    found = []
    for _ in range(9):
        pauses.is_up()
        now += LASTING_SECONDS - 1
        pauses.has_ended()
        found.append(pauses.seconds)
    assert found == [0, 0, 2, 4, 8, 16, 32, 60, 60]
    pauses.has_ended()  # it could not even start
    assert (pauses.seconds, pauses.ends) == (60, 10)
    pauses.is_up()
    now += LASTING_SECONDS
    pauses.has_ended()
    assert (pauses.seconds, pauses.ends) == (0, 1)


class Process:
    """Stands in for a scheduler process: becomes ready or does not, and ends when it is run."""

    size, lost, waits_for_a_node = 1, None, False
    ranks: tuple[Any, ...] = ()

    def __init__(self, error: str) -> None:
        self._error = error

    def start(self) -> None:
        pass

    async def meet(self) -> None:
        pass

    async def ready(self) -> str:
        if self._error:
            raise ConfigError(self._error)
        return "info"

    async def run(self, receive: Callable[[FromScheduler], None]) -> str:
        return "killed"

    async def stop(self) -> None:
        pass


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that were slept, which takes no time."""
    found: list[float] = []
    sleep = asyncio.sleep

    async def at_once(seconds: float) -> None:
        found.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", at_once)
    return found


def supervisor(*errors: str) -> Supervisor:
    processes = iter(map(Process, errors))
    return Supervisor(lambda: cast(SchedulerProcess, next(processes)), 300.0, 600.0)


async def test_what_has_been_ready_is_started_until_it_is_so_again(slept: list[float]) -> None:
    found = supervisor("", "no memory", "no memory", "no memory", "", "")
    await found.start()
    assert cast(str, await found.ready()) == "info"
    liveness = Liveness(1)
    assert await found.run(lambda _: None, liveness, lambda: None) == "killed"
    await found.start()
    assert cast(str, await found.ready()) == "info"
    pauses = [seconds for seconds in slept if seconds >= 1]
    assert pauses == [2, 4], "the first two ends are not waited for"
    assert await found.run(lambda _: None, liveness, lambda: None) == "killed"
    await found.start()
    assert [seconds for seconds in slept if seconds >= 1] == [2, 4, 8]


async def test_what_never_was_ready_is_not_started_again(slept: list[float]) -> None:
    found = supervisor("no such model", "")
    await found.start()
    with pytest.raises(ConfigError, match="no such model"):
        await found.ready()
    assert not [seconds for seconds in slept if seconds >= 1]
