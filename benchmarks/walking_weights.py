"""Dummy weights whose text can be told: after token t comes t + 1, by a wide margin, whatever the layers compute.

Plain random weights say what rounding makes of them: a step of another size has other sums in the last bit, some tokens turn out
different, and nothing that was drafted from the earlier text is right after the first. Here the layers are as random, and take as
long, but the embedding outweighs them and the head's row t + 1 is the embedding's row t.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from sapwood_worker.model import loader
from sapwood_worker.model.weight_slot import WeightSlots

_OUTWEIGHS = 200.0
"""Times the size of other weights: the residual stream of 32 random layers is some 10, and the embedding 4."""


def walk() -> None:
    """From now on models with dummy weights walk, if their head is a matrix of its own. For this process."""
    fill = loader.fill_dummy_weights

    def walking(slots: WeightSlots, seed: int) -> None:
        fill(slots, seed)
        if "lm_head.weight" not in slots:
            return
        table = slots["model.embed_tokens.weight"].target
        with torch.inference_mode():
            slots["lm_head.weight"].target.copy_(table.roll(1, 0))
            table.mul_(_OUTWEIGHS)

    loader.fill_dummy_weights = walking


def untied(model: Path) -> Path:
    """A folder with the model's configuration, but for a head of its own."""
    raw = json.loads((model / "config.json").read_text())
    folder = Path(tempfile.mkdtemp(prefix="untied-")) / model.name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": False}))
    return folder


def eagle_head(model: Path, known: int = 32_000) -> Path:
    """A folder with a random head of EAGLE-3 for a model, in bfloat16: the published heads' names and shapes.

    Args:
        model: Folder with the model's configuration, a Llama's.
        known: Tokens of the head's own vocabulary.
    """
    raw = json.loads((model / "config.json").read_text())
    width, inner, dim = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
    heads, keys, vocabulary = raw["num_attention_heads"], raw["num_key_value_heads"], raw["vocab_size"]
    known = min(known, vocabulary)
    shapes = {
        "fc": (width, 3 * width),
        "midlayer.self_attn.q_proj": (heads * dim, 2 * width),
        "midlayer.self_attn.k_proj": (keys * dim, 2 * width),
        "midlayer.self_attn.v_proj": (keys * dim, 2 * width),
        "midlayer.self_attn.o_proj": (width, heads * dim),
        "midlayer.mlp.gate_proj": (inner, width),
        "midlayer.mlp.up_proj": (inner, width),
        "midlayer.mlp.down_proj": (width, inner),
        "lm_head": (known, width),
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = {
        f"{name}.weight": torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0.0, 0.02).cpu()
        for name, shape in shapes.items()
    }
    norms = "norm", *(f"midlayer.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"))
    made |= {f"{name}.weight": torch.ones(width, dtype=torch.bfloat16) for name in norms}
    made["d2t"] = torch.zeros(known, dtype=torch.int64)
    made["t2d"] = torch.arange(vocabulary) < known
    folder = Path(tempfile.mkdtemp(prefix="eagle-"))
    own = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": known}
    (folder / "config.json").write_text(json.dumps(raw | own))
    save_file(made, folder / "model.safetensors")
    return folder
