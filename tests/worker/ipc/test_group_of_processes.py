"""Ranks as processes around the runner without a model: which dies, hangs or diverges is named, and all are started again."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from typing import Any

import grpc
import pytest

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.fake_runner import continuation

DIVERGE = 77


async def tokens_of(stub: Any, name: str, prompt: list[int], count: int) -> list[int]:
    sampling = common_pb2.SamplingParams(seed=11, max_tokens=count, ignore_eos=True)
    request = worker_pb2.WorkerGenerateRequest(request_id=name, token_ids=prompt, sampling=sampling)
    found: list[int] = []
    async for response in stub.Generate(request, wait_for_ready=True):
        found += response.token_ids
    return found


async def epoch_of(stub: Any, other_than: int = 0) -> int:
    """The group's epoch, once it is up and not the one given."""
    while True:
        try:
            info = await stub.GetModelInfo(worker_pb2.GetModelInfoRequest())
        except grpc.aio.AioRpcError as error:
            assert error.code() == grpc.StatusCode.UNAVAILABLE, error
        else:
            if info.epoch != other_than:
                assert info.tensor_parallel == 2
                return int(info.epoch)
        await asyncio.sleep(0.05)


def expected(prompt: list[int], count: int) -> list[int]:
    follow = continuation(prompt, SamplingParams(seed=11), 1000)
    return [next(follow) for _ in range(count)]


async def lose(stub: Any, prompt: list[int], doing: Any) -> str:
    """Has something done to the group while it answers; returns what the client is told."""
    sampling = common_pb2.SamplingParams(seed=11, max_tokens=3000, ignore_eos=True)
    call = stub.Generate(worker_pb2.WorkerGenerateRequest(request_id="long", token_ids=prompt, sampling=sampling))
    found: list[int] = []
    try:
        async for response in call:
            if not found:
                doing()
            found += response.token_ids
    except grpc.aio.AioRpcError as error:
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert found == expected(prompt, len(found))
        return str(error.details())
    raise AssertionError("the request has ended well")


OWN_REQUESTS = ("--data-parallel-attention", "--num-pages", "512")


@pytest.mark.parametrize(
    ("turn", "flags"),
    [
        *(pytest.param(turn, OWN_REQUESTS, marks=pytest.mark.slow) for turn in (0, 1)),
        pytest.param(0, (), marks=pytest.mark.slow),
        (1, ()),
    ],
)
async def test_dead_and_hanging_ranks_are_named_and_all_ranks_restart(start, turn, flags) -> None:
    worker = start("--tensor-parallel", "2", *flags)
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        assert await tokens_of(stub, "first", [1, 2], 20) == expected([1, 2], 20)
        for number, how in ((signal.SIGKILL, "killed by signal 9"), (signal.SIGSTOP, "has given no sign of life for ")):
            epoch, pids = await epoch_of(stub), worker.rank_pids()
            assert len(pids) == 2
            told = await lose(stub, [1, 2, 3], lambda pids=pids, number=number: os.kill(pids[turn], number))
            assert f"rank {turn} of 2" in told
            assert how in told
            assert await epoch_of(stub, epoch) > epoch
            assert not set(pids) & set(worker.rank_pids())
            assert await tokens_of(stub, "again", [4, 5], 20) == expected([4, 5], 20)


async def test_a_rank_that_samples_other_tokens_is_named_before_any_of_them_is_sent(start) -> None:
    worker = start("--tensor-parallel", "2", "--diverge-token", str(DIVERGE))
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        epoch = await epoch_of(stub)
        with pytest.raises(grpc.aio.AioRpcError, match="rank 1 diverged: in step"):
            await tokens_of(stub, "other", [DIVERGE], 5)
        assert await epoch_of(stub, epoch) > epoch
        assert await tokens_of(stub, "again", [4, 5], 20) == expected([4, 5], 20)


async def test_a_data_parallel_rank_with_wrong_rows_is_named_before_a_token_is_sent(start) -> None:
    worker = start("--tensor-parallel", "2", *OWN_REQUESTS, "--diverge-token", str(DIVERGE))
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        epoch = await epoch_of(stub)
        # As one may be over before the next begins: until rank 1 has one, too.
        while await epoch_of(stub) == epoch:
            first, second = (asyncio.create_task(tokens_of(stub, str(each), [DIVERGE, each], 500)) for each in (1, 2))
            ended = await asyncio.gather(first, second, return_exceptions=True)
            if any(isinstance(each, BaseException) for each in ended):
                assert all("rank 1 diverged: in step" in str(error) for error in ended), ended
                break
        assert await epoch_of(stub, epoch) > epoch
        both = await asyncio.gather(*(tokens_of(stub, f"again{each}", [4, each], 20) for each in (1, 2)))
        assert both == [expected([4, 1], 20), expected([4, 2], 20)]


def test_a_group_that_cannot_form_says_which_rank_and_why() -> None:
    command = [sys.executable, "-m", "sapwood_testing.worker.fake_worker", "--port", "0", "--metrics-port", "0"]
    done = subprocess.run(
        [*command, "--tensor-parallel", "2", "--refusing-rank", "1"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert re.search("ERROR .* rank 1 of 2: this rank loads no model$", done.stderr, re.MULTILINE), done.stderr
