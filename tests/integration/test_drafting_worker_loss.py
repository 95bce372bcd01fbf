"""A worker that drafts, killed in mid-stream, in real processes: answers are the undisturbed ones."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from sapwood_testing.drafts.mtp_head import with_head
from sapwood_testing.models.tiny_models import make_tiny
from sapwood_worker.model.quantizer.drafter import make_drafter

PROMPTS = ["one", "two, and a little more", "three", "four of them"]
TOKENS = 400
LAYERS = 24


@pytest.fixture(scope="module")
def deep_model(dummy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose first layer says all there is to say, so that a draft model of it is right, and much cheaper. After token t
    most often comes t + 1, which repeats itself after 256 tokens."""
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
        table = torch.randn(model.lm_head.weight.shape)
        model.model.embed_tokens.weight.copy_(20 * table)
        model.lm_head.weight.copy_(0.2 * table.roll(1, 0))
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


def write_head(model: Path, folder: Path) -> None:
    """A head of EAGLE-3 that says t + 2 where the features are those of t: of each draft the first token is right."""
    import torch
    from safetensors.torch import load_file, save_file

    raw = json.loads((model / "config.json").read_text())
    width, inner, heads, keys = (
        raw[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    dim = raw.get("head_dim") or width // heads
    tensors = {
        "fc": torch.cat((torch.eye(width), torch.zeros(width, 2 * width)), 1),
        "midlayer.self_attn.q_proj": torch.randn(heads * dim, 2 * width),
        "midlayer.self_attn.k_proj": torch.randn(keys * dim, 2 * width),
        "midlayer.self_attn.v_proj": torch.randn(keys * dim, 2 * width),
        "midlayer.self_attn.o_proj": torch.zeros(width, heads * dim),
        "midlayer.mlp.gate_proj": torch.randn(inner, width),
        "midlayer.mlp.up_proj": torch.randn(inner, width),
        "midlayer.mlp.down_proj": torch.zeros(width, inner),
        "lm_head": load_file(model / "model.safetensors")["lm_head.weight"].roll(1, 0),
    }
    norms = ("norm", *(f"midlayer.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")))
    tensors |= {name: torch.ones(width) for name in norms}
    folder.mkdir()
    save_file({f"{name}.weight": each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 1}))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prefix", "draft", "eagle", "mtp"])
def test_answers_go_on_when_a_worker_that_drafts_is_killed(
    start_cluster_of: Any, deep_model: Path, tmp_path: Path, kind: str
) -> None:
    model, drafter = deep_model, kind
    if kind == "draft":
        make_drafter(deep_model, tmp_path / "drafter", layers=1, noise=0.0)
    elif kind == "eagle":
        write_head(deep_model, tmp_path / "drafter")
    elif kind == "mtp":
        (tmp_path / "tiny").mkdir()
        model, _ = with_head(make_tiny("glm4-moe", tmp_path / "tiny", vocab_size=256), tmp_path / "model", part=0.02)
        shutil.copy(deep_model / "tokenizer.json", model)
    if kind in ("draft", "eagle"):
        drafter = f"{kind}:{tmp_path / 'drafter'}"
    flags = ["--model", model, "--served-model-name", "deep", "--workers", 2, "--threads", 1]
    flags += ["--worker-num-pages", 1024, "--worker-speculate", drafter]
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
