"""Steps of made-up requests that make drafts and check them. They compile and load all that a draft uses: else the first real
draft would, and the scheduler, which measures what drafts cost, would take drafts for expensive."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.model.runner.drafts.drafting_runner import DraftingRunner
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.records.step import LATE, Entry, Step

_REACH = 16
"""Tokens that the requests' pages hold."""
_DRAWS = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0))
_PENALISED = SamplingParams(temperature=1.0, presence_penalty=0.5)
"""Its tokens are drawn outside of graphs."""
_CHECKED = ((1, 4), (2, 8))
"""Requests and positions of each: kernels are made for numbers that 16 divides and for others."""


def try_checks(runner: ModelRunner) -> int:
    """Checks drafts, in the pool's first pages; greedy, drawn, and with penalties.

    Args:
        runner: Runs the model.

    Returns:
        Steps that were run; 0 if the pool has too few pages.
    """
    steps = 0
    for sampling in (*_DRAWS, _PENALISED):
        for rows, count in _CHECKED:
            for at, step in enumerate(_steps(runner, rows, [(0, 1), (1, count)], sampling)):
                if at:
                    step.samples = step.counts
                runner.execute(step)
                steps += 1
    return steps


def drafted_before(runner: ModelRunner, first: int) -> ModelRunner:
    """The runner, whose draft has drafted (:func:`try_drafts`) where kernels are compiled or loaded at their first use."""
    if isinstance(runner.draft, DraftingRunner) and runner.draft.asynchronous:
        try_drafts(runner, runner.draft, first)
    return runner


def try_drafts(runner: ModelRunner, draft: DraftingRunner, first: int) -> int:
    """Drafts in the pool's first pages, drawn and greedily; if the draft has chains, these are checked, and drafted on.

    Args:
        runner: Runs the model.
        draft: Runs the draft model or head.
        first: The first position that it computes.

    Returns:
        Chains and steps that were run; 0 if the pool has too few pages.
    """
    steps = 0
    for sampling in _DRAWS:
        for rows, _ in _CHECKED:
            parts = [(first, 2), *((first + 2 + place, 1) for place in range(3))]
            made = _steps(draft, rows, parts, sampling)
            if not made:
                continue
            reach = np.full(rows, _REACH)
            late = draft.launch_chain(made[0], np.full(rows, 3), reach)
            if late is None:
                for step in made[1:]:
                    step.token_ids = np.full(rows, -1, np.int64)
                for step in made:
                    draft.execute(step)
                steps += len(made)
                continue
            (check,) = _steps(runner, rows, [(first + 1, 5)], sampling)
            stand_ins = LATE - np.arange(4) * rows - np.arange(rows)[:, None]
            check.samples, check.late = check.counts, late
            check.token_ids = np.concatenate((np.zeros((rows, 1), np.int64), stand_ins), 1).ravel()
            runner.execute(check)
            again = draft.launch_chain(made[1], np.full(rows, 3), reach)
            assert again is not None
            again.wait()
            steps += 3
    return steps


def _steps(runner: ModelRunner, rows: int, parts: Sequence[tuple[int, int]], sampling: SamplingParams) -> list[Step]:
    """Steps of the first rows of the page table, which share pages: for each the first position and the tokens of every row."""
    info = runner.info
    pages = -(-_REACH // info.page_size)
    room = min([info.num_pages, *(window.num_pages for window in info.windows)])
    if rows > info.max_running or pages > room or info.context_length < _REACH:
        return []
    slots, ones = np.arange(rows), np.ones(rows, np.int64)
    steps = []
    for at, (start, count) in enumerate(parts):
        step = Step(0, slots, ones * start, ones * count, ones, np.zeros(rows * count, np.int64))
        step.pages = np.tile(np.arange(pages, dtype=np.int32), (rows, 1 + len(info.windows)))
        step.entries = () if at else tuple(Entry(row, 0, sampling, 1) for row in range(rows))
        steps.append(step)
    return steps
