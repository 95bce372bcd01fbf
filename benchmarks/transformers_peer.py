"""The demo model in Hugging Face transformers, float32: the peer of the CPU benchmark and the oracle of the tests.

It shares no code with Sapwood's own loader but the GGUF header reader; the weights are dequantized by the `gguf` package.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.initialization import no_init_weights

from sapwood_common.models.gguf_file import GgufFile, GgufTensor

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_gemma3(path: Path) -> Gemma3ForCausalLM:
    """A Gemma 3 text model from a GGUF file, float32, in evaluation mode, on the CPU."""
    file = GgufFile(path)
    about = {key.removeprefix("gemma3."): value for key, value in file.metadata.items()}
    config = Gemma3TextConfig(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=about["embedding_length"],
        intermediate_size=about["feed_forward_length"],
        num_hidden_layers=about["block_count"],
        num_attention_heads=about["attention.head_count"],
        num_key_value_heads=about["attention.head_count_kv"],
        head_dim=about["attention.key_length"],
        query_pre_attn_scalar=about["attention.key_length"],
        max_position_embeddings=about["context_length"],
        sliding_window=about["attention.sliding_window"],
        rms_norm_eps=about["attention.layer_norm_rms_epsilon"],
        eos_token_id=about["tokenizer.ggml.eos_token_id"],
        bos_token_id=about["tokenizer.ggml.bos_token_id"],
        pad_token_id=about["tokenizer.ggml.padding_token_id"],
    )
    config.rope_parameters["full_attention"]["rope_theta"] = about["rope.freq_base"]
    with no_init_weights():  # 270 million random numbers take longer than reading the file
        model = Gemma3ForCausalLM(config)
    weights = {_name(tensor.name): _weight(file, tensor) for tensor in file.tensors.values()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True, strict=True)
    model.tie_weights()
    return model.eval()


def _name(name: str) -> str:
    """The transformers name of a GGUF tensor."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def _weight(file: GgufFile, tensor: GgufTensor) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType(tensor.type)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    row_bytes = tensor.shape[-1] // block * block_bytes
    rows = int(np.prod(tensor.shape[:-1]))
    raw = np.frombuffer(file.data(tensor, rows * row_bytes), dtype=np.uint8).reshape(rows, row_bytes)
    values = torch.from_numpy(np.array(gguf.dequantize(raw, kind), dtype=np.float32).reshape(tensor.shape))
    # GGUF keeps the factor of a norm, transformers adds 1 to its weight.
    return values - 1 if tensor.name.endswith("norm.weight") else values
