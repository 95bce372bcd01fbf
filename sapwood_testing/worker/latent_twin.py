"""A Gemma 3 with one key head, made over into one with latent attention that computes the same.

DeepSeek norms the latent vector, so a value is a linear function of it only if its mean square is the same for every token.
It is, if the latent vector is the layer's input before the norm's weights, turned by an orthogonal matrix: a full-rank factor.
The keys, which Gemma norms and rotates, are the rotary part that all heads share. The part of a key that is not rotated is
there, and queries have zeros for it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sapwood_common.models.model_files import packaged_path
from sapwood_kernels.kv_destination import KVDestination
from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.model.attention.backend import AttentionLayer
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.decoder import SandwichDecoderLayer
from sapwood_worker.model.families.dense.gemma3 import GEMMA3
from sapwood_worker.model.families.values import HfValues
from sapwood_worker.model.layers.latent_attention import LatentAttention, LatentConfig
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.layers.norm import RMSNorm
from sapwood_worker.model.loader import LoadedModel, load_model

ARCHITECTURE = "Gemma3LatentForCausalLM"
_FLAT = 16


class _NormedAttention(LatentAttention):
    """With Gemma's norms on what is turned."""

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        assert config.latent is not None
        super().__init__(
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            latent=config.latent,
            constants=AttentionLayer(index, config.attention_scale, config.windows[index]),
            context=context,
        )
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_dim, config.rms_norm_eps, context.inside(name)) for name in ("q_norm", "k_norm")
        )

    def finish(self) -> None:
        super().finish()
        plain, ends = self._store, self._latent.qk_rope_head_dim

        def store(vectors: Tensor, query: Tensor, cos: Tensor, sin: Tensor, to: KVDestination) -> Tensor:
            vectors = torch.cat((vectors[:, :-ends], self.k_norm(vectors[:, -ends:])), 1)
            query = torch.cat((query[..., :-ends], self.q_norm(query[..., -ends:])), 2)
            return plain(vectors, query, cos, sin, to)

        self._store = store


class _TwinLayer(SandwichDecoderLayer):
    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__(config, index, context)
        self.attention = _NormedAttention(config, index, context.attending.inside("self_attn"))


def _from_hf(found: HfValues) -> ModelConfig:
    config = GEMMA3.from_hf(found)
    latent = LatentConfig(config.hidden_size, _FLAT, config.head_dim, config.head_dim, rope_interleave=False)
    return replace(config, latent=latent, norm_offset=0.0)


TWIN = replace(
    GEMMA3, name="gemma3_latent", architectures=(ARCHITECTURE,), classifiers=(), layer=_TwinLayer, from_hf=_from_hf
)


def write_twin(loaded: LoadedModel, folder: Path, **settings: object) -> None:
    """Writes a model's twin as a checkpoint of DeepSeek's layout.

    Args:
        loaded: The model, float32, with one key head.
        folder: An empty folder.
        settings: Those of ``config.json`` that are not Gemma 3's defaults.
    """
    config = loaded.config
    assert config.num_kv_heads == 1
    slots = {name: slot.target.detach() for name, slot in loaded.model.weights().items()}
    tensors = {name: each for name, each in slots.items() if not name.endswith((".q_proj.weight", ".v_proj.weight"))}
    generator = torch.Generator().manual_seed(1)
    for index in range(config.num_layers):
        place = f"model.layers.{index}.self_attn"
        tensors.pop(f"{place}.k_proj.weight")
        tensors |= _attention(slots, f"model.layers.{index}", config, generator)
    save_file({name: each.contiguous().clone() for name, each in tensors.items()}, folder / "model.safetensors")
    named = {"architectures": [ARCHITECTURE], "eos_token_id": list(loaded.eos_token_ids)}
    (folder / "config.json").write_text(json.dumps(named | settings))


def _attention(
    slots: dict[str, Tensor], layer: str, config: ModelConfig, generator: torch.Generator
) -> dict[str, Tensor]:
    width, heads, dim, place = config.hidden_size, config.num_heads, config.head_dim, f"{layer}.self_attn"
    weights = slots[f"{layer}.input_layernorm.weight"].double()
    queries, keys, values = (slots[f"{place}.{each}_proj.weight"] for each in "qkv")
    turn, _ = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))
    down = (turn / weights).float()
    up = ((values.double() * weights) @ turn.t()).float()
    flat = torch.randn(heads, _FLAT, width, generator=generator)
    zeros = torch.zeros(heads, _FLAT, width)
    return {
        f"{place}.q_proj.weight": torch.cat((zeros, queries.view(heads, dim, width)), 1).flatten(0, 1),
        f"{place}.kv_a_proj_with_mqa.weight": torch.cat((down, keys)),
        f"{place}.kv_a_layernorm.weight": torch.ones(width),
        f"{place}.kv_b_proj.weight": torch.cat((flat, up.expand(heads, -1, -1)), 1).flatten(0, 1),
    }


def write_demo_twin(folder: Path) -> None:
    """Writes the demo model's twin."""
    options: dict[str, Any] = {"context_length": None, "threads": 1, "seed": 0, "stored_weights": "widen"}
    demo = load_model(packaged_path("demo-base"), "auto", torch.float32, device_ops("cpu"), **options)
    config = demo.config
    write_twin(
        demo,
        folder,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=1,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position,
        rms_norm_eps=config.rms_norm_eps,
        sliding_window=next(window for window in config.windows if window),
        query_pre_attn_scalar=config.head_dim,
        rope_theta=1_000_000.0,
    )
