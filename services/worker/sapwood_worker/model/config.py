"""What a model is, independent of the file format it came in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sapwood_worker.model.layers.rotary import RopeConfig

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
        architecture: The registry's name: ``gemma3``, ``llama``, ``qwen2``, ``qwen3``, ``mistral``.
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the MLP.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key/value heads; divides ``num_heads``.
        head_dim: Size of a head.
        rms_norm_eps: Of every norm.
        max_position: The context length it was made for.
        rope: Of layers without a window, and of all when ``local_rope`` is None.
        local_rope: Of layers with a window.
        windows: For each layer the number of positions a token sees, itself included, or None for all.
        activation: Of the MLP's gate.
        tie_word_embeddings: The output head is the embedding.
        attention_scale: Factor of query-key products.
        attention_softcap: See ``sapwood_kernels.reference.attention``.
        final_softcap: The same for the logits.
        qk_norm: Norms on each query and key head.
        qkv_bias: Biases on the query, key and value projections.
        output_bias: Bias on the attention's output projection.
        mlp_bias: Biases in the MLP.
        embedding_scale: Factor on the embedding's output.
        norm_offset: Added to norm weights stored in Hugging Face files (Gemma stores w of 1 + w).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    local_rope: RopeConfig | None
    windows: tuple[int | None, ...]
    activation: Activation
    tie_word_embeddings: bool
    attention_scale: float
    attention_softcap: float | None = None
    final_softcap: float | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
