"""Writes GGUF files of tiny models with experts, as llama.cpp's converter names and shapes what is in them.

Each tensor is read from the Hugging Face checkpoint that transformers has saved, and rounded in the model too where it is stored
in few bits: its logits are then those of the file's numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sapwood_testing.models.tiny_models import Tiny

_TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_TOP |= {"lm_head.weight": "output.weight"}
_MLP = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_ATTENTION = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm", "q_a_proj": "attn_q_a", "q_b_proj": "attn_q_b", "kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "q_a_layernorm": "attn_q_a_norm", "kv_a_layernorm": "attn_kv_a_norm", "kv_b_proj": "attn_kv_b",
}  # fmt: skip
_SHARED = re.compile(r"mlp\.shared_experts?\.(\w+)\.weight")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_DENSE = re.compile(r"mlp\.(\w+)\.weight")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a family's files differ.

    Attributes:
        architecture: What they say that they are.
        second_norm: What they call the norm before the experts.
        interleaved: Whether rows of queries and keys are in interleaved rotary order.
    """

    architecture: str
    second_norm: str = "ffn_norm"
    interleaved: bool = False


LAYOUTS = {
    "mixtral": Layout("llama", interleaved=True),
    "qwen2-moe": Layout("qwen2moe"),
    "qwen3-moe": Layout("qwen3moe"),
    "olmoe": Layout("olmoe"),
    "dots1-no-windows": Layout("dots1"),
    "glm4-moe": Layout("glm4moe", second_norm="post_attention_norm"),
    "gpt-oss": Layout("gpt-oss", second_norm="post_attention_norm"),
    "deepseek-v2": Layout("deepseek2"),
    "deepseek-v3": Layout("deepseek2"),
    "glm4-moe-lite": Layout("deepseek2"),
}


def write_sparse_gguf(
    folder: Path,
    tiny: Tiny,
    name: str,
    kinds: Mapping[str, str] | None = None,
    *,
    halves: bool = True,
    says_groups: bool = True,
    tensors_each: int = 0,
) -> tuple[Path, Any]:
    """Writes the file; returns it, and transformers' model of the file's numbers.

    Args:
        folder: An empty one.
        tiny: The model.
        name: Its name among ``LAYOUTS``.
        kinds: The types of matrices by their names in the file (``ffn_up_exps``); float32 unless given.
        halves: Whether what expands latent vectors is in two tensors, as newer files have it.
        tensors_each: Tensors of a file, the model being stored in several; 0: it is in one.
        says_groups: Whether it says in which groups experts are, as newer files do.
    """
    import transformers

    layout, config, kinds = LAYOUTS[name], tiny.oracle.config, kinds or {}
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, layout.architecture, split_max_tensors=tensors_each)
    _settings(writer, layout, tiny.oracle, says_groups=says_groups)
    tensors = load_file(tiny.path / "model.safetensors")
    tensors = {key: tensors[key] for key in sorted(tensors, key=_by_number)}
    rounded = dict(tensors)
    found: dict[str, dict[str, Tensor]] = {}
    for ours, tensor in tensors.items():
        for theirs, part in _stored(ours, tensor.float(), layout, config, halves):
            found.setdefault(theirs, {})[ours] = part
    for theirs, parts in found.items():
        values = (
            torch.stack(list(parts.values())) if "_exps." in theirs and len(parts) > 1 else next(iter(parts.values()))
        )
        kind = kinds.get(re.sub(r"^blk\.\d+\.|\.weight$", "", theirs))
        if kind is None or values.dim() < 2:
            writer.add_tensor(theirs, values.contiguous().numpy())
            continue
        raw = gguf.GGMLQuantizationType[kind]
        stored = gguf.quantize(values.contiguous().numpy(), raw)
        writer.add_tensor(theirs, stored, raw_dtype=raw)
        wide = torch.from_numpy(gguf.dequantize(stored, raw)).reshape(values.shape)
        for number, ours in enumerate(parts):
            own = wide[number] if len(parts) > 1 else wide
            _round(rounded, ours, theirs, own, layout, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if tensors_each:
        path = min(folder.glob("model-*.gguf"))
    copy = folder / "rounded"
    copy.mkdir()
    (copy / "config.json").write_text((tiny.path / "config.json").read_text())
    save_file(rounded, copy / "model.safetensors", metadata={"format": "pt"})
    auto: Any = transformers.AutoModelForCausalLM
    return path, auto.from_pretrained(copy, attn_implementation="eager", dtype=torch.float32).eval()


def _stored(name: str, tensor: Tensor, layout: Layout, config: Any, halves: bool) -> Iterator[tuple[str, Tensor]]:
    """What a file calls a tensor, or each of the tensors that it has for it, and how it is held there."""
    if name in _TOP:
        yield _TOP[name], tensor
        return
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    assert match is not None, name
    layer, rest = f"blk.{match[1]}", match[2]
    stem, _, end = rest.rpartition(".")
    inside = stem.rpartition(".")[2]
    if rest == "input_layernorm.weight":
        yield f"{layer}.attn_norm.weight", tensor
    elif rest == "post_attention_layernorm.weight":
        yield f"{layer}.{layout.second_norm}.weight", tensor
    elif rest == "self_attn.sinks":
        yield f"{layer}.attn_sinks.weight", tensor
    elif rest == "self_attn.kv_b_proj.weight" and halves:
        heads = tensor.view(config.num_attention_heads, -1, tensor.shape[1])
        keys = heads[:, : config.qk_nope_head_dim]
        yield f"{layer}.attn_k_b.weight", keys.transpose(1, 2)
        yield f"{layer}.attn_v_b.weight", heads[:, config.qk_nope_head_dim :]
    elif rest.startswith("self_attn."):
        if layout.interleaved and inside in ("q_proj", "k_proj"):
            tensor = _interleave(tensor, config.head_dim)
        yield f"{layer}.{_ATTENTION[inside]}.{end}", tensor
    elif rest.endswith("e_score_correction_bias"):
        yield f"{layer}.exp_probs_b.bias", tensor
    elif stem in ("mlp.gate", "block_sparse_moe.gate", "mlp.router"):
        yield f"{layer}.ffn_gate_inp.{end}", tensor
    elif rest == "mlp.shared_expert_gate.weight":
        yield f"{layer}.ffn_gate_inp_shexp.weight", tensor[0]
    elif (found := _EXPERT.fullmatch(rest)) is not None:
        yield f"{layer}.ffn_{_MLP[found[2]]}_exps.weight", tensor
    elif (found := _SHARED.fullmatch(rest)) is not None:
        yield f"{layer}.ffn_{_MLP[found[1]]}_shexp.weight", tensor
    elif "experts.gate_up_proj" in rest:  # gpt-oss: rows in turns, matrices transposed
        kind = "bias" if rest.endswith("_bias") else "weight"
        rows = tensor if kind == "bias" else tensor.transpose(1, 2)
        yield f"{layer}.ffn_gate_exps.{kind}", rows[:, ::2]
        yield f"{layer}.ffn_up_exps.{kind}", rows[:, 1::2]
    elif "experts.down_proj" in rest:
        bias = rest.endswith("_bias")
        yield f"{layer}.ffn_down_exps.{'bias' if bias else 'weight'}", tensor if bias else tensor.transpose(1, 2)
    else:
        found = _DENSE.fullmatch(rest)
        assert found is not None, name
        yield f"{layer}.ffn_{_MLP[found[1]]}.weight", tensor


def _round(rounded: dict[str, Tensor], ours: str, theirs: str, wide: Tensor, layout: Layout, config: Any) -> None:
    """Puts the numbers that a file has of a tensor in its place; the inverse of :func:`_stored`."""
    if ".experts.gate_up_proj" in ours:
        rounded[ours] = rounded[ours].clone()
        rounded[ours][..., int("_up_exps" in theirs) :: 2] = wide.transpose(1, 2)
    elif ".experts.down_proj" in ours:
        rounded[ours] = wide.transpose(1, 2).contiguous()
    elif layout.interleaved and re.search(r"\.(q|k)_proj\.", ours):
        pairs = wide.view(-1, config.head_dim // 2, 2, *wide.shape[1:])
        rounded[ours] = pairs.transpose(1, 2).reshape(wide.shape).contiguous()
    elif "kv_b_proj" in ours and "attn_kv_b" not in theirs:
        raise ValueError("what expands latent vectors is written in float32")
    else:
        rounded[ours] = wide.contiguous()


def _by_number(name: str) -> list[str | int]:
    """Orders expert 10 after expert 9."""
    return [int(part) if part.isdigit() else part for part in name.split(".")]


def _interleave(tensor: Tensor, head_dim: int) -> Tensor:
    heads = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:]).transpose(1, 2)
    return heads.reshape(tensor.shape)


def _settings(writer: Any, layout: Layout, model: Any, *, says_groups: bool) -> None:
    config = model.config
    given = config.to_dict()

    def first(*names: str) -> Any:
        return next((given[name] for name in names if given.get(name) is not None), None)

    layers = config.num_hidden_layers
    writer.add_block_count(layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    experts = first("n_routed_experts", "num_local_experts", "num_experts")
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if (width := first("moe_intermediate_size")) is not None:
        writer.add_expert_feed_forward_length(width)
    if layout.architecture in ("glm4moe", "dots1", "deepseek2"):
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(given.get("first_k_dense_replace") or 0)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(bool(given.get("norm_topk_prob")))
        sigmoid = given["model_type"] != "deepseek_v2"
        kinds = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SIGMOID if sigmoid else kinds.SOFTMAX)
        if says_groups and first("n_group"):
            writer.add_expert_group_count(config.n_group)
            writer.add_expert_group_used_count(config.topk_group)
    if layout.architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if layout.architecture == "gpt-oss":
        writer.add_sliding_window(config.sliding_window)
    if layout.architecture == "deepseek2":
        _latent(writer, config)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        head_dim = given.get("head_dim") or config.hidden_size // config.num_attention_heads
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        rope = config.rope_parameters
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if layout.architecture == "deepseek2":
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_eos_token_id(2)


def _latent(writer: Any, config: Any) -> None:
    writer.add_head_count_kv(1)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
