"""What counts as a sign of life of a process that runs the model, on a busy machine, too."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import dataclass

import pytest

from sapwood_worker.ipc import rank
from sapwood_worker.ipc.rank import ChildProcess, RankSilence

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@dataclass
class FakeRank:
    """Gives no sign of life; its process as the kernel shows it."""

    wants_cpu: bool = False
    is_stopped: bool = False

    @property
    def process(self) -> FakeRank:
        return self

    def signs_of_life(self) -> tuple[int, int]:
        return 0, 0


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(rank.time, "monotonic", lambda: now[0])
    return now


def test_a_process_that_waits_for_a_cpu_is_not_silent(clock) -> None:
    fake = FakeRank(wants_cpu=True)
    silence = RankSilence(fake, 0.1)
    for _ in range(100):
        clock[0] += 0.1
        assert silence.check() < 0.5
    fake.wants_cpu = False
    for _ in range(20):
        clock[0] += 0.1
        silence.check()
    assert 1.5 < silence.seconds < 2.5


def test_of_one_that_is_stopped_the_time_counts_in_which_nobody_could_look(clock) -> None:
    fake = FakeRank()
    silence = RankSilence(fake, 0.1)
    clock[0] += 5
    assert silence.check() == pytest.approx(0.2)  # it may have spoken meanwhile, and be read later
    fake.is_stopped = True
    clock[0] += 1
    assert silence.check() == pytest.approx(6)


@linux
async def test_the_kernel_tells_what_a_process_does() -> None:
    busy = ChildProcess(["-c", "while True: pass"])
    try:
        async with asyncio.timeout(60):
            while not busy.wants_cpu or busy.cpu_ticks() < 10:
                await asyncio.sleep(0.01)
            assert not busy.is_stopped
            os.kill(busy._process.pid, signal.SIGSTOP)
            while not busy.is_stopped:
                await asyncio.sleep(0.01)
            assert not busy.wants_cpu
    finally:
        busy.kill()
        await busy.wait()
    assert not busy.wants_cpu
    assert not busy.is_stopped
