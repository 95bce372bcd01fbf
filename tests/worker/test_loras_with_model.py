"""A real worker with a tiny model and PEFT adapters of several ranks: each answer is that of the model PEFT merges."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_testing.models.tiny_models import Tiny
from sapwood_testing.worker.asking import collect
from sapwood_testing.worker.worker_process import started_worker

pytest.importorskip("peft", reason="PEFT is not installed")

PROMPTS = [[3 + (7 * at + 11 * which) % 90 for at in range(20 + 6 * which)] for which in range(3)]
COUNT = 12


def greedy(model: Any, prompt: Sequence[int]) -> list[int]:
    """The likeliest continuation, token by token."""
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(COUNT):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    return tokens[0, len(prompt) :].tolist()


def ask(name: str, prompt: Sequence[int], lora: str) -> worker_pb2.WorkerGenerateRequest:
    sampling = common_pb2.SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    return worker_pb2.WorkerGenerateRequest(request_id=name, token_ids=prompt, sampling=sampling, lora_name=lora)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        # Few pages: requests are sent back; a second and a third tier; drafts from repetitions.
        (
            "--num-pages",
            "16",
            "--page-size",
            "8",
            "--max-running",
            "6",
            "--host-cache",
            "ratio=4",
            "--speculate",
            "prefix",
        ),
    ],
    ids=["plenty", "scarce"],
)
async def test_text_by_adapters_equals_merged_models_with_reloads_and_few_slots(
    tiny_model: Any, tmp_path: Path, flags: Sequence[str]
) -> None:
    from sapwood_testing.models.adapters import make_adapter

    base = tiny_model("qwen3")
    adapters = {f"r{rank}": make_adapter(base, tmp_path / f"r{rank}", rank=rank, seed=rank) for rank in (4, 8, 16, 32)}
    oracles: dict[str, Tiny] = {"": base, **adapters}
    if flags:
        flags = (*flags, "--storage", f"file://{tmp_path / 'store'}?size_gb=0.1")
    named = ("--lora", *(f"{name}={each.path}" for name, each in adapters.items()))
    with started_worker(base.path, tmp_path / "log", "--lora-slots", "2,rank=32", *named, *flags) as worker:
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stub: Any = worker_pb2_grpc.WorkerStub(channel)
            expected = {
                (name, at): greedy(each.oracle, prompt)
                for name, each in oracles.items()
                for at, prompt in enumerate(PROMPTS)
            }
            assert len({tuple(tokens) for tokens in expected.values()}) == len(expected), "each has an effect"
            for turn in range(2):
                answers = await asyncio.gather(
                    *(collect(stub, ask(f"{turn}-{name}-{at}", PROMPTS[at], name)) for name, at in expected)
                )
                for key, (tokens, _) in zip(expected, answers, strict=True):
                    assert tokens == expected[key], (turn, key)
            assert any(last.usage.cached_tokens for _, last in answers)
            # Other bytes under the same name and at the same path.
            shutil.rmtree(adapters["r8"].path)
            changed = make_adapter(base, tmp_path / "r8", rank=4, seed=99)
            await stub.LoadLora(worker_pb2.LoadLoraRequest(name="r8"))
            for at, prompt in enumerate(PROMPTS):
                tokens, last = await collect(stub, ask(f"new-{at}", prompt, "r8"))
                assert tokens == greedy(changed.oracle, prompt) and last.usage.cached_tokens == 0
            with pytest.raises(grpc.aio.AioRpcError, match=r"rank"):
                wrong = make_adapter(base, tmp_path / "wrong", rank=64)
                await stub.LoadLora(worker_pb2.LoadLoraRequest(name="r4", path=str(wrong.path)))
            assert (await collect(stub, ask("still", PROMPTS[0], "r4")))[0] == expected["r4", 0]
