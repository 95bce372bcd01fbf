"""The heads for multi-token prediction that DeepSeek's and GLM's checkpoints hold after the model's own layers (DeepSeek-AI,
"DeepSeek-V3 Technical Report", 2024, 2.2): a layer like the model's, which takes the token and what the model made of the token
before.

Embedding and output head are the model's. If the model is split over ranks, the head runs on one rank and has both whole for
itself. Where a checkpoint has several such layers, the first makes all drafts, one token after another.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import AttentionLayer, AttentionPlan
from sapwood_worker.model.checkpoint.hf_config import read_hf_config, read_hf_quantization
from sapwood_worker.model.checkpoint.safetensors_source import SafetensorsSource
from sapwood_worker.model.checkpoint.weights import load_weights
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.families.decoder import DecoderModel
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.heads.head import Head
from sapwood_worker.model.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.layers.linear import ColumnLinear
from sapwood_worker.model.layers.norm import RMSNorm
from sapwood_worker.model.layers.rotary import NoRotation, RotaryEmbedding
from sapwood_worker.model.quantization.linear_method import Stored
from sapwood_worker.model.quantization.registry import LinearMethods
from sapwood_worker.model.weight_slot import whole
from sapwood_worker.records.kv_layout import KVLayout


class MtpHead(Head):
    """The first of a checkpoint's heads. Its weights are not set: :func:`load_mtp` fills them.

    Args:
        config: The model's, with the head's layer after its own.
        family: The model's.
        model: The model.
        context: Where and how it is built.
        split: Whether the model is split over ranks.
    """

    def __init__(
        self, config: ModelConfig, family: ModelFamily, model: DecoderModel, context: LayerContext, *, split: bool
    ) -> None:
        index = config.num_layers - 1
        super().__init__(config, (index,))
        self._family = family
        self._normed, self._embed, self._head = model.normed, model.embed, model.head.forward
        if split:
            vocab, width = config.vocab_size, config.hidden_size
            table = context.inside("model").inside("embed_tokens")
            self.embedding = VocabParallelEmbedding(vocab, width, config.embedding_scale, table)
            tied = self.embedding.table if config.tie_word_embeddings else None
            inside, scale, softcap = context.inside("lm_head"), config.logit_scale, config.final_softcap
            self.head = VocabParallelHead(vocab, width, tied=tied, softcap=softcap, scale=scale, context=inside)
            self._embed, self._head = self.embedding.forward, self.head.forward
        self._constants = AttentionLayer(index, config.attention_scale)
        inside, width, eps = context.inside(f"model.layers.{index}"), config.hidden_size, config.rms_norm_eps
        self.norm_token = RMSNorm(width, eps, inside.inside("enorm"))
        self.norm_features = RMSNorm(width, eps, inside.inside("hnorm"))
        self.join = ColumnLinear(2 * width, {"eh_proj": whole(width)}, False, inside)
        self.layer = family.layer(config, index, inside)
        self.norm = RMSNorm(width, eps, inside.inside("shared_head.norm"))
        rope, dim = config.ropes[index], config.head_dim
        self.rotary = (
            NoRotation(dim, context) if rope is None else RotaryEmbedding(dim, rope, config.max_position, context)
        )

    def layout(self, dtype: str, page_size: int) -> KVLayout:
        layer = self.config.num_layers - 1
        return self._family.kv_layout(self.config, dtype, page_size).stage(range(layer, layer + 1)).kept_whole()

    def mix(self, states: Tensor) -> Tensor:
        return self._normed(states)

    def forward(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        features = self.store.index_select(0, plan.destination(self._constants).slots)
        token = self.norm_token(self._embed(token_ids))
        joined: Tensor = self.join(torch.cat((token, self.norm_features(features)), -1), None)
        result: Tensor = self.layer(joined, self.rotary(positions), plan)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden, self.norm)


def load_mtp(
    path: Path, model: DecoderModel, dtype: torch.dtype, ops: DeviceOps, threads: int, *, split: bool
) -> MtpHead:
    """Reads the head that a model's own checkpoint holds.

    Args:
        path: The model's directory.
        model: The model.
        dtype: Its weights' dtype, where they are not stored in a format that is kept.
        ops: The operations of the device where they go.
        threads: Tensors read at once.
        split: Whether the model is split over ranks: the head runs on one alone.

    Raises:
        ConfigError: There is none, or it cannot be read; names the file and what.
    """
    if not path.is_dir() or not model.config.draft_layers:
        raise ConfigError(f"--speculate mtp: {path} holds no layers for multi-token prediction")
    family, _ = read_hf_config(path)
    config, layers = model.config, model.config.num_layers
    extended = replace(
        config,
        num_layers=layers + 1,
        windows=(*config.windows, None),
        ropes=(*config.ropes, config.ropes[-1]),
    )
    own = f"model.layers.{layers}."
    others = tuple(f"model.layers.{index}." for index in range(layers + config.draft_layers) if index != layers)
    others += ("model.norm.", f"{own}embed_tokens.", f"{own}shared_head.head.")
    others += () if split else ("model.embed_tokens.", "lm_head.")
    source = SafetensorsSource(
        path, family, tied=config.tie_word_embeddings, skipped=others, fused=family.fused(extended)
    )
    stored = Stored(source.tensors(), read_hf_quantization(path), str(path))
    context = LayerContext(dtype, ops, LinearMethods("none", dtype, ops, stored), Parallel())
    head = MtpHead(extended, family, model, context, split=split)
    load_weights(head.weights(), source, config.norm_offset, threads)
    with torch.inference_mode():
        head.prepare()
    return head
