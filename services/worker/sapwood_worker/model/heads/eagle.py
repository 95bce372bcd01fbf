"""The head of EAGLE-3 (Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
2025): one layer that predicts the next token from the last one and from what three of the model's layers made of those before.

The checkpoint has a vocabulary of its own, a part of the model's; ``d2t`` says how far each of its tokens is from the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_common.models.json_file import read_json_object
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import AttentionLayer, AttentionPlan
from sapwood_worker.model.checkpoint.hf_config import read_hf_config
from sapwood_worker.model.checkpoint.safetensors_source import SafetensorsSource, open_weights
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.families.decoder import DecoderModel
from sapwood_worker.model.families.family import attention_layout
from sapwood_worker.model.families.known_keys import CONFIG, refusal
from sapwood_worker.model.families.llama import LLAMA
from sapwood_worker.model.families.values import HfValues, Settings
from sapwood_worker.model.heads.head import Head
from sapwood_worker.model.layers.attention import Attention
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.layers.linear import ColumnLinear
from sapwood_worker.model.layers.mlp import GatedMLP
from sapwood_worker.model.layers.norm import RMSNorm
from sapwood_worker.model.layers.rotary import RotaryEmbedding
from sapwood_worker.model.quantization.registry import LinearMethods
from sapwood_worker.model.weight_slot import WeightSlot, whole
from sapwood_worker.records.kv_layout import KVLayout

_FILES = ("model.safetensors", "pytorch_model.bin")
_OWN_SETTINGS = (
    *(
        "eagle_config",
        "eagle_aux_hidden_state_layer_ids",
        "norm_before_residual",
        "draft_vocab_size",
        "num_hidden_layers",
    ),
    *("target_hidden_size", "target_model", "speculators_"),
)
"""How settings are called that heads have and models have not; read here, or names."""
_SKIPPED = ("t2d", "d2t", "embed_tokens.weight")


class EagleHead(Head):
    """A head, as a runner runs it. Its weights are not set: :func:`load_eagle` fills them.

    Args:
        config: Its own configuration, of one layer; ``vocab_size`` is the model's.
        vocabulary: int64 [its own vocabulary]: the model's token of each of its own.
        embed: int64 [T] -> [T, hidden_size].
        width: The model's hidden size.
        taken: The layers of the model of whose inputs it takes its features.
        normed: Whether features are normed before they are added to what attention gives.
        context: Where and how it is built.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocabulary: Tensor,
        embed: Callable[[Tensor], Tensor],
        width: int,
        taken: tuple[int, ...],
        normed: bool,
        context: LayerContext,
    ) -> None:
        super().__init__(config, taken)
        self._normed = normed
        self._vocabulary = vocabulary
        self._embed = embed
        size, inside = config.hidden_size, context.inside("midlayer")
        self._constants = AttentionLayer(0, config.attention_scale)
        self.mix_states = ColumnLinear(len(taken) * width, {"fc": whole(size)}, False, context)
        self.attention = Attention(
            hidden_size=size,
            input_size=2 * size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            constants=self._constants,
            qk_norm=None,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            rope=config.ropes[0],
            context=inside.inside("self_attn"),
        )
        self.mlp = GatedMLP(
            size, config.intermediate_size, activation=config.activation, bias=False, context=inside.inside("mlp")
        )
        eps = config.rms_norm_eps
        self.norm_token = RMSNorm(size, eps, inside.inside("input_layernorm"))
        self.norm_features = RMSNorm(size, eps, inside.inside("hidden_norm"))
        self.norm_mlp = RMSNorm(size, eps, inside.inside("post_attention_layernorm"))
        self.norm = RMSNorm(size, eps, context.inside("norm"))
        self.head = ColumnLinear(size, {"lm_head": whole(len(vocabulary))}, False, context)
        assert config.ropes[0] is not None
        self.rotary = RotaryEmbedding(config.head_dim, config.ropes[0], config.max_position, context)

    def layout(self, dtype: str, page_size: int) -> KVLayout:
        return attention_layout(self.config, dtype, page_size)

    def mix(self, states: Tensor) -> Tensor:
        mixed: Tensor = self.mix_states(states, None)
        return mixed

    def forward(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        features = self.store.index_select(0, plan.destination(self._constants).slots)
        normed = self.norm_features(features)
        both = torch.cat((self.norm_token(self._embed(token_ids)), normed), -1)
        residual = normed if self._normed else features
        hidden: Tensor = self.attention(both, None, self.rotary(positions), plan, residual)
        self.mlp(hidden, self.norm_mlp, hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        own: Tensor = self.head(hidden, self.norm)
        result = own.new_full((len(own), self.config.vocab_size), float("-inf"))
        return result.index_copy_(1, self._vocabulary, own)


def load_eagle(
    folder: Path, model: DecoderModel, dtype: torch.dtype, ops: DeviceOps, files: Path, *, split: bool
) -> EagleHead:
    """Reads a head for a model.

    Args:
        folder: ``config.json`` with ``draft_vocab_size``, and the weights in one file, safetensors or torch's own.
        model: The model that it was trained for.
        dtype: Its weights' dtype.
        ops: The operations of the device where they go.
        files: The model's.
        split: Whether the model is split over ranks: the head runs on one alone, with the whole of the embedding.

    Raises:
        ConfigError: It cannot be read, or is not for this model; names the file and what.
    """
    raw = read_json_object(folder / "config.json")
    try:
        given = Settings(raw)
        config = HfValues(LLAMA.name, given, given.over(LLAMA.defaults).but({"num_hidden_layers": 1})).llama()
    except KeyError as error:
        raise ConfigError(f"{folder / 'config.json'}: {error.args[0]!r} is missing") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from error
    unread = {name: value for name, value in given.unread().items() if not name.startswith(_OWN_SETTINGS)}
    if refused := CONFIG.refused(unread, {}, given.flat()):
        raise ConfigError(refusal(str(folder / "config.json"), refused))
    if config.vocab_size != model.config.vocab_size:
        raise ConfigError(
            f"{folder}: its model's vocabulary has {config.vocab_size} tokens, this model's {model.config.vocab_size}"
        )
    config = replace(config, max_position=model.config.max_position, windows=(None,))
    path, tensors = _read(folder)
    offsets = tensors.get("d2t")
    size = len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else config.vocab_size
    vocabulary = torch.arange(size) + (offsets.long() if offsets is not None else 0)
    if offsets is None and size != config.vocab_size:
        raise ConfigError(f"{path}: tensor d2t is missing: its vocabulary has {size} tokens")
    if not 0 <= int(vocabulary.min()) <= int(vocabulary.max()) < config.vocab_size:
        raise ConfigError(f"{path}: tensor d2t names tokens that the model does not have")
    table = tensors.get("embed_tokens.weight")
    embed: Callable[[Tensor], Tensor] = model.embed
    if table is not None:
        table = table.to(ops.device, dtype)
        embed = lambda tokens: torch.nn.functional.embedding(tokens, table)  # noqa: E731
    elif split and config.hidden_size == model.config.hidden_size:
        embed = _whole_embedding(files, model.config, dtype, ops)
    elif config.hidden_size != model.config.hidden_size:
        raise ConfigError(f"{path}: tensor embed_tokens.weight is missing: it is not as wide as the model")
    context = LayerContext(dtype, ops, LinearMethods("none", dtype, ops), Parallel())
    taken = _taken(raw, model.config.num_layers, folder)
    normed, width = raw.get("norm_before_residual") is True, model.config.hidden_size
    head = EagleHead(config, vocabulary.to(ops.device), embed, width, taken, normed, context)
    _fill(head, tensors, path)
    with torch.inference_mode():
        head.prepare()
    return head


def _taken(raw: Mapping[str, object], layers: int, folder: Path) -> tuple[int, ...]:
    """The layers whose inputs the features are made of; the number of layers stands for the last one's output. They are those of
    the configuration, or an early, a middle and a late one.

    Heads are published with either of two conventions, in ``eagle_config`` or beside it. vLLM reads ids as those of layers'
    inputs. SGLang and SpecForge number the layers' outputs from 1. So a first id of 1 tells them apart, as
    in SGLang (sgl-project/sglang#25454): nobody takes the input of layer 1.
    """
    key, own = "eagle_aux_hidden_state_layer_ids", raw.get("eagle_config")
    given = own.get(key) if isinstance(own, dict) else None
    given = raw.get(key) if given is None else given
    if given is None:
        given = [2, layers // 2, layers - 3]
    numbers = isinstance(given, list) and given and all(type(each) is int for each in given)
    found = sorted(given) if isinstance(given, list) and numbers else []
    found = [each + 1 for each in found] if found and found[0] == 1 else found
    if not found or len(set(found)) != len(found) or not 0 <= found[0] <= found[-1] <= layers:
        raise ConfigError(f"{folder}: features of the layers {given} are asked for; the model has {layers}")
    return tuple(found)


def _whole_embedding(
    files: Path, config: ModelConfig, dtype: torch.dtype, ops: DeviceOps
) -> Callable[[Tensor], Tensor]:
    """The model's embedding as one rank alone computes it."""
    name = "model.embed_tokens.weight"
    if not files.is_dir():
        raise ConfigError(f"{files}: a head without embed_tokens drafts for a split model of safetensors only")
    family, _ = read_hf_config(files)
    source = SafetensorsSource(files, family, tied=config.tie_word_embeddings)
    if name not in source.tensors():
        raise ConfigError(f"{files}: tensor {name} is missing")
    slot = WeightSlot(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=ops.device))
    with torch.inference_mode():
        source.read_into(name, slot)
    scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
    return lambda tokens: torch.nn.functional.embedding(tokens, slot.target) * scale


def _read(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The file with the weights, and these by their names."""
    path = next((folder / name for name in _FILES if (folder / name).exists()), None)
    if path is None:
        raise ConfigError(f"{folder}: holds neither {' nor '.join(_FILES)}")
    with open_weights(path) as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    return path, {name.removeprefix("model.").replace("layers.0.", "midlayer."): each for name, each in stored.items()}


def _fill(head: EagleHead, tensors: Mapping[str, Tensor], path: Path) -> None:
    slots = head.weights()
    for name, slot in slots.items():
        found = tensors.get(name)
        if found is None or tuple(found.shape) != slot.shape:
            what = "is missing" if found is None else f"has shape {list(found.shape)}, not {list(slot.shape)}"
            raise ConfigError(f"{path}: tensor {name} {what}")
        with torch.inference_mode():
            slot.target.copy_(found)
    unexpected = sorted(set(tensors) - set(slots) - set(_SKIPPED))
    if unexpected:
        raise ConfigError(f"{path}: tensor {unexpected[0]} is no part of a head of EAGLE-3")
