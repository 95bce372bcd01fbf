"""Whether a head of EAGLE-3 drafts for a model that is split over GPUs: a tiny model, as a worker builds it over two ranks.

The model's text is known: after token t comes t + 1. The head says what comes two tokens after the one whose features it began
with, so that the first token of each draft is right and the second is not. Prints a JSON object; exit code 1 if an answer is
another than without drafts, or if not both were seen. 30 s.

    python benchmarks/gpu/checks/check_heads.py                        # two GPUs
    python benchmarks/gpu/checks/check_heads.py --device cpu           # tries the check itself
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.drafts.answers import run, tokens_of
from sapwood_testing.drafts.drafted import scheduler_of
from sapwood_worker.config import WorkerConfig
from sapwood_worker.core.group.follower import follow
from sapwood_worker.core.group.group_runner import GroupRunner
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.model.runner.factory import make_runner
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.records.ranks import Place

WIDTH, INNER, VOCAB, HEADS, KEYS, DIM, LAYERS = 256, 512, 1000, 4, 2, 128, 4
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KEYS, "head_dim": DIM, "vocab_size": VOCAB,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
REQUESTS, TOKENS = 8, 48


def layer(name: str, wide: int = 1) -> dict[str, Tensor]:
    """A decoder layer's random tensors, small compared with the embedding."""
    shapes = {
        "self_attn.q_proj": (HEADS * DIM, wide * WIDTH), "self_attn.k_proj": (KEYS * DIM, wide * WIDTH),
        "self_attn.v_proj": (KEYS * DIM, wide * WIDTH), "self_attn.o_proj": (WIDTH, HEADS * DIM),
        "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER),
    }  # fmt: skip
    norms = ("input_layernorm", "post_attention_layernorm")
    made = {f"{name}.{part}.weight": torch.randn(shape) * 0.02 for part, shape in shapes.items()}
    return made | {f"{name}.{norm}.weight": torch.ones(WIDTH) for norm in norms}


def write(folder: Path, tensors: Mapping[str, Tensor], **changes: Any) -> Path:
    """A checkpoint in bfloat16."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE | changes))
    save_file({name: each.bfloat16().contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    return folder


def checkpoints(folder: Path) -> tuple[Path, Path]:
    """A model, and a head for it."""
    torch.manual_seed(0)
    table, one = torch.randn(VOCAB, WIDTH), {"norm.weight": torch.ones(WIDTH)}
    model = {
        "model.embed_tokens.weight": 20 * table,
        "lm_head.weight": table.roll(1, 0),
        "model.norm.weight": torch.ones(WIDTH),
    }
    for index in range(LAYERS):
        model |= layer(f"model.layers.{index}")
    zero = torch.zeros(WIDTH, WIDTH)
    head = layer("midlayer", 2) | one | {"midlayer.hidden_norm.weight": torch.ones(WIDTH)}
    head |= {"fc.weight": torch.cat((torch.eye(WIDTH), zero, zero), 1), "lm_head.weight": table.roll(2, 0)}
    taken = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    return write(folder / "model", model), write(folder / "head", head, draft_vocab_size=VOCAB, eagle_config=taken)


def build(folder: Path, place: Place, device: str) -> ModelRunner:
    """A rank's runner, as a worker makes it."""
    config = WorkerConfig(
        model=str(folder / "model"), speculate=f"eagle:{folder / 'head'}", device=device, tensor_parallel=place.size,
        num_pages=256, max_running=16, threads=1, attention_backend="auto" if device == "cpu" else "triton",
    )  # fmt: skip
    runner = make_runner(config, place)
    assert isinstance(runner, ModelRunner)
    return runner


def follower(folder: Path, place: Place, device: str, leader: Connection) -> None:
    follow(build(folder, place, device), leader)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as name:
        folder, rendezvous = Path(name), f"file://{name}/rendezvous"
        checkpoints(folder)
        second = context.Process(target=follower, args=(folder, Place(1, 2, rendezvous), device, there), daemon=True)
        second.start()
        runner = build(folder, Place(0, 2, rendezvous), device)
        leader = GroupRunner(runner, [here])
        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)

        def asked() -> list[Request]:
            return [Request(at, str(at), list(range(10 + 90 * at, 40 + 97 * at)), sampling) for at in range(REQUESTS)]

        drafting = scheduler_of(runner, "eagle")
        with_drafts = run(drafting, leader, True, asked())
        without = run(scheduler_of(runner, speculate="off"), leader, True, asked())
        load = drafting.load()
        here.close()
        second.join(20)
        second.kill()
    same = sum(tokens_of(with_drafts[at]) == tokens_of(without[at]) for at in range(REQUESTS))
    walked = sum(tokens_of(each) == list(range(40 + 97 * at, 40 + 97 * at + TOKENS)) for at, each in without.items())
    rejected = load.drafted_tokens - load.accepted_tokens
    fault = same < REQUESTS or load.accepted_tokens < 20 or rejected < 20
    row = {
        "what": f"head over 2 ranks {device}", "same": same, "as known": walked, "accepted": load.accepted_tokens,
        "rejected": rejected, "fault": fault,
    }  # fmt: skip
    print(json.dumps(row))
    return int(fault)


if __name__ == "__main__":
    sys.exit(main())
