from __future__ import annotations

import pytest

from sapwood_worker.config import WorkerConfig
from sapwood_worker.core.scheduler.config import SchedulerConfig, SpeculateName
from sapwood_worker.core.scheduler.scheduler import Scheduler


@pytest.mark.parametrize(
    ("speculate", "lanes", "drafts"),
    [("auto", 1, True), ("auto", 2, False), ("prefix", 2, True), ("off", 2, False)],
)
def test_what_nobody_asked_for_takes_no_lanes_of_a_pipeline(speculate: SpeculateName, lanes: int, drafts: bool) -> None:
    scheduler = Scheduler(
        SchedulerConfig(page_size=4, num_pages=64, context_length=64, speculate=speculate, lanes=lanes)
    )
    assert (scheduler.speculates, scheduler.lanes) == (drafts, 1 if drafts else lanes)


def test_a_worker_drafts_what_pays_unless_it_is_told_otherwise() -> None:
    assert WorkerConfig().speculate == "auto"
