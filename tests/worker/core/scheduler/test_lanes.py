"""What a scheduler whose steps go side by side, each of other requests, has in common with one whose steps follow each other."""

from __future__ import annotations

from itertools import pairwise

import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.records.step import ModelOutput, Step


def run(micro_batches: int, tokens: int) -> Scheduler:
    """A scheduler whose four requests have got at least so many tokens each, in steps of as many micro-batches."""
    config = SchedulerConfig(
        page_size=4, num_pages=400, context_length=256, micro_batches=micro_batches, speculate="off"
    )
    scheduler = Scheduler(config)
    for serial in range(4):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        scheduler.add(Request(serial, f"r{serial}", [serial, 2, 3], params))
    steps: list[Step] = []
    while scheduler.has_work:
        while len(steps) < micro_batches and scheduler.plans_ahead and (step := scheduler.schedule()):
            steps.append(step)
        first = steps.pop(0)
        scheduler.update(ModelOutput(first.number, [[7] if samples else [] for samples in first.samples]))
    return scheduler


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_expected_output_sinks_with_generated_tokens_in_any_number_of_steps(
    micro_batches: int,
) -> None:
    alone, side_by_side = run(1, 100), run(micro_batches, 100)
    assert side_by_side._ratio.ratio == pytest.approx(alone._ratio.ratio, rel=0.03)
    assert side_by_side._steps > 1.5 * alone._steps


def decodes(
    requests: int, count: int, fewest: int = 1, step_tokens: int = 8192, micro_batches: int = 2
) -> list[tuple[list[int], list[int]]]:
    """Rows and tokens of so many steps of decodes, planned as soon as may be where two micro-batches are chained."""
    config = SchedulerConfig(
        page_size=4, num_pages=400, context_length=256, micro_batches=micro_batches, micro_batches_from=fewest,
        chained=True, jump_forward=False,
        max_step_tokens=step_tokens,
    )  # fmt: skip
    scheduler = Scheduler(config)
    for serial in range(requests):
        params = SamplingParams(max_tokens=99, ignore_eos=True)
        scheduler.add(Request(serial, f"r{serial}", [serial, 2, 3], params))
    flying: list[Step] = []
    planned: list[Step] = []
    while len(planned) < count:
        while scheduler.plans_ahead and (step := scheduler.schedule()):
            flying.append(step)
            if step.counts.max() == 1:
                planned.append(step)
        first = flying.pop(0)
        scheduler.update(ModelOutput(first.number, [[7] if samples else [] for samples in first.samples]))
    return [(step.rows.tolist(), step.token_ids.tolist()) for step in planned[:count]]


def test_with_tokens_on_devices_each_step_has_the_oldest_steps_requests() -> None:
    steps = decodes(requests=5, count=12)[4:]
    assert [sorted(a + b) for (a, _), (b, _) in pairwise(steps)] == [[0, 1, 2, 3, 4]] * 7
    assert [rows for rows, _ in steps[2:]] == [rows for rows, _ in steps[:-2]]
    assert {token for _, tokens in steps for token in tokens} == {-1}, "the host knows no token when it plans"


@pytest.mark.parametrize(("requests", "fewest"), [(1, 1), (5, 6)])
def test_too_few_requests_for_lanes_are_all_in_each_step_without_waiting(requests: int, fewest: int) -> None:
    steps = decodes(requests, 8, fewest)[2:]
    assert steps == [(list(range(requests)), [-1] * requests)] * 6


@pytest.mark.parametrize("micro_batches", [2, 3, 4])
def test_requests_whose_prompts_came_one_after_another_do_not_stay_apart(micro_batches: int) -> None:
    steps = decodes(5, 12, fewest=6, step_tokens=4, micro_batches=micro_batches)[-4:]
    assert [sorted(rows) for rows, _ in steps] == [[0, 1, 2, 3, 4]] * 4
