"""Models split over this machine's GPUs: this process is rank 0, the others are its children."""

from __future__ import annotations

import faulthandler
import fcntl
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from sapwood_kernels.ops.cpu import CpuOps
from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.core.group.follower import follow
from sapwood_worker.core.group.group_runner import DataParallelRunner, GroupRunner
from sapwood_worker.core.loaded_runner import LoadedRunner
from sapwood_worker.model.distributed.custom_all_reduce import choose_sums
from sapwood_worker.model.distributed.data_parallel import DataParallelRows
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.torch_group import join_groups
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.graphs import cuda_graph, piecewise_graphs
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.records.ranks import Place
from sapwood_worker.settings import DispatchName

_MEETING_SECONDS = 300.0
_EXCHANGE_SECONDS = 600.0
_ENDING_SECONDS = 5.0

Options = dict[str, Any]
"""Of :class:`RunnerOptions`, but for the device and the groups."""


@dataclass(frozen=True)
class Split:
    """How ranks share a model.

    Attributes:
        whole_experts: Whether each has some of the experts, whole.
        own_requests: Whether each has requests of its own.
        dispatch: How rows go to experts where ranks have requests of their own.
        all_reduce: What sums over them, as ``--all-reduce`` of the worker names it.
        redundant_experts: Slots of a layer beyond one for each expert, to which experts may move.
        uniform_tokens: Most tokens of a step that experts are chosen for at random; 0: the model's routers choose.
        skew: Standard deviation of the logarithms of how likely a layer's experts are then, but for a factor; 0: all alike.
        graph_sizes: Batches of decodes that have graphs, and no others have, for a quicker start; none: as a worker has them.
        diverging_rank: The rank that gets other numbers of all ranks than the others, to try whether that is found; -1: none.
        as_on_gpus: Whether CPUs decode by what stands for graphs, and are taken to compute by themselves, as GPUs are.
    """

    whole_experts: bool = False
    own_requests: bool = False
    dispatch: DispatchName = "gather"
    all_reduce: str = "auto"
    redundant_experts: int = 0
    uniform_tokens: int = 0
    skew: float = 0.0
    graph_sizes: tuple[int, ...] = ()
    diverging_rank: int = -1
    as_on_gpus: bool = False


@contextmanager
def group_runners(
    size: int,
    models: Sequence[Options],
    device: str = "cuda",
    stages: int = 1,
    split: Split = Split(),
    turn: Path | None = None,
) -> Iterator[Iterator[LoadedRunner]]:
    """The runners of models over so many GPUs, one after another, in so many stages; with one GPU there are no other processes.
    On several GPUs a process can have one group in its life, and is to :func:`leave`.

    Args:
        size: How many.
        models: What is built, each when it is asked for.
        device: ``cuda`` or ``cpu``.
        stages: Of a pipeline.
        split: How ranks share each model.
        turn: A file that is locked from when all is imported on: what else wants the GPUs imports meanwhile, and waits.
    """
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/rendezvous"
        context = multiprocessing.get_context("spawn")
        pipes = [[context.Pipe() for _ in models] for _ in range(1, size)]
        processes = [
            context.Process(
                target=_follow,
                args=(Place(rank, size, rendezvous), stages, models, device, split, [there for _, there in ways]),
                daemon=True,  # a failure here does not wait for them
            )
            for rank, ways in enumerate(pipes, 1)
        ]
        for process in processes:
            process.start()
        with _locked(turn):
            try:
                build = _join(Place(0, size, rendezvous), stages, device, split)
                yield _lead(map(build, models), [[here for here, _ in ways] for ways in pipes])
            finally:
                for ways in pipes:
                    for here, there in ways:
                        here.close()
                        there.close()
                until = time.monotonic() + _ENDING_SECONDS
                for process in processes:
                    process.join(max(0.0, until - time.monotonic()))
                    process.kill()
                if dist.is_initialized() and device == "cpu":  # NCCL would wait for graphs that someone may still have
                    dist.destroy_process_group()


@contextmanager
def _locked(turn: Path | None) -> Iterator[None]:
    if turn is None:
        yield
        return
    with turn.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lead(runners: Iterable[ModelRunner], followers: list[list[Connection]]) -> Iterator[LoadedRunner]:
    for number, runner in enumerate(runners):
        ways = [each[number] for each in followers]
        leader = GroupRunner if runner.info.attention_ranks == 1 else DataParallelRunner
        yield leader(runner, ways) if ways else runner
        for way in ways:
            way.close()


def _follow(
    place: Place, stages: int, models: Sequence[Options], device: str, split: Split, leader: list[Connection]
) -> None:
    build = _join(place, stages, device, split)
    for model, way in zip(models, leader, strict=True):
        follow(build(model), way)
    leave(lambda: 0)


def leave(main: Callable[[], int | None]) -> NoReturn:
    """Runs a program, then ends its process and its children at once: NCCL would wait for all graphs to go, and the interpreter
    for threads that wait for a compiler."""
    code = 1
    try:
        code = main() or 0
    except SystemExit as end:  # of argparse, with a number
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        for child in multiprocessing.active_children():
            child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _join(place: Place, stages: int, device: str, split: Split) -> Callable[[Options], ModelRunner]:
    """Meets the other ranks; returns what builds a runner."""
    faulthandler.register(signal.SIGTERM, chain=True)  # where it hangs, if a time limit ends it
    if split.uniform_tokens:
        from uniform_routing import route_uniformly  # it needs Triton

        route_uniformly(split.uniform_tokens, 0 if split.dispatch == "gather" else place.rank, split.skew)
    if split.graph_sizes:
        cuda_graph.ladder = lambda largest: [size for size in split.graph_sizes if size <= largest]
        piecewise_graphs.token_ladder = lambda largest: [largest]
    if device == "cuda":
        torch.cuda.set_device(place.rank)
        device = f"cuda:{place.rank}"
    parallel = join_groups(
        place.rank,
        tensor=place.size // stages,
        pipeline=stages,
        expert=place.size // stages if split.whole_experts else 1,
        rendezvous=place.rendezvous,
        backend="gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        timeout=_MEETING_SECONDS,
        exchange_timeout=_EXCHANGE_SECONDS,
    )
    if split.own_requests and place.size > 1:
        parallel = replace(parallel, rows=DataParallelRows(parallel.tp, device_ops(device)), dispatch=split.dispatch)
    if split.redundant_experts:
        parallel = replace(parallel, redundant_experts=split.redundant_experts)
        if device != "cpu":
            parallel.ep.connect(torch.device(device))
    choose_sums(parallel, split.all_reduce, torch.device(device), place.size, _EXCHANGE_SECONDS)
    if split.diverging_rank == place.rank:
        _diverge(parallel.tp)
    build = _build_as_on_gpus if split.as_on_gpus else build_runner
    return lambda model: build(RunnerOptions(device=device, parallel=parallel, **model))


def _build_as_on_gpus(options: RunnerOptions) -> ModelRunner:
    from sapwood_testing.worker.eager_graphs import with_graphs

    CpuOps.asynchronous = True
    runner = build_runner(options)
    with_graphs(runner, cuda_graph.ladder(runner.info.max_running))
    return runner


def _diverge(group: Group) -> None:
    """Has this rank get all ranks' logits and rows in another order than the others."""
    logits, rows = group.all_gather, group.gather_rows
    group.all_gather = lambda x: logits(x).flip(-1)  # type: ignore[method-assign]
    group.gather_rows = lambda x: rows(x).flip(-1)  # type: ignore[method-assign]
