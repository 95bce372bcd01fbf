"""The demo model as a mixture of experts: a Hugging Face directory with shards and an index, each MLP copied into experts.

Routing weights sum to one, so that with equal experts any routing gives the dense model's text. With noise in them it does not,
and transformers' own mixture is the oracle. No published family has Gemma's norms around experts: ``FAMILY`` is installed as a
package's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sapwood_kernels.experts.routing import Routing
from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.dense.gemma3 import GEMMA3
from sapwood_worker.model.families.values import HfValues
from sapwood_worker.model.layers.sparse.sparse_mlp import SparseConfig
from sapwood_worker.model.loader import load_model

_ARCHITECTURE = "Gemma3SparseForCausalLM"
_SHARDS = 4


def _from_hf(found: HfValues) -> ModelConfig:
    config = GEMMA3.from_hf(found)
    routing = Routing(int(found.values["num_experts"]), int(found.values["num_experts_per_tok"]), renormalise=True)
    return replace(config, sparse=SparseConfig(routing, config.intermediate_size))


FAMILY = replace(
    GEMMA3, name="gemma3_sparse", architectures=(_ARCHITECTURE,), classifiers=(), from_hf=_from_hf, from_gguf=None
)


def upcycle(model: Path, target: Path, *, experts: int, chosen: int, noise: float = 0.0) -> None:
    """Writes the directory; one shard is held at a time.

    Args:
        model: The demo model's GGUF file.
        target: A folder that is not there yet.
        experts: Copies of each MLP.
        chosen: How many of them a token goes to.
        noise: Spread of what is added to each copy, relative to the spread of the weight.
    """
    options: dict[str, Any] = {"context_length": None, "threads": 2, "seed": 0, "stored_weights": "widen"}
    loaded = load_model(model, "auto", torch.float32, device_ops("cpu"), **options)
    config = loaded.config
    target.mkdir()
    (target / "config.json").write_text(json.dumps(_settings(config, experts, chosen)))
    # Norms are held as 1 + w; checkpoints have the w.
    dense = {name: slot.target - 1.0 if slot.norm else slot.target for name, slot in loaded.model.weights().items()}
    shards: list[list[str]] = [list(dense)[start::_SHARDS] for start in range(_SHARDS)]
    index: dict[str, str] = {}
    generator = torch.Generator().manual_seed(5)
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{_SHARDS:05}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors |= dict(_copies(name, dense[name], experts, noise, generator))
        save_file(tensors, target / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _copies(
    name: str, weight: Tensor, experts: int, noise: float, generator: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    """What stands in the new checkpoint for a tensor of the dense one."""
    before, is_mlp, projection = name.partition(".mlp.")
    if not is_mlp:
        yield name, weight.contiguous()
        return
    for expert in range(experts):
        added = torch.randn(weight.shape, generator=generator) * (noise * weight.std())
        yield f"{before}.mlp.experts.{expert}.{projection}", weight + added
    if projection == "down_proj.weight":
        yield f"{before}.mlp.gate.weight", torch.randn(experts, weight.shape[0], generator=generator)


def _settings(config: ModelConfig, experts: int, chosen: int) -> dict[str, Any]:
    """``config.json`` of what transformers calls ``gemma3_text``, and the mixture."""
    thetas = {window is None: rope.theta for window, rope in zip(config.windows, config.ropes, strict=True) if rope}
    return {
        "architectures": [_ARCHITECTURE],
        "model_type": "gemma3_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position,
        "query_pre_attn_scalar": round(config.attention_scale**-2),
        "sliding_window": next(each for each in config.windows if each is not None),
        "layer_types": ["full_attention" if each is None else "sliding_attention" for each in config.windows],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": thetas[True]},
            "sliding_attention": {"rope_type": "default", "rope_theta": thetas[False]},
        },
        "num_experts": experts,
        "num_experts_per_tok": chosen,
    }
