"""Models split over this machine's GPUs: this process is rank 0, the others are its children."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from sapwood_worker.core.group.follower import follow
from sapwood_worker.core.group.leader import GroupRunner
from sapwood_worker.core.loaded_runner import LoadedRunner
from sapwood_worker.model.distributed.torch_group import join_groups
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.records.place import Place

Options = dict[str, Any]
"""Of :class:`RunnerOptions`, but for the device and the groups."""


@contextmanager
def group_runners(
    size: int, models: Sequence[Options], device: str = "cuda", stages: int = 1
) -> Iterator[Iterator[LoadedRunner]]:
    """The runners of models over so many GPUs, one after another, in so many stages; with one GPU there are no other processes.
    Or ``cpu``."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/rendezvous"
        context = multiprocessing.get_context("spawn")
        pipes = [[context.Pipe() for _ in models] for _ in range(1, size)]
        processes = [
            context.Process(
                target=_follow,
                args=(Place(rank, size, rendezvous), stages, models, device, [there for _, there in ways]),
            )
            for rank, ways in enumerate(pipes, 1)
        ]
        for process in processes:
            process.start()
        try:
            runners = _build(Place(0, size, rendezvous), stages, models, device)
            yield _lead(runners, [[here for here, _ in ways] for ways in pipes])
        finally:
            for ways in pipes:
                for here, there in ways:
                    here.close()
                    there.close()
            for process in processes:
                process.join(20)
                process.kill()


def _lead(runners: list[ModelRunner], followers: list[list[Connection]]) -> Iterator[LoadedRunner]:
    for number, runner in enumerate(runners):
        ways = [each[number] for each in followers]
        yield GroupRunner(runner, ways) if ways else runner
        for way in ways:
            way.close()


def _follow(place: Place, stages: int, models: Sequence[Options], device: str, leader: list[Connection]) -> None:
    for runner, way in zip(_build(place, stages, models, device), leader, strict=True):
        follow(runner, way)


def _build(place: Place, stages: int, models: Sequence[Options], device: str) -> list[ModelRunner]:
    if device == "cuda":
        torch.cuda.set_device(place.rank)
        device = f"cuda:{place.rank}"
    parallel = join_groups(
        place.rank,
        tensor=place.size // stages,
        pipeline=stages,
        rendezvous=place.rendezvous,
        backend="gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        timeout=120,
        exchange_timeout=600,
    )
    return [build_runner(RunnerOptions(device=device, parallel=parallel, **each)) for each in models]
