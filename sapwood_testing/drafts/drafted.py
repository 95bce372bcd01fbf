"""Runners and schedulers on tiny models that drafts are computed for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Protocol

from sapwood_testing.drafts.answers import VOCAB, Answers, run
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_testing.worker.thread_ranks import ThreadGroup, run_ranks
from sapwood_worker.core.group.follower import follow
from sapwood_worker.core.group.group_runner import GroupRunner
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.core.scheduler.speculation.model_drafter import DraftModel
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.grammar.backend import TokenMasks
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions


def options(path: Path, **changes: Any) -> RunnerOptions:
    """Small pools, for one thread: tiny matrices would only make others wait."""
    return RunnerOptions(model_path=path, threads=1, **{"num_pages": 128, "max_running": 8} | changes)


def scheduler_of(runner: ModelRunner, drafter: str = "draft", **settings: Any) -> Scheduler:
    """One that drafts whatever steps cost, by default, with the draft model or head that the runner has, if any."""
    info, draft = runner.info, runner.draft
    model = (
        None if draft is None else DraftModel(draft, draft.info.context_length, 64, drafter, int(drafter != "draft"))
    )
    settings = {"speculate": "off" if draft is None else "prefix", "context_length": 512} | settings
    ends = frozenset({0})
    return scheduler_for(
        info, masks=TokenMasks(VOCAB), drafter=model, eos_token_ids=ends, conservativeness=0.0, **settings
    )


class PlainDrafter(Protocol):
    """A draft model in plain torch."""

    def draft(self, known: list[int], count: int) -> list[int]:
        """The ``count`` tokens that it says come after ``known``."""


def check_each_draft(scheduler: Any, plain: PlainDrafter) -> list[int]:
    """Lets the scheduler draft almost always, and asserts that each draft is the plain drafter's.

    Returns:
        A list that takes the length of each draft as it is made.
    """
    speculation, lengths = scheduler._speculation, []
    fill = speculation._drafter.fill

    def compared(decodes: Any, drafts: Any) -> Any:
        found = fill(decodes, drafts)
        for request, draft in zip(decodes, found, strict=True):
            if draft:
                assert draft == plain.draft(request.token_ids.tolist(), len(draft))
                lengths.append(len(draft))
        return found

    speculation._drafter.fill = compared
    speculation._trials.rate = 0.9  # drafts of some length, whether right or not
    return lengths


def run_split(
    path: Path, build: Callable[[RunnerOptions], ModelRunner], drafter: str, asked: Callable[[], list[Request]]
) -> tuple[Answers, Answers, int, int]:
    """Answers of a model that is split over two ranks, of which rank 0 drafts.

    Args:
        path: The model.
        build: Makes rank 0's runner.
        drafter: What it drafts with.
        asked: Makes the requests.

    Returns:
        The answers without drafts, those with, and how many drafted tokens were accepted and how many were not.
    """
    here, there = Pipe()

    def one(group: ThreadGroup) -> list[tuple[Answers, Answers, int, int]]:
        split = options(path, parallel=Parallel(tp=group))
        if group.rank:
            follow(build_runner(replace(split, headed=drafter != "draft")), there)
            return []
        try:
            runner = build(split)
            leader = GroupRunner(runner, [here])
            expected = run(scheduler_of(runner, speculate="off"), leader, False, asked())
            scheduler = scheduler_of(runner, drafter)
            found, load = run(scheduler, leader, False, asked()), scheduler.load()
            return [(expected, found, load.accepted_tokens, load.drafted_tokens - load.accepted_tokens)]
        finally:
            here.close()

    return run_ranks(2, one)[0][0]
