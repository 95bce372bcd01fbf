"""A head of EAGLE-3 to test with: its checkpoint, of random tensors, and what it says by a plain computation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from sapwood_testing.drafts.answers import VOCAB

WIDTH, INNER, HEADS, KEYS, DIM = 48, 80, 6, 2, 16
KNOWN = 60
"""Tokens of the head's own vocabulary."""
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "draft_vocab_size": KNOWN,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "head_dim": DIM,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]},
}


def random_tensors() -> dict[str, Tensor]:
    """A checkpoint's."""
    generator = torch.Generator().manual_seed(5)

    def of(*shape: int) -> Tensor:
        made: Tensor = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        return made

    known = torch.randperm(VOCAB, generator=generator)[:KNOWN].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[known] = True
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return {
        "fc.weight": of(WIDTH, 3 * WIDTH),
        "midlayer.self_attn.q_proj.weight": of(HEADS * DIM, 2 * WIDTH),
        "midlayer.self_attn.k_proj.weight": of(KEYS * DIM, 2 * WIDTH),
        "midlayer.self_attn.v_proj.weight": of(KEYS * DIM, 2 * WIDTH),
        "midlayer.self_attn.o_proj.weight": of(WIDTH, HEADS * DIM),
        "midlayer.mlp.gate_proj.weight": of(INNER, WIDTH),
        "midlayer.mlp.up_proj.weight": of(INNER, WIDTH),
        "midlayer.mlp.down_proj.weight": of(WIDTH, INNER),
        **{f"midlayer.{name}.weight": 1 + 0.1 * of(WIDTH) for name in norms},
        "norm.weight": 1 + 0.1 * of(WIDTH),
        "lm_head.weight": of(KNOWN, WIDTH),
        "d2t": known - torch.arange(KNOWN),
        "t2d": t2d,
    }


class PlainHead:
    """The head in plain torch, without a cache: all of a text at once."""

    def __init__(
        self, tensors: dict[str, Tensor], oracle: Any, layers: Sequence[int] = (0, 2, 3), *, normed: bool = False
    ) -> None:
        self.t = tensors
        self.oracle = oracle
        self.layers = layers
        self.normed = normed

    def features(self, tokens: list[int]) -> Tensor:
        """Those of each position, by transformers' hidden states."""
        with torch.inference_mode():
            states = self.oracle(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in self.layers], -1) @ self.t["fc.weight"].T

    def hidden(self, features: Tensor, following: list[int]) -> Tensor:
        """Its outputs at each position, given the token after each."""
        t = self.t
        embedded = self.oracle.model.embed_tokens.weight[torch.tensor(following)].detach()
        normed = norm(features, t["midlayer.hidden_norm.weight"])
        both = torch.cat((norm(embedded, t["midlayer.input_layernorm.weight"]), normed), -1)
        count = len(following)
        q, k, v = (
            (both @ t[f"midlayer.self_attn.{name}_proj.weight"].T).view(count, -1, DIM).transpose(0, 1)
            for name in "qkv"
        )
        q, k = turned(q), turned(k)
        k, v = (each.repeat_interleave(HEADS // KEYS, 0) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(count, -1)
        x = (normed if self.normed else features) + attended @ t["midlayer.self_attn.o_proj.weight"].T
        y = norm(x, t["midlayer.post_attention_layernorm.weight"])
        gate = F.silu(y @ t["midlayer.mlp.gate_proj.weight"].T) * (y @ t["midlayer.mlp.up_proj.weight"].T)
        return x + gate @ t["midlayer.mlp.down_proj.weight"].T

    def say(self, hidden: Tensor) -> int:
        """The token of an output."""
        own = int((norm(hidden, self.t["norm.weight"]) @ self.t["lm_head.weight"].T).argmax())
        return own + int(self.t["d2t"][own])

    def draft(self, known: list[int], count: int) -> list[int]:
        """What it says after a text."""
        features = self.features(known[:-1])
        following, found = known[1:], []
        for _ in range(count):
            hidden = self.hidden(features, following)
            found.append(self.say(hidden[-1]))
            following = [*following, found[-1]]
            features = torch.cat((features, hidden[-1:]))
        return found


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """The root mean square norm."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def turned(x: Tensor) -> Tensor:
    """Queries or keys, [heads, T, DIM], rotated."""
    angles = torch.outer(torch.arange(x.shape[1]).float(), 10000.0 ** -(torch.arange(0, DIM, 2).float() / DIM))
    cos, sin = (each.repeat(1, 2) for each in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def write(folder: Path, tensors: dict[str, Tensor], torchs_own: bool = False, **changes: Any) -> Path:
    """Writes a checkpoint, with changes to its configuration."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    if torchs_own:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder
