"""Two halves of a batch of decodes side by side, so that one may multiply while the other reads its cache: does it pay?

A step of all requests in one graph, the same in two halves one after the other, and in two halves on two streams of one graph.
The halves have pages of their own; nothing is sampled. Prints one JSON object a line.

    python benchmarks/gpu/bench_halves.py --model benchmarks/gpu/configs/llama-3.1-8b
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_engine import Engine
from commit import measured_commit

from sapwood_worker.model.attention.backend import AttentionBatch
from sapwood_worker.model.attention.paged import PagedPlan
from sapwood_worker.model.runner.model_runner import ModelRunner

TURNS, REPLAYS = 5, 20


def step_of(runner: ModelRunner, first: int, rows: int, length: int) -> Callable[[], None]:
    """What computes a decode of some requests of so many tokens, which have pages of their own from request ``first`` on."""
    backend, pool, model, ops = runner._backend, runner._pool, runner._model, runner.ops
    pages = -(-length // pool.page_size)
    table = np.arange(first * pages, (first + rows) * pages, dtype=np.int32).reshape(rows, pages)
    indices = torch.zeros(rows * pages, dtype=torch.int32, device=ops.device)
    parts = replace(backend._parts[0], indices=indices)
    assert backend._make_graphs is not None
    attention = backend._make_graphs(parts)(rows)
    slots = ops.to_device(table[:, -1].astype(np.int64) * pool.page_size + (length - 1) % pool.page_size)
    batch = AttentionBatch(np.arange(rows + 1), np.full(rows, length), table, slots)
    attention.plan(backend._with_keys(batch, indices))
    plan = PagedPlan(pool, attention, attention, None, [slots])
    tokens = torch.zeros(rows, dtype=torch.int64, device=ops.device)
    positions = torch.full_like(tokens, length - 1)

    def step() -> None:
        ops.row_max(model.logits(model(tokens, positions, plan)))

    return step


def captured(run: Callable[[], None]) -> Any:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def beside(one: Callable[[], None], other: Callable[[], None], priority: int) -> Callable[[], None]:
    """Both, on two streams that part here and meet again."""
    stream = torch.cuda.Stream(priority=priority)

    def run() -> None:
        here = torch.cuda.current_stream()
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            other()
        one()
        here.wait_stream(stream)

    return run


def milliseconds(graph: Any) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPLAYS


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Folder with a config.json.")
    parser.add_argument("--requests", type=int, default=256, help="In both halves (default: 256).")
    parser.add_argument("--length", type=int, default=1088, help="Tokens of each (default: 1088).")
    arguments = parser.parse_args()
    engine = Engine(
        arguments.model,
        max_running=arguments.requests,
        max_step_tokens=1024,
        kv_gb=60.0,
        cuda_graph_max_batch=1,
        shared_prefix_attention=False,
    )
    runner: ModelRunner = engine.runner._runner  # type: ignore[assignment]
    count, length, half = arguments.requests, arguments.length, arguments.requests // 2
    whole = step_of(runner, 0, count, length)
    halves = [step_of(runner, first, half, length) for first in (0, half)]

    def in_turn() -> None:
        for each in halves:
            each()

    graphs = {
        "whole": captured(whole),
        "one half": captured(halves[0]),
        "halves in turn": captured(in_turn),
        "halves side by side": captured(beside(*halves, 0)),
        "halves side by side, one first": captured(beside(*halves, -1)),
    }
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(TURNS):
        for name, graph in graphs.items():
            found[name].append(milliseconds(graph))
    about = {"device": torch.cuda.get_device_name(), "commit": measured_commit()}
    for name, values in found.items():
        row = {"what": f"{arguments.model.name} decode {count}, {name}", "value": round(min(values), 3), "unit": "ms"}
        print(json.dumps(row | about), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
