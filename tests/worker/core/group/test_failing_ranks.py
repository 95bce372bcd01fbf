"""Ranks whose devices compute, and that fail in the same step: in the same place of it, or not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from sapwood_testing.worker.fake_runner import FakeRunner
from sapwood_worker.core.group.follower import follow
from sapwood_worker.core.group.group_runner import DataParallelRunner, GroupRunner
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.ranks import WAITS_BYTES, Shown, Waits
from sapwood_worker.records.step import LaunchedStep, ModelOutput, RankLostError, Step

INFO = ModelInfo(
    architecture="fake", dtype="none", context_length=64, vocab_size=9, eos_token_ids=(), page_size=4, num_pages=8
)


class Failing(FakeRunner):
    """Fails each step after so many exchanges.

    Args:
        waits: Where they are counted.
        exchanges: How many.
    """

    def __init__(self, waits: Waits, exchanges: int) -> None:
        super().__init__(INFO)
        self._waits, self._exchanges = waits, exchanges

    def launch(self, step: Step) -> LaunchedStep:
        for _ in range(self._exchanges):
            self._waits.count_exchange()
        raise MemoryError("no memory")


@pytest.mark.parametrize(("exchanges", "error"), [(3, MemoryError), (4, RankLostError)])
def test_a_step_failing_alike_on_all_ranks_ends_alone_and_otherwise_the_group(
    exchanges: int, error: type[Exception]
) -> None:
    here, there = Pipe()
    waits = Waits(), Waits()
    follower = threading.Thread(target=follow, args=(Failing(waits[1], exchanges), there, waits[1]))
    follower.start()
    try:
        group = GroupRunner(Failing(waits[0], 3), [here], waits[0])
        launched = group.launch(Step(0))
        with pytest.raises(error, match="no memory") as failed:
            launched.result()
        if error is RankLostError:
            assert "rank 1 failed in another place than rank 0" in str(failed.value)
    finally:
        here.close()
        follower.join()


class Device(FakeRunner):
    """Computes by itself, after its caller has gone on.

    Args:
        computed: What its steps end with.
        known: What it is known to have failed with.
    """

    def __init__(self, computed: Callable[[], ModelOutput], known: Exception | None = None) -> None:
        super().__init__(INFO)
        self.asynchronous = True
        self._step = QueuedResult(computed, known)

    def launch(self, step: Step) -> LaunchedStep:
        return self._step


class QueuedResult:
    """Implements :class:`~sapwood_worker.records.step.LaunchedStep`."""

    def __init__(self, computed: Callable[[], ModelOutput], known: Exception | None) -> None:
        self._computed, self._known = computed, known

    def result(self) -> ModelOutput:
        return self._computed()

    def check(self) -> None:
        if self._known is not None:
            raise self._known


@pytest.mark.parametrize("odd", [0, 1, 2, 3])
@pytest.mark.parametrize("leader", [GroupRunner, DataParallelRunner])
def test_a_rank_whose_device_fails_alone_is_named_while_the_others_wait_for_it(
    leader: Callable[..., GroupRunner | DataParallelRunner], odd: int
) -> None:
    """The others' devices end their step when the group has ended, and not before."""
    over = threading.Event()
    in_time: list[bool] = []

    def wait_for_ever() -> ModelOutput:
        in_time.append(over.wait(timeout=30))
        return ModelOutput(0, [])

    def fail() -> ModelOutput:
        raise RuntimeError("device-side assert")

    devices = [Device(wait_for_ever) for _ in range(4)]
    devices[odd] = Device(fail, RuntimeError("device-side assert"))
    pipes = [Pipe() for _ in devices[1:]]

    def run(device: Device, there: Connection) -> None:
        with suppress(BrokenPipeError):  # it reports after the end
            follow(device, there)

    threads = [
        threading.Thread(target=run, args=(device, there))
        for device, (_, there) in zip(devices[1:], pipes, strict=True)
    ]
    for each in threads:
        each.start()
    try:
        group = leader(devices[0], [here for here, _ in pipes])
        launched = group.launch(Step(0))
        with pytest.raises(RankLostError, match=f"rank {odd} failed: device-side assert"):
            launched.result()
    finally:
        over.set()
        for here, _ in pipes:
            here.close()
        for each in threads:
            each.join()
    assert all(in_time)


def test_a_leader_that_waits_in_vain_shows_that_it_comes_no_further() -> None:
    """Who hangs is found by who waits for it and comes no further."""
    shown = bytearray(WAITS_BYTES)
    over = threading.Event()
    moves: list[int] = []

    class Watched(QueuedResult):
        def check(self) -> None:
            moves.append(Shown.of(shown).moves)
            if len(moves) == 3:
                over.set()

    class Leader(Device):
        def launch(self, step: Step) -> LaunchedStep:
            return Watched(lambda: ModelOutput(0, []), None)

    def wait() -> ModelOutput:
        assert over.wait(timeout=30)
        return ModelOutput(0, [])

    here, there = Pipe()
    follower = threading.Thread(target=follow, args=(Device(wait), there))
    follower.start()
    try:
        group = GroupRunner(Leader(wait), [here], Waits(shown))
        group.launch(Step(0)).result()
    finally:
        here.close()
        follower.join()
    assert len({*moves}) == 1
