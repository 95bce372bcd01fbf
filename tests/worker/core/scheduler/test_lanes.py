"""What a scheduler whose steps go side by side, each of other requests, has in common with one whose steps follow each other."""

from __future__ import annotations

import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.records.step import ModelOutput, Step


def run(lanes: int, tokens: int) -> Scheduler:
    """A scheduler whose four requests have got at least so many tokens each, in steps of as many lanes."""
    config = SchedulerConfig(page_size=4, num_pages=400, context_length=256, lanes=lanes, speculate="off")
    scheduler = Scheduler(config)
    for serial in range(4):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        scheduler.add(Request(serial, f"r{serial}", [1, 2, 3], params))
    steps: list[Step] = []
    while scheduler.has_work:
        while len(steps) < lanes and scheduler.plans_ahead and (step := scheduler.schedule()):
            steps.append(step)
        first = steps.pop(0)
        scheduler.update(ModelOutput(first.number, [[7] if samples else [] for samples in first.samples]))
    return scheduler


@pytest.mark.parametrize("lanes", [2, 4])
def test_what_requests_are_expected_to_generate_sinks_with_their_tokens_however_many_steps_that_takes(
    lanes: int,
) -> None:
    alone, side_by_side = run(1, 100), run(lanes, 100)
    assert side_by_side._ratio.ratio == pytest.approx(alone._ratio.ratio, rel=0.03)
    assert side_by_side._steps > 1.5 * alone._steps
