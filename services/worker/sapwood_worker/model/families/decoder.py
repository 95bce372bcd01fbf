"""The frame all decoder-only models share: embedding, layers, norm, head."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import AttentionLayer, AttentionPlan
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.layers.attention import Attention, QKNorm
from sapwood_worker.model.layers.embedding import Embedding, LMHead
from sapwood_worker.model.layers.layer import Layer
from sapwood_worker.model.layers.linear import Quantization
from sapwood_worker.model.layers.mlp import GatedMLP
from sapwood_worker.model.layers.norm import RMSNorm
from sapwood_worker.model.layers.rotary import RotaryEmbedding, inverse_frequencies
from sapwood_worker.model.layers.weight_slot import WeightSlots

Angles = tuple[Tensor, Tensor]


class DecoderLayer(Layer, ABC):
    """One layer: attention and MLP, with norms where the model family has them.

    Args:
        config: The model's configuration.
        index: The layer's index.
        dtype: The dtype of weights and activations.
        ops: The operations of the device, where the weights lie.
    """

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype, ops: DeviceOps) -> None:
        super().__init__()
        heads, kv_heads, dim, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        self.attention = Attention(
            hidden_size=config.hidden_size,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            constants=AttentionLayer(
                index, config.attention_scale, window=config.windows[index], softcap=config.attention_softcap
            ),
            qk_norm=QKNorm(dim, eps, ops) if config.qk_norm else None,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            dtype=dtype,
            ops=ops,
        )
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            gelu=config.activation == "gelu_tanh",
            bias=config.mlp_bias,
            dtype=dtype,
            ops=ops,
        )
        self.norms = nn.ModuleDict({name: RMSNorm(config.hidden_size, eps, ops) for name in self.norm_names()})

    @staticmethod
    @abstractmethod
    def norm_names() -> tuple[str, ...]:
        """Names of the layer's norms in a Hugging Face checkpoint."""

    @abstractmethod
    def forward(self, hidden: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]; may overwrite ``hidden``."""

    def weights(self, prefix: str) -> WeightSlots:
        """The slots of its tensors under ``prefix``."""
        slots = self.attention.weights(f"{prefix}.self_attn") | self.mlp.weights(f"{prefix}.mlp")
        for name in self.norm_names():
            slots |= self.norm(name).weights(f"{prefix}.{name}")
        return slots

    def norm(self, name: str) -> RMSNorm:
        """The norm of a name."""
        found = self.norms[name]
        assert isinstance(found, RMSNorm)
        return found

    def prepare(self, dtype: torch.dtype, quantization: Quantization = "none") -> None:
        """Readies the weights for use; called once when they are loaded."""
        self.attention.prepare(dtype, quantization)
        self.mlp.prepare(quantization)
        for name in self.norm_names():
            self.norm(name).prepare(dtype)


class DecoderModel(Layer):
    """A decoder-only language model.

    Args:
        config: The model's configuration.
        layer_class: The family's layer.
        dtype: The dtype of weights and activations.
        ops: The operations of the device, where the weights lie. These are not set: fill :meth:`weights`, then call
            :meth:`prepare`.
    """

    def __init__(
        self, config: ModelConfig, layer_class: type[DecoderLayer], dtype: torch.dtype, ops: DeviceOps
    ) -> None:
        super().__init__()
        self.config = config
        self._dtype = dtype
        self.embedding = Embedding(config.vocab_size, config.hidden_size, config.embedding_scale, dtype, ops)
        self.layers = nn.ModuleList(layer_class(config, i, dtype, ops) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        tied = config.tie_word_embeddings
        shape = (config.vocab_size, config.hidden_size)
        head = (
            self.embedding.weight
            if tied
            else nn.Parameter(torch.empty(shape, dtype=dtype, device=ops.device), requires_grad=False)
        )
        self.head = LMHead(head, tied=tied, softcap=config.final_softcap, ops=ops)
        ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
        self.rotary = nn.ModuleList(
            RotaryEmbedding(inverse_frequencies(config.head_dim, rope), config.max_position, dtype, ops.device)
            for rope in ropes
        )
        # The index of each layer's rotary embedding.
        self._kinds = [int(config.local_rope is not None and window is not None) for window in config.windows]

    def weights(self) -> WeightSlots:
        """The slots of all tensors by their Hugging Face names."""
        slots = self.embedding.weights("model.embed_tokens")
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            slots |= layer.weights(f"model.layers.{i}")
        return slots | self.norm.weights("model.norm") | self.head.weights("lm_head")

    def prepare(self, quantization: Quantization = "none") -> None:
        """Readies the weights for use; called once when they are loaded. Embedding and head are never quantised."""
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            layer.prepare(self._dtype, quantization)
        self.norm.prepare(self._dtype)
        self.head.prepare()

    def forward(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Runs the layers over a flat ragged batch; writes keys and values to the cache.

        Args:
            token_ids: int64 [T].
            positions: int64 [T].
            plan: The step's attention.

        Returns:
            [T, hidden_size], before the final norm.
        """
        hidden: Tensor = self.embedding(token_ids)
        angles = [rotary(positions) for rotary in self.rotary]
        for layer, kind in zip(self.layers, self._kinds, strict=True):
            hidden = layer(hidden, angles[kind], plan)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] as :meth:`forward` returns -> [R, vocab_size], float32 or the model's dtype."""
        result: Tensor = self.head(hidden, self.norm)
        return result
