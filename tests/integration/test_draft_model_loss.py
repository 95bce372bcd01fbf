"""A worker with a draft model killed in mid-stream, real processes on a tiny model: every answer is the undisturbed one."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from sapwood_worker.model.quantizer.drafter import make_drafter

PROMPTS = ["one", "two, and a little more", "three", "four of them"]
TOKENS = 400
LAYERS = 24


@pytest.fixture(scope="module")
def deep_model(dummy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose first layer says all there is to say: a draft model of it is right, and much cheaper."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = json.loads((dummy_model / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).float()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape) * 0.3 if weight.dim() > 1 else torch.ones(weight.shape))
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    folder = tmp_path_factory.mktemp("deep") / "model"
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((dummy_model / "tokenizer.json").read_bytes())
    return folder


def body(number: int, stream: bool) -> dict[str, Any]:
    return {
        "model": "deep",
        "prompt": PROMPTS[number],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "seed": number,
        "temperature": number % 2,
        "frequency_penalty": 0.1 * (number == 3),
        "stream": stream,
    }


@pytest.mark.slow
def test_answers_go_on_when_a_worker_with_a_draft_model_is_killed(
    start_cluster_of: Any, deep_model: Path, tmp_path: Path
) -> None:
    make_drafter(deep_model, tmp_path / "draft", layers=1, noise=0.0)
    flags = ["--model", deep_model, "--served-model-name", "deep", "--workers", 2, "--threads", 1]
    flags += ["--worker-num-pages", 1024, "--worker-speculate", f"draft:{tmp_path / 'draft'}"]
    with start_cluster_of(*map(str, flags)) as cluster, httpx.Client(timeout=300) as client:
        url = f"http://{cluster.http}/v1/completions"
        expected, accepted = [], 0
        for number in range(len(PROMPTS)):
            answer = client.post(url, json=body(number, stream=False)).raise_for_status().json()
            expected.append(answer["choices"][0]["text"])
            details = answer["usage"].get("completion_tokens_details") or {}
            accepted += details.get("accepted_prediction_tokens") or 0
        assert accepted > 0
        found = [""] * len(PROMPTS)
        begun = threading.Event()

        def read(number: int) -> None:
            with httpx.stream("POST", url, json=body(number, stream=True), timeout=300) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        choices = json.loads(line[6:])["choices"]
                        found[number] += choices[0]["text"] if choices else ""
                        begun.set()

        readers = [threading.Thread(target=read, args=(number,)) for number in range(len(PROMPTS))]
        for reader in readers:
            reader.start()
        assert begun.wait(120)
        front = cluster.service_pid("sapwood_worker")
        children = Path(f"/proc/{front}/task/{front}/children").read_text().split()
        unfinished = sum(reader.is_alive() for reader in readers)
        for pid in (front, *map(int, children)):
            os.kill(pid, signal.SIGKILL)
        for reader in readers:
            reader.join()
        assert unfinished and found == expected
