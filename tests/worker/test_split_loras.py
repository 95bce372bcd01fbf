"""Adapters of real workers whose model is split over processes: loaded by all ranks, beside steps, and computed as merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from sapwood.v1 import common_pb2, worker_pb2
from sapwood_testing.models.adapters import make_adapter
from sapwood_testing.models.same_logits import tokens_of
from sapwood_testing.models.tiny_models import Tiny
from sapwood_testing.worker.split_models import SHAPE
from sapwood_testing.worker.worker_stub import worker

pytest.importorskip("peft", reason="PEFT is not installed")


def greedy(tiny: Tiny, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(tiny.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_processes_load_adapters_together_and_answer_as_merged_models(
    tiny_model: Any, tmp_path: Path, kind: str
) -> None:
    tiny = tiny_model("llama", **SHAPE)
    adapters = {name: make_adapter(tiny, tmp_path / name, rank=6, seed=at) for at, name in enumerate(("one", "two"))}
    prompt = tokens_of(20)
    flags = (f"--{kind}-parallel", "2", "--num-pages", "64", "--no-structured-output", "--lora-slots", "1,rank=8")
    with worker(tiny.path, tmp_path / "log", *flags) as stub:
        info = stub.GetModelInfo(worker_pb2.GetModelInfoRequest())
        assert (info.lora_slots, info.max_lora_rank) == (1, 8)

        def ask(name: str) -> list[int]:
            sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            request = worker_pb2.WorkerGenerateRequest(
                request_id=name or "base", token_ids=prompt, sampling=sampling, lora_name=name
            )
            return [token for response in stub.Generate(request) for token in response.token_ids]

        for name, adapter in adapters.items():
            stub.LoadLora(worker_pb2.LoadLoraRequest(name=name, path=str(adapter.path)))
        wanted = {name: greedy(oracle, prompt, 8) for name, oracle in {"": tiny, **adapters}.items()}
        for name in ("one", "", "two", "one"):  # one slot: each is loaded again
            assert ask(name) == wanted[name]
        (tmp_path / "one" / "adapter_config.json").write_text("{}")
        with pytest.raises(grpc.RpcError) as refused:
            stub.LoadLora(worker_pb2.LoadLoraRequest(name="three", path=str(tmp_path / "one")))
        assert "peft_type is None" in str(refused.value)
        assert ask("two") == wanted["two"]
