"""``--deterministic``: tokens and log probabilities are equal to the bit whatever runs beside a request. On a GPU where there is
one, else on the CPU."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import ConfigError
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_testing.worker.worker_process import started_worker
from sapwood_worker.config import WorkerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.model.runner.factory import make_runner as runner_of
from sapwood_worker.model.runner.model_runner import ModelRunner

CUDA = torch.cuda.is_available()
OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "threads": None} if CUDA else {"device": "cpu"}
TOKENS = 24
Answers = dict[int, tuple[list[int], list[float], list[float]]]


def prompts() -> list[list[int]]:
    chance = random.Random(11)
    shared = [chance.randrange(3, 97) for _ in range(70)]
    return [
        shared[: chance.choice([0, 20, 48, 70])] + [chance.randrange(3, 97) for _ in range(1 + chance.randrange(40))]
        for _ in range(16)
    ]


def answers(
    runner: ModelRunner, asked: list[int], *, max_step_tokens: int, retracts: bool = False, caches: bool = True
) -> Answers:
    """Tokens, their log probabilities and those of the alternatives, with the prompts in ``asked`` all at once."""
    scheduler = scheduler_for(runner.info, max_step_tokens=max_step_tokens, conservativeness=0.0, prefix_cache=caches)
    for serial in asked:
        # Every third request draws, by a seed of its own.
        temperature = 0.9 if serial % 3 == 0 else 0.0
        sampling = SamplingParams(temperature=temperature, seed=serial, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
        scheduler.add(Request(serial, f"r{serial}", prompts()[serial], sampling))
    found: Answers = {serial: ([], [], []) for serial in asked}
    while scheduler.has_work:
        planned = scheduler.schedule()
        for output in scheduler.update(runner.launch(planned).result()) if planned else ():
            tokens, own, others = found[output.serial]
            tokens.extend(output.token_ids)
            for each in output.logprobs or ():
                own.append(each.logprob)
                others.extend(each.top_logprobs)
    assert not retracts or scheduler.num_retractions > 0, "the pool is too large for the test to mean much"
    return found


def alone(runner: ModelRunner) -> Answers:
    found: Answers = {}
    for serial in range(len(prompts())):
        found |= answers(runner, [serial], max_step_tokens=512, caches=False)
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral-window"])
def test_neither_batch_nor_chunks_nor_hits_nor_retractions_change_a_bit(
    tiny_model: Any, make_runner: Any, name: str
) -> None:
    tiny = tiny_model(name)

    def made(**others: Any) -> ModelRunner:
        settings = {"page_size": 4, "num_pages": 512, "max_running": 16, "max_step_tokens": 512}
        fixed = {"deterministic": True, "attention_backend": "fixed_order"}
        return make_runner(tiny.path, **settings | OPTIONS | fixed | others)

    runner = made()
    wanted = alone(runner)
    assert all(len(tokens) == len(own) == TOKENS for tokens, own, _ in wanted.values())
    every = list(wanted)
    assert answers(runner, every, max_step_tokens=512) == wanted
    assert answers(runner, every[::-1], max_step_tokens=23) == wanted
    assert {**answers(runner, every[:7], max_step_tokens=1), **answers(runner, every[7:], max_step_tokens=70)} == wanted
    assert answers(made(page_size=16, num_pages=16), every, max_step_tokens=40, retracts=True) == wanted


@pytest.mark.skipif(CUDA, reason="of the CPU's libraries")
def test_without_it_the_batch_does_change_log_probabilities(tiny_model: Any, make_runner: Any) -> None:
    runner = make_runner(tiny_model("llama").path, page_size=4, num_pages=512, max_step_tokens=512)
    assert answers(runner, list(range(16)), max_step_tokens=23) != alone(runner), "the tests above show nothing"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tensor_parallel": 2}, "--tensor-parallel"),
        ({"quantization": "int8"}, "--quantization"),
        ({"speculate": "mtp"}, "--speculate"),
        ({"lora_slots": "2"}, "--lora-slots"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16 on a CPU"),
    ],
)
def test_settings_that_it_does_not_go_with_are_named(tiny_model: Any, given: dict[str, Any], named: str) -> None:
    config = WorkerConfig(model=str(tiny_model("llama").path), deterministic=True, device="cpu", port=0, **given)
    with pytest.raises(ConfigError, match=f"--deterministic does not go with {named}"):
        runner_of(config)


@pytest.mark.parametrize(("name", "kind"), [("qwen3-moe", "experts"), ("deepseek-v2", "latent"), ("lfm2", "states")])
def test_models_that_it_does_not_go_with_are_named(tiny_model: Any, name: str, kind: str) -> None:
    config = WorkerConfig(model=str(tiny_model(name).path), deterministic=True, device="cpu", port=0)
    with pytest.raises(ConfigError, match=f"--deterministic does not go with .*{kind}"):
        runner_of(config)


async def test_a_worker_answers_a_crowd_as_it_answers_each_alone(tiny_model: Any, tmp_path: Path) -> None:
    async def answer(stub: Any, serial: int) -> list[tuple[list[int], list[float]]]:
        sampling = common_pb2.SamplingParams(
            max_tokens=TOKENS, temperature=0.7, seed=serial, ignore_eos=True, logprobs=2
        )
        asked = worker_pb2.WorkerGenerateRequest(
            request_id=f"r{serial}", token_ids=prompts()[serial], sampling=sampling
        )
        return [
            (list(response.token_ids), [each.logprob for each in response.logprobs])
            async for response in stub.Generate(asked)
        ]

    def joined(responses: list[tuple[list[int], list[float]]]) -> tuple[list[int], list[float]]:
        return [token for tokens, _ in responses for token in tokens], [each for _, own in responses for each in own]

    flags = ("--deterministic", "--device", "cpu", "--page-size", "4", "--max-step-tokens", "48", "--threads", "1")
    with started_worker(tiny_model("qwen3").path, tmp_path / "log", *flags) as worker:
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stub: Any = worker_pb2_grpc.WorkerStub(channel)
            alone = [joined(await answer(stub, serial)) for serial in range(8)]
            crowd = await asyncio.gather(*(answer(stub, serial) for serial in range(8)))
    assert all(len(tokens) == len(own) == TOKENS for tokens, own in alone)
    assert [joined(each) for each in crowd] == alone
