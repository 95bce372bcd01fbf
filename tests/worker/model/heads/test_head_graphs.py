"""On a GPU a head's steps are CUDA graphs, which leave and say what the same steps do without."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.steps import Part, make_step, step_for
from sapwood_worker.model.heads.head import Head
from sapwood_worker.model.runner.builder import build_headed_runner
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 500,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "eos_token_id": 1, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0)
TABLE = np.arange(64, dtype=np.int32).reshape(2, 32)


def part(slot: int, tokens: list[int], start: int, samples: int = 1) -> Part:
    return Part(slot, tokens, start, samples, GREEDY)


def write_head(folder: Path) -> None:
    width, inner, outer = 256, 512, 4 * 128
    shapes = {
        "fc": (width, 3 * width), "lm_head": (500, width), "midlayer.self_attn.q_proj": (outer, 2 * width),
        "midlayer.self_attn.k_proj": (256, 2 * width), "midlayer.self_attn.v_proj": (256, 2 * width),
        "midlayer.self_attn.o_proj": (width, outer), "midlayer.mlp.gate_proj": (inner, width),
        "midlayer.mlp.up_proj": (inner, width), "midlayer.mlp.down_proj": (width, inner),
    }  # fmt: skip
    chance = torch.Generator().manual_seed(3)
    made = {f"{name}.weight": torch.randn(shape, generator=chance) / shape[1] ** 0.5 for name, shape in shapes.items()}
    norms = ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm")
    save_file(made | {f"{name}.weight": torch.ones(width) for name in norms}, folder / "model.safetensors")


def drafts_of(runner: ModelRunner) -> tuple[list[list[int]], torch.Tensor]:
    """What a head says of two requests, three tokens each after it has caught up, and the features that it leaves."""
    prompts = [list(range(2, 40)), list(range(3, 23))]
    step = step_for(runner.info, 0, TABLE, [part(slot, prompt, 0) for slot, prompt in enumerate(prompts)])
    runner.execute(step)
    draft = runner.draft
    assert draft is not None
    known = [[*prompts[0], 41], [*prompts[1], 42]]  # whatever the model says
    found = [draft.execute(step_for(draft.info, 0, TABLE, [part(s, t[1:], 1) for s, t in enumerate(known)])).token_ids]
    for more in range(2):
        parts = [part(slot, [-1], len(tokens) + more) for slot, tokens in enumerate(known)]
        found.append(draft.execute(make_step(1 + more, TABLE, parts)).token_ids)
    head = draft._model
    assert isinstance(head, Head)
    return [[each[slot][0] for each in found] for slot in range(2)], head.store[: 32 * 16 + 24].float().cpu()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_heads_graphs_leave_and_say_what_its_steps_do_without(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_head(tmp_path)
    found = []
    for graphs in (True, False):
        options = RunnerOptions(
            model_path=tmp_path, load_format="dummy", device="cuda", num_pages=128, max_running=64, cuda_graphs=graphs
        )
        runner = build_headed_runner(options, tmp_path)
        assert runner.draft is not None and (runner.draft._graphs is not None) == graphs
        found.append(drafts_of(runner))
    (said, left), (said_too, left_too) = found
    assert float((left - left_too).norm() / left_too.norm()) < 0.03
    agreed = [a == b for own, other in zip(said, said_too, strict=True) for a, b in zip(own, other, strict=True)]
    assert agreed[0] and agreed[3] and sum(agreed) > 3
