"""Many updates of weights under many streams, without a model: each token is that of the weights that its message names."""

from __future__ import annotations

import asyncio
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import pytest

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.fake_runner import continuation, fake_weights

VOCAB = 1000
SEED = 5
COUNT = 60
MODES = ("RETRACT", "ABORT")


async def checked_answer(stub: Any, name: str, prompt: list[int]) -> tuple[int, int]:
    """Asks for an answer and compares each of its tokens; returns how many weights it is of, and how many tokens it has."""
    sampling = common_pb2.SamplingParams(seed=SEED, max_tokens=COUNT, ignore_eos=True)
    found: list[tuple[str, list[int]]] = []
    async for response in stub.Generate(
        worker_pb2.WorkerGenerateRequest(request_id=name, token_ids=prompt, sampling=sampling)
    ):
        if response.weight_version:
            found.append((response.weight_version, []))
        found[-1][1].extend(response.token_ids)
    so_far = list(prompt)
    for version, tokens in found:
        digest = b"" if version == "default" else fake_weights(version.encode())
        wanted = islice(continuation(so_far, SamplingParams(seed=SEED), VOCAB, digest), len(tokens))
        assert tokens == list(wanted), f"{name}: tokens of {version} are not those of its weights"
        so_far += tokens
    whole = response.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert whole or response.finish_reason == common_pb2.FINISH_REASON_ABORT
    assert len(so_far) - len(prompt) == response.usage.completion_tokens <= COUNT
    assert not whole or response.usage.completion_tokens == COUNT
    return len(found), len(so_far) - len(prompt)


@pytest.mark.parametrize(
    ("updates", "streams"), [(20, 8), pytest.param(200, 64, marks=pytest.mark.slow)], ids=["20", "200"]
)
async def test_updates_under_load_mix_no_tokens_and_fail_no_request(
    start: Any, tmp_path: Path, updates: int, streams: int
) -> None:
    worker = start("--num-pages", "2000", "--max-running", str(streams), step_ms=2)
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        ended = False

        async def stream(at: int) -> tuple[int, int]:
            several = answers = 0
            while not ended:
                shared = [7] * 40 + [at % 5]  # most of a prompt is cached, by the weights in use alone
                versions, _ = await checked_answer(stub, f"{at}-{answers}", shared)
                several += versions > 1
                answers += 1
            return several, answers

        running = [asyncio.ensure_future(stream(at)) for at in range(streams)]
        for number in range(1, updates + 1):
            path = tmp_path / f"{number}.safetensors"
            path.write_bytes(str(number).encode())
            request = worker_pb2.UpdateWeightsRequest(
                path=str(path),
                weight_version=str(number),
                in_flight=f"IN_FLIGHT_REQUESTS_{MODES[number % 10 == 0]}",
                flush_cache=number % 3 == 0,
            )
            answer = await stub.UpdateWeights(iter([request]))
            assert answer.committed and answer.weights.version == str(number)
            await asyncio.sleep(0.03)
        ended = True
        told = await asyncio.gather(*running)
        assert sum(several for several, _ in told) > 0, "no answer was under way while weights changed"
        assert min(answers for _, answers in told) > 0
