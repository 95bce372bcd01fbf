"""What tensors of GGUF files are called in Hugging Face checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping

EACH = "*"
"""Stands in a name for an expert's number: one tensor of the file holds those of all experts."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": f"mlp.experts.{EACH}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{EACH}.up_proj",
    "ffn_down_exps": f"mlp.experts.{EACH}.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
# Names with their ends, of tensors that have another end in Hugging Face checkpoints.
_WHOLE = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias", "attn_sinks.weight": "self_attn.sinks"}
_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)")
"""A tensor of one expert, in Mixtral's files of before April 2024."""
_OUR_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_NAME = re.compile(r"(?:blk\.(\d+)\.)?([a-z0-9_.]+)\.(weight|bias)")


def block_of(stored: str) -> int | None:
    """The layer that a tensor of the file is of; None: of none."""
    match = _NAME.fullmatch(stored)
    return None if match is None or match[1] is None else int(match[1])


def canonical(stored: str, names: Mapping[str, str]) -> str:
    """A tensor's name in Hugging Face checkpoints; that in the file if it is not known.

    Args:
        stored: Its name in the file.
        names: Names of a layer's tensors in such files that differ from family to family, and in Hugging Face's.
    """
    match = _NAME.fullmatch(stored)
    if match is None:
        return stored
    block, part, kind = match.groups()
    if block is None:
        return f"{_TOP[part]}.{kind}" if part in _TOP else stored
    layer = f"model.layers.{block}."
    if (whole := _WHOLE.get(f"{part}.{kind}")) is not None:
        return layer + whole
    if (expert := _EXPERT.fullmatch(part)) is not None:
        return f"{layer}mlp.experts.{expert[2]}.{expert[1]}_proj.{kind}"
    ours = {**_BLOCK, **names}.get(part)
    return f"{layer}{ours}.{kind}" if ours is not None else stored


def stored_name(ours: str, names: Mapping[str, str]) -> str:
    """What files call a tensor; our name if they have no such tensor.

    Args:
        ours: Its name in Hugging Face checkpoints.
        names: As of :func:`canonical`.
    """
    stem, _, kind = ours.rpartition(".")
    top = next((stored for stored, each in _TOP.items() if each == stem), None)
    if top is not None:
        return f"{top}.{kind}"
    match = _OUR_LAYER.fullmatch(ours)
    if match is None:
        return ours
    block, part = match[1], re.sub(r"\.experts\.\d+\.", f".experts.{EACH}.", match[2])
    for stored, each in _WHOLE.items():
        if each == part:
            return f"blk.{block}.{stored}"
    known = {each: stored for stored, each in {**_BLOCK, **names}.items()}
    stem, _, kind = part.rpartition(".")
    return f"blk.{block}.{known[stem]}.{kind}" if stem in known else ours
