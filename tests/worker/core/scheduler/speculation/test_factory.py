from __future__ import annotations

import pytest

from sapwood_worker.config import WorkerConfig
from sapwood_worker.core.scheduler.config import SchedulerConfig, SpeculateName
from sapwood_worker.core.scheduler.scheduler import Scheduler


@pytest.mark.parametrize(
    ("speculate", "micro_batches", "drafts"),
    [("auto", 1, True), ("auto", 2, False), ("prefix", 2, True), ("off", 2, False)],
)
def test_what_nobody_asked_for_takes_no_lanes_of_a_pipeline(
    speculate: SpeculateName, micro_batches: int, drafts: bool
) -> None:
    scheduler = Scheduler(
        SchedulerConfig(page_size=4, num_pages=64, context_length=64, speculate=speculate, micro_batches=micro_batches)
    )
    assert (scheduler.speculates, scheduler.micro_batches) == (drafts, 1 if drafts else micro_batches)


def test_a_worker_drafts_what_pays_unless_it_is_told_otherwise() -> None:
    assert WorkerConfig().speculate == "auto"
