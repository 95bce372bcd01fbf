"""Weights that a trainer broadcasts in a group of torch.distributed that it leads, as slime's and OpenRLHF's do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_testing.models.other_weights import other_checkpoint, other_weights
from sapwood_testing.models.same_logits import tokens_of
from sapwood_testing.ports import port_of_its_own
from sapwood_testing.worker.asking import collect
from sapwood_testing.worker.split_models import SHAPE
from sapwood_testing.worker.trainer_group import lead_group
from sapwood_testing.worker.worker_process import started_worker

FLAGS = ("--page-size", "8", "--num-pages", "256", "--max-running", "16", "--threads", "1")
PROMPT = tokens_of(20)


def ask(name: str) -> worker_pb2.WorkerGenerateRequest:
    sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    return worker_pb2.WorkerGenerateRequest(request_id=name, token_ids=PROMPT, sampling=sampling)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_broadcast_tensors_become_the_weights_on_all_ranks(
    tiny_model: Any, make_runner: Any, make_driver: Any, tmp_path: Path, ranks: int
) -> None:
    start = tiny_model("llama", **SHAPE).path
    other = other_checkpoint(start, tmp_path / "other", 1)
    wanted = make_driver(make_runner(other)).generate({0: PROMPT}, 8)[0]
    port, group = port_of_its_own(), f"trainer-{ranks}"
    flags = FLAGS if ranks == 1 else (*FLAGS, "--tensor-parallel", str(ranks))
    with started_worker(start, tmp_path / "log", *flags) as worker:
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stub: Any = worker_pb2_grpc.WorkerStub(channel)
            join = worker_pb2.JoinWeightsGroupRequest(
                group=group, master_address="127.0.0.1", master_port=port, world_size=1 + ranks, rank_offset=1
            )
            made, _ = await asyncio.gather(
                asyncio.to_thread(lead_group, port, 1 + ranks, group), stub.JoinWeightsGroup(join)
            )
            tensors = sorted(other_weights(start, 1).items())
            for at, part in enumerate((tensors[::2], tensors[1::2])):
                await _send(stub, made, part, group=group, partial=True, update_id="step", commit=at == 1)
            assert (await collect(stub, ask("after")))[0] == wanted
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.JoinWeightsGroup(join)
            assert "already" in str(caught.value.details())
            assert (await stub.LeaveWeightsGroup(worker_pb2.LeaveWeightsGroupRequest(group=group))).found
            assert not (await stub.LeaveWeightsGroup(worker_pb2.LeaveWeightsGroupRequest(group=group))).found
            torch.distributed.destroy_process_group(made)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.UpdateWeights(iter([worker_pb2.UpdateWeightsRequest(group=group)]))
            assert "no group" in str(caught.value.details())
            assert (await collect(stub, ask("still")))[0] == wanted


async def _send(stub: Any, made: Any, tensors: list[tuple[str, Tensor]], **options: Any) -> None:
    def broadcast() -> None:
        for _, tensor in tensors:
            torch.distributed.broadcast(tensor, src=0, group=made)

    described = [
        worker_pb2.WeightTensor(name=name, dtype=str(tensor.dtype), shape=list(tensor.shape))
        for name, tensor in tensors
    ]
    request = worker_pb2.UpdateWeightsRequest(tensors=described, **options)
    await asyncio.gather(asyncio.to_thread(broadcast), stub.UpdateWeights(iter([request])))
