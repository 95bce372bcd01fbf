"""A real worker with a model whose layers keep states: its text is transformers', and what it does not do is refused by name."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.errors import ConfigError
from sapwood_testing.models.tiny_models import Tiny
from sapwood_testing.worker.asking import collect
from sapwood_testing.worker.worker_process import started_worker
from sapwood_worker.config import WorkerConfig
from sapwood_worker.model.loader import read_config
from sapwood_worker.model.runner.state_refusals import REFUSED, refuse_for_states

COUNT = 16
ASKED: dict[str, dict[str, Any]] = {
    "--data-parallel-attention": {"data_parallel_attention": True, "tensor_parallel": 2},
    "--pipeline-parallel": {"pipeline_parallel": "2"},
    "--host-cache": {"host_cache": "ratio=2"},
    "--role": {"role": "prefill"},
    "--speculate": {"speculate": "prefix"},
}
"""For each flag that is refused, a setting that asks for it."""


def greedy(tiny: Tiny, prompt: list[int]) -> list[int]:
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(COUNT):
            tokens = torch.cat([tokens, tiny.oracle(tokens).logits[:, -1:].argmax(-1)], dim=1)
    found: list[int] = tokens[0, len(prompt) :].tolist()
    return found


def ask(name: str, prompt: list[int]) -> worker_pb2.WorkerGenerateRequest:
    sampling = common_pb2.SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    return worker_pb2.WorkerGenerateRequest(request_id=name, token_ids=prompt, sampling=sampling)


SPLIT = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("name", "changes", "flags"),
    [
        ("lfm2", {}, ()),
        pytest.param("qwen3-next", SPLIT, ("--tensor-parallel", "2"), marks=pytest.mark.slow),
        pytest.param("nemotron-h", SPLIT, ("--no-prefix-cache",), marks=pytest.mark.slow),
        pytest.param("falcon-h1", {}, ("--policy", "lpm"), marks=pytest.mark.slow),
    ],
)
async def test_text_of_crowded_requests_with_common_beginnings_is_transformers(
    tiny_model, tmp_path, name, changes, flags
):
    tiny = tiny_model(name, **changes)
    system = [3 + (5 * at) % 90 for at in range(40)]
    prompts = [[*system[: 8 * which], *(3 + (7 * at + 11 * which) % 90 for at in range(30))] for which in range(6)]
    flags = (
        *flags,
        "--num-pages",
        "24",
        "--page-size",
        "8",
        "--max-running",
        "5",
        "--max-step-tokens",
        "24",
        "--threads",
        "1",
    )
    with started_worker(tiny.path, tmp_path / "log", *flags, "--no-structured-output") as worker:
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stub: Any = worker_pb2_grpc.WorkerStub(channel)
            for turn in range(2):
                answers = await asyncio.gather(
                    *(collect(stub, ask(f"{turn}-{at}", prompt)) for at, prompt in enumerate(prompts))
                )
                for prompt, (tokens, _) in zip(prompts, answers, strict=True):
                    assert tokens == greedy(tiny, prompt)
                prompts = [[*prompt, *tokens, 7] for prompt, (tokens, _) in zip(prompts, answers, strict=True)]
            cached = any(last.usage.cached_tokens for _, last in answers)
            assert cached != ("--no-prefix-cache" in flags)


def test_each_refusal_has_a_setting_that_causes_the_refusal() -> None:
    assert [each.flag for each in REFUSED] == list(ASKED)


@pytest.mark.parametrize("flag", ASKED)
def test_what_is_not_done_with_states_is_refused_with_the_reason(tiny_model, flag):
    refused = WorkerConfig(model="x", **ASKED[flag])
    refuse_for_states(refused, read_config(tiny_model("llama").path)[1])
    refuse_for_states(WorkerConfig(model="x"), read_config(tiny_model("lfm2").path)[1])
    with pytest.raises(ConfigError, match=f"lfm2 has layers that keep states: {flag}: "):
        refuse_for_states(refused, read_config(tiny_model("lfm2").path)[1])


@pytest.mark.slow
def test_a_worker_that_is_refused_says_why_and_ends(tiny_model, tmp_path):
    folder: Path = tiny_model("lfm2").path
    command = [sys.executable, "-m", "sapwood_worker", "--model", str(folder), "--port", "0", "--speculate", "prefix"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "lfm2 has layers that keep states: --speculate: a state cannot go back" in done.stderr
