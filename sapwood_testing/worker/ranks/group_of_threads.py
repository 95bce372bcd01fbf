"""A leader and its followers as threads of one process: all of a group but the processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypeVar

from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.worker.thread_ranks import run_grid
from sapwood_worker.core.group.follower import follow
from sapwood_worker.core.group.group_runner import DataParallelRunner, GroupRunner
from sapwood_worker.model.distributed.data_parallel import DataParallelRows
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.settings import DispatchName

ResultT = TypeVar("ResultT")


def run_group(
    size: int,
    path: Path,
    work: Callable[[Any], ResultT],
    *,
    stages: int = 1,
    own_requests: bool = False,
    whole_experts: bool = False,
    dispatch: DispatchName = "gather",
    prepare: Callable[[ModelRunner], object] = lambda runner: None,
    **options: Any,
) -> ResultT:
    """What ``work`` returns, given the runner of a model that is split over so many threads.

    Args:
        size: Ranks of a stage.
        path: The model.
        work: Runs steps, in rank 0's thread.
        stages: Stages of a pipeline.
        own_requests: Whether each rank has requests of its own.
        whole_experts: Whether ranks have some of the experts each, whole.
        dispatch: How rows go to the experts of other ranks.
        prepare: Called with each rank's runner, in its thread.
        **options: As :class:`RunnerOptions` takes them.
    """
    pipes = [Pipe() for _ in range(size * stages - 1)]

    def one(rank: int, parallel: Parallel) -> list[ResultT]:
        if own_requests:
            parallel = replace(parallel, rows=DataParallelRows(parallel.tp, device_ops("cpu")))
        if whole_experts:
            parallel = replace(parallel, ep=parallel.tp, dispatch=dispatch)
        runner = build_runner(RunnerOptions(model_path=path, threads=1, parallel=parallel, **options))
        prepare(runner)
        if rank:
            try:
                follow(runner, pipes[rank - 1][1])
            finally:  # as where a process ends
                pipes[rank - 1][1].close()
            return []
        try:
            leader = DataParallelRunner if own_requests else GroupRunner
            return [work(leader(runner, [here for here, _ in pipes]))]
        finally:
            for here, _ in pipes:
                here.close()

    return run_grid(size, stages, one)[0][0]
