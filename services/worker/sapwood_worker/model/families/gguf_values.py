"""The settings in the metadata of a GGUF file.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, with each architecture's conventions as llama.cpp has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sapwood_common.models.gguf_file import GgufFile
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.counts import check_count
from sapwood_worker.model.families.routing_values import read_routing
from sapwood_worker.model.families.settings import Reads
from sapwood_worker.model.layers.rope_scaling import LinearScaling, YarnScaling, yarn_magnitude
from sapwood_worker.model.layers.rotary import RopeConfig
from sapwood_worker.model.layers.sparse.sparse_mlp import SharedExpert, SparseConfig

ROPE_DIVISORS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (ROPE_DIVISORS, ROPE_LONG, ROPE_SHORT)
"""Tensors that divide rotary frequencies: always, in long contexts and in short ones."""

_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3
"""What files call the scores of experts."""


@dataclass(frozen=True, slots=True)
class GgufValues:
    """The settings of a model.

    Attributes:
        file: The open file.
        architecture: Prefix of the keys.
        rope_tensors: The values of those of ``ROPE_TENSORS`` that it has.
        reads: Notes which settings were read.
    """

    file: GgufFile
    architecture: str
    rope_tensors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    reads: Reads = field(default_factory=Reads)

    def get(self, key: str, default: Any = None) -> Any:
        """A setting.

        Raises:
            KeyError: The file does not say, and there is no default.
        """
        name = self.named(key)
        self.reads.names.add(name)
        self.reads.last = name
        return self.file.metadata[name] if default is None else self.file.metadata.get(name, default)

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A setting that counts something.

        Raises:
            KeyError: The file does not say, and there is no default.
            ValueError: It is no whole number from ``least`` on.
        """
        value = self.get(key, default)
        check_count(self.named(key), value, least)
        return int(value)

    def named(self, key: str) -> str:
        """What the file calls a setting."""
        return f"{self.architecture}.{key}"

    def llama(self, *, partly_rotated: bool = False, head_dim: int | None = None) -> ModelConfig:
        """The configuration that the metadata gives a Llama; families that are like it change what differs.

        Args:
            partly_rotated: Whether the family's heads may be turned in part.
            head_dim: Elements of a head where the file's sizes of keys and values mean something else; None: they say it.

        Raises:
            KeyError: A setting is missing.
            ValueError: One is not supported.
        """
        get, count, tensors = self.get, self.count, self.file.tensors
        hidden, heads, layers = count("embedding_length"), count("attention.head_count"), self.layers
        if head_dim is None:
            head_dim = count("attention.key_length", hidden // heads)
            if count("attention.value_length", head_dim) != head_dim:
                raise ValueError("keys and values of different size are not supported")
        rotated = count("rope.dimension_count", head_dim)
        if rotated != head_dim and not partly_rotated:
            raise ValueError("rotary embedding of part of a head is not supported")
        return ModelConfig(
            architecture=self.architecture,
            vocab_size=self.vocabulary,
            hidden_size=hidden,
            intermediate_size=count("feed_forward_length"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=count("attention.head_count_kv", heads),
            head_dim=head_dim,
            rms_norm_eps=float(get("attention.layer_norm_rms_epsilon")),
            max_position=count("context_length"),
            ropes=(replace(self.rope(10_000.0), rotated=None if rotated == head_dim else rotated),) * layers,
            windows=(None,) * layers,
            activation="silu",
            tie_word_embeddings="output.weight" not in tensors,
            attention_scale=head_dim**-0.5,
            final_softcap=self.file.metadata.get(self.named("final_logit_softcapping"))
            and get("final_logit_softcapping"),
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_up.bias" in tensors,
        )

    def experts(self, *, renormalise: bool, shared: SharedExpert | None = None, sigmoid: bool = False) -> SparseConfig:
        """The mixtures of experts, in the layers that have a router. Groups are chosen by their two best if scores are sigmoids.

        Args:
            renormalise: Whether a token's weights sum to one, where the file does not say.
            shared: The expert of all tokens.
            sigmoid: Whether scores are sigmoids, whatever the file says.

        Raises:
            KeyError: A setting is missing.
            ValueError: One is not supported.
        """
        get, count, tensors = self.get, self.count, self.file.tensors
        routers = {index for index in range(self.layers) if f"blk.{index}.ffn_gate_inp.weight" in tensors}
        gating = int(get("expert_gating_func", _SOFTMAX))
        if gating not in (_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN):
            raise ValueError(f"expert_gating_func {gating} is not supported")
        sigmoid = sigmoid or gating == _SIGMOID
        keys = {
            "expert_count": count("expert_count"),
            "expert_used_count": count("expert_used_count"),
            "expert_group_count": count("expert_group_count", 0, least=0) or 1,
            "expert_group_used_count": count("expert_group_used_count", 0, least=0) or 1,
        }
        experts, chosen, *groups = named = {self.named(key): value for key, value in keys.items()}
        routing = read_routing(
            named,
            experts,
            chosen,
            (groups[0], groups[1]),
            scores="sigmoid" if sigmoid else "softmax",
            renormalise=bool(get("expert_weights_norm", renormalise)) or gating == _SOFTMAX_OF_CHOSEN,
            scale=float(get("expert_weights_scale", 1.0)) or 1.0,
            group_score="two_best" if sigmoid else "best",
        )
        return SparseConfig(
            routing,
            count("expert_feed_forward_length", count("feed_forward_length")),
            dense_layers=frozenset(range(self.layers)) - routers,
            shared=shared,
        )

    @property
    def layers(self) -> int:
        """Layers of the model; files may hold more, for drafts."""
        blocks, drafts = self.count("block_count"), self.count("nextn_predict_layers", 0, least=0)
        check_count(f"{self.named('block_count')} without nextn_predict_layers", blocks - drafts, 1)
        return blocks - drafts

    def rope(self, theta: float) -> RopeConfig:
        """The rotary embedding, with the base ``theta`` where the file does not say.

        Raises:
            KeyError: Its factor is missing.
            ValueError: Its kind is not supported.
        """
        theta = float(self.get("rope.freq_base", theta))
        divisors = self.rope_tensors.get(ROPE_DIVISORS)
        # The factor's old name; 0: there is none. Without a type it is linear, as llama.cpp takes it.
        factor = float(self.get("rope.scaling.factor", 0.0)) or float(self.get("rope.scale_linear", 0.0))
        kind = self.get("rope.scaling.type", "linear")
        magnitude = float(self.get("rope.scaling.attn_factor", 1.0)) * float(
            self.get("rope.scaling.yarn_attn_factor", 1.0)
        )
        if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
            return RopeConfig(theta, None if magnitude == 1.0 else LinearScaling(1.0, magnitude), divisors=divisors)
        if kind == "linear":
            return RopeConfig(theta, LinearScaling(factor, magnitude), divisors=divisors)
        if kind == "longrope":  # two lists of divisors, which are tensors
            return RopeConfig(theta, divisors=divisors)
        if kind != "yarn":
            raise ValueError(f"rotary embedding scaling {kind!r} is not supported (linear, yarn and longrope are)")
        if not factor:
            raise KeyError(self.named("rope.scaling.factor"))
        if (extrapolated := float(self.get("rope.scaling.yarn_ext_factor", 1.0))) != 1.0:
            raise ValueError(f"{self.named('rope.scaling.yarn_ext_factor')} {extrapolated} is not supported (1 is)")
        original = self.count("rope.scaling.original_context_length", self.count("context_length"))
        fast, slow = (
            float(self.get(f"rope.scaling.yarn_beta_{name}", each)) for name, each in (("fast", 32.0), ("slow", 1.0))
        )
        scaling = YarnScaling(factor, original, fast, slow, magnitude * yarn_magnitude(factor))
        return RopeConfig(theta, scaling, divisors=divisors)

    @property
    def vocabulary(self) -> int:
        """Tokens: rows of the embedding. Raises KeyError or ValueError if the file has none."""
        table = self.file.tensors["token_embd.weight"]
        if len(table.shape) != 2:
            raise ValueError(f"tensor token_embd.weight has shape {list(table.shape)}")
        return table.shape[0]
