"""Ranks whose devices compute, and that fail in the same step: in the same place of it, or not."""

from __future__ import annotations

import threading
from multiprocessing import Pipe

import pytest

from sapwood_testing.worker.fake_runner import FakeRunner
from sapwood_worker.core.group.follower import follow
from sapwood_worker.core.group.leader import GroupRunner
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.ranks.waits import Waits
from sapwood_worker.records.step import LaunchedStep, RankLostError, Step


class Failing(FakeRunner):
    """Fails each step after so many exchanges.

    Args:
        waits: Where they are counted.
        exchanges: How many.
    """

    def __init__(self, waits: Waits, exchanges: int) -> None:
        super().__init__(
            ModelInfo(
                architecture="fake", dtype="none", context_length=64, vocab_size=9, eos_token_ids=(), page_size=4, num_pages=8
            )
        )  # fmt: skip
        self._waits, self._exchanges = waits, exchanges

    def launch(self, step: Step) -> LaunchedStep:
        for _ in range(self._exchanges):
            self._waits.count_exchange()
        raise MemoryError("no memory")


@pytest.mark.parametrize(("exchanges", "error"), [(3, MemoryError), (4, RankLostError)])
def test_a_step_that_fails_in_one_place_on_all_ranks_ends_itself_and_in_several_the_group(
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
