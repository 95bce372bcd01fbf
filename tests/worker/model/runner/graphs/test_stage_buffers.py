"""What graphs of a pipeline's stage read."""

from __future__ import annotations

from typing import Any

import torch

from sapwood_testing.worker.split_models import SHAPE
from sapwood_testing.worker.thread_ranks import run_grid
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.graphs.cuda_graph import StageBuffers
from sapwood_worker.model.runner.options import RunnerOptions


def test_a_stage_gets_what_the_one_before_gives_and_nothing_that_layers_left_there(tiny_model: Any) -> None:
    path = tiny_model("llama", num_hidden_layers=2, **SHAPE).path

    def one(rank: int, parallel: Parallel) -> list[torch.Tensor]:
        model: Any = build_runner(RunnerOptions(model_path=path, parallel=parallel, threads=1, num_pages=64))._model
        buffers = StageBuffers.of(model, 8)
        assert buffers is not None and buffers.first == (rank == 0)
        buffers.received.fill_(float("nan"))  # as layers might leave it
        hidden = torch.full((3, model.config.hidden_size), 2.0 + rank)
        buffers.receive(3, 4)
        buffers.send(hidden)
        hidden.fill_(9.0)  # a graph's next replay overwrites it
        buffers.spread(torch.full_like(hidden, 5.0 + rank))
        return [buffers.received, buffers.last]

    (_, first_last), (received, last) = run_grid(1, 2, one)
    assert (received[:3] == 2.0).all() and (received[3] == 0.0).all() and received[4:].isnan().all()
    for each in (first_last, last):
        assert (each[:3] == 6.0).all() and (each[3:] == 0.0).all()
