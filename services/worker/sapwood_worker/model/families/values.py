"""The settings of ``config.json`` and of GGUF files, as all families read them.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, with each architecture's conventions as llama.cpp has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sapwood_common.models.gguf_file import GgufFile
from sapwood_kernels.experts.routing import Routing
from sapwood_kernels.ops.contracts import Gate
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.known_keys import says_nothing
from sapwood_worker.model.layers.latent_attention import LatentConfig
from sapwood_worker.model.layers.mlp import PlainActivation
from sapwood_worker.model.layers.rotary import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
    inverse_frequencies,
    yarn_magnitude,
)
from sapwood_worker.model.layers.sparse.sparse_mlp import SharedExpert, SparseConfig

ROPE_DIVISORS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (ROPE_DIVISORS, ROPE_LONG, ROPE_SHORT)
"""Tensors that divide rotary frequencies: always, in long contexts and in short ones."""

# Keys of GGUF files, after the architecture's name and a dot; they are read and written by these names.
_GGUF_SIZES = {
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "attention.head_count": "num_heads",
    "context_length": "max_position",
}  # fmt: skip
"""Those that each file has, and what the configuration calls them."""
_LAYERS_COUNT, _KV_HEADS, _EPSILON = "block_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"
_KEY_SIZE, _VALUE_SIZE, _ROTATED = "attention.key_length", "attention.value_length", "rope.dimension_count"
_FINAL_SOFTCAP, _THETA = "final_logit_softcapping", "rope.freq_base"
_SCALING, _FACTOR, _ORIGINAL = "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"
_MAGNITUDE, _BETA_FAST, _BETA_SLOW = (
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)

_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3
"""The files' numbers for the score functions of experts."""


# Settings of a file that note which of them are read, so that unread ones can be refused.


@dataclass(slots=True)
class Reads:
    """What was read of a file.

    Attributes:
        names: The settings; the name of one inside an object follows the object's name and a dot.
        last: The latest.
    """

    names: set[str] = field(default_factory=set)
    last: str = ""


class Settings(Mapping[str, Any]):
    """Settings as a JSON object has them. To look one up is to read it; to list them is not.

    Args:
        values: The settings.
        reads: Where names of settings that are read go.
        prefix: What comes before the names.
    """

    def __init__(self, values: Mapping[str, Any], reads: Reads | None = None, prefix: str = "") -> None:
        self._values, self._prefix = values, prefix
        self.reads = Reads() if reads is None else reads

    def __getitem__(self, key: str) -> Any:
        name = self._prefix + key
        self.reads.names.add(name)
        self.reads.last = name
        value = self._values[key]
        return Settings(value, self.reads, f"{name}.") if isinstance(value, dict) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)

    def but(self, changes: Mapping[str, Any]) -> Settings:
        """These settings with changes."""
        return Settings({**self._values, **changes}, self.reads, self._prefix)

    def over(self, defaults: Mapping[str, Any]) -> Settings:
        """The defaults, overridden by these settings unless they are null."""
        given = {key: value for key, value in self._values.items() if value is not None}
        return Settings({**defaults, **given}, self.reads, self._prefix)

    def same(self, first: str, second: str) -> bool:
        """Whether two settings are there and say the same. Reads neither."""
        return first in self._values and self._values[first] == self._values.get(second)

    def idle(self, *names: str) -> None:
        """Notes as read what says nothing here, since another setting turns it off."""
        self.reads.names.update(self._prefix + name for name in names)

    def flat(self) -> dict[str, Any]:
        """All settings by their names. Reads none."""
        found: dict[str, Any] = {}
        for key, value in self._values.items():
            found[self._prefix + key] = value
            if isinstance(value, dict):
                found |= Settings(value, self.reads, f"{self._prefix}{key}.").flat()
        return found

    def unread(self) -> dict[str, Any]:
        """The names of settings that have a value and were not read."""
        found: dict[str, Any] = {}
        for key, value in self._values.items():
            name = self._prefix + key
            if says_nothing(value):
                continue
            if name not in self.reads.names:
                found[name] = value
            elif isinstance(value, dict):
                found |= Settings(value, self.reads, f"{name}.").unread()
        return found


# Settings that count something, of ``config.json`` or a GGUF file: each has to be a whole number, and not too low.


_SIZES = (
    "hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
_EXPERTS = "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"
_OF_EXPERTS = (
    "num_experts_per_tok", "moe_k", "moe_intermediate_size", "n_group", "topk_group", "moe_layer_freq", "decoder_sparse_step",
    "moe_layer_interval", "interleave_moe_layer_step", "no_rope_layer_interval",
)  # fmt: skip
_LAYERS = ("num_hidden_layers", "block_count", "num_nextn_predict_layers")
MOST_LAYERS, MOST = 4096, 2**31 - 1
"""The most layers, and the most of anything else: more are no model, and would take the machine's memory."""
_SHARED = "shared_expert_intermediate_size"
"""Of families that have a default of it. Files of Qwen3-Coder, whose family does not read it, say 0: there is no such expert."""
_MAY_BE_NONE = (
    "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers",
)  # fmt: skip
"""The number of these may be 0."""


def check_counts(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raises ValueError if a setting of ``config.json`` that is there cannot be a number of something; names it.

    Args:
        values: The settings.
        defaults: The family's, which tell whether it has experts: files of others may say that there are 0.
    """
    least = dict.fromkeys(_SIZES, 1)
    if not defaults.keys().isdisjoint(_EXPERTS):
        least |= dict.fromkeys((*_EXPERTS, *_OF_EXPERTS), 1) | dict.fromkeys(_MAY_BE_NONE, 0)
        if _SHARED in defaults:
            least[_SHARED] = 1
    for name in values.keys() & least.keys():
        check_count(name, values[name], least[name])


def check_count(name: str, value: Any, least: int) -> None:
    """Raises ValueError if a setting's value is no whole number from ``least`` on, or more than any model has; names it."""
    whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1
    if not whole or value < least:
        raise ValueError(f"{name} is {value!r:.60}; it can be a whole number from {least} on")
    most = MOST_LAYERS if name.endswith(_LAYERS) else MOST
    if value > most:
        raise ValueError(f"{name} is {value!r:.60}; it can be {most} at most")


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
        """The file's name of a setting."""
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
        sizes: dict[str, Any] = {ours: count(key) for key, ours in _GGUF_SIZES.items()}
        heads, layers = sizes["num_heads"], self.layers
        if head_dim is None:
            head_dim = count(_KEY_SIZE, sizes["hidden_size"] // heads)
            if count(_VALUE_SIZE, head_dim) != head_dim:
                raise ValueError("keys and values of different size are not supported")
        rotated = count(_ROTATED, head_dim)
        if rotated != head_dim and not partly_rotated:
            raise ValueError("rotary embedding of part of a head is not supported")
        return ModelConfig(
            **sizes,
            architecture=self.architecture,
            vocab_size=self.vocabulary,
            num_layers=layers,
            num_kv_heads=count(_KV_HEADS, heads),
            head_dim=head_dim,
            rms_norm_eps=float(get(_EPSILON)),
            ropes=(replace(self.rope(10_000.0), rotated=None if rotated == head_dim else rotated),) * layers,
            windows=(None,) * layers,
            activation="silu",
            tie_word_embeddings="output.weight" not in tensors,
            attention_scale=head_dim**-0.5,
            final_softcap=self.file.metadata.get(self.named(_FINAL_SOFTCAP)) and get(_FINAL_SOFTCAP),
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_up.bias" in tensors,
        )

    def experts(self, *, renormalise: bool, shared: SharedExpert | None = None, sigmoid: bool = False) -> SparseConfig:
        """The mixtures of experts, in the layers that have a router. Groups are chosen by their two best if scores are sigmoids.

        Args:
            renormalise: Whether a token's weights sum to one, where the file does not say.
            shared: The expert of all tokens.
            sigmoid: Whether scores are sigmoids, regardless of the file.

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
        blocks, drafts = self.count(_LAYERS_COUNT), self.count("nextn_predict_layers", 0, least=0)
        check_count(f"{self.named('block_count')} without nextn_predict_layers", blocks - drafts, 1)
        return blocks - drafts

    def rope(self, theta: float) -> RopeConfig:
        """The rotary embedding, with the base ``theta`` where the file does not say.

        Raises:
            KeyError: Its factor is missing.
            ValueError: Its kind is not supported.
        """
        theta = float(self.get(_THETA, theta))
        divisors = self.rope_tensors.get(ROPE_DIVISORS)
        # The factor's old name; 0: there is none. Without a type it is linear, as llama.cpp takes it.
        factor = float(self.get(_FACTOR, 0.0)) or float(self.get("rope.scale_linear", 0.0))
        kind = self.get(_SCALING, "linear")
        magnitude = float(self.get(_MAGNITUDE, 1.0)) * float(self.get("rope.scaling.yarn_attn_factor", 1.0))
        if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
            return RopeConfig(theta, None if magnitude == 1.0 else LinearScaling(1.0, magnitude), divisors=divisors)
        if kind == "linear":
            return RopeConfig(theta, LinearScaling(factor, magnitude), divisors=divisors)
        if kind == "longrope":  # two lists of divisors, which are tensors
            return RopeConfig(theta, divisors=divisors)
        if kind != "yarn":
            raise ValueError(f"rotary embedding scaling {kind!r} is not supported (linear, yarn and longrope are)")
        if not factor:
            raise KeyError(self.named(_FACTOR))
        if (extrapolated := float(self.get("rope.scaling.yarn_ext_factor", 1.0))) != 1.0:
            raise ValueError(f"{self.named('rope.scaling.yarn_ext_factor')} {extrapolated} is not supported (1 is)")
        original = self.count(_ORIGINAL, self.count("context_length"))
        fast, slow = float(self.get(_BETA_FAST, 32.0)), float(self.get(_BETA_SLOW, 1.0))
        scaling = YarnScaling(factor, original, fast, slow, magnitude * yarn_magnitude(factor))
        return RopeConfig(theta, scaling, divisors=divisors)

    @property
    def vocabulary(self) -> int:
        """Tokens: rows of the embedding. Raises KeyError or ValueError if the file has none."""
        table = self.file.tensors["token_embd.weight"]
        if len(table.shape) != 2:
            raise ValueError(f"tensor token_embd.weight has shape {list(table.shape)}")
        return table.shape[0]


def gguf_llama(config: ModelConfig) -> dict[str, Any]:
    """The settings of a Llama's GGUF file, which :meth:`GgufValues.llama` reads: key after the architecture's name -> value.

    What it cannot say it leaves out, so compare the configuration with the one that is read from the file.
    """
    settings: dict[str, Any] = {key: getattr(config, ours) for key, ours in _GGUF_SIZES.items()}
    settings |= {
        _LAYERS_COUNT: config.num_layers,
        _KV_HEADS: config.num_kv_heads,
        _KEY_SIZE: config.head_dim,
        _VALUE_SIZE: config.head_dim,
        _EPSILON: float(config.rms_norm_eps),
        "vocab_size": config.vocab_size,
    }
    if config.final_softcap is not None:
        settings[_FINAL_SOFTCAP] = float(config.final_softcap)
    rope = next((each for each in config.ropes if each is not None), None)
    return settings if rope is None else settings | gguf_rope(rope, config.head_dim)


def gguf_rope(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    """The settings of a rotary embedding, which :meth:`GgufValues.rope` reads; llama3's are a tensor (:func:`gguf_divisors`)."""
    settings: dict[str, Any] = {_THETA: float(rope.theta), _ROTATED: rope.rotated or head_dim}
    match rope.scaling:
        case LinearScaling(factor):
            settings |= {_SCALING: "linear", _FACTOR: float(factor)}
        case YarnScaling() as yarn:
            settings |= {_SCALING: "yarn", _FACTOR: float(yarn.factor), _ORIGINAL: yarn.original_max_position}
            settings |= {_BETA_FAST: float(yarn.beta_fast), _BETA_SLOW: float(yarn.beta_slow)}
            settings |= {_MAGNITUDE: yarn.magnitude / yarn_magnitude(yarn.factor)}
    return settings


def gguf_divisors(rope: RopeConfig, head_dim: int) -> tuple[float, ...] | None:
    """The numbers of the tensor ``ROPE_DIVISORS``; None: the rotary embedding has none."""
    if not isinstance(rope.scaling, Llama3Scaling):
        return rope.divisors
    plain = inverse_frequencies(rope.rotated or head_dim, replace(rope, scaling=None), 1)
    return tuple((plain / rope.scaling.scaled(plain, rope.theta, 1)).tolist())


# The settings in ``config.json`` of a Hugging Face model, and the parts that all families read alike.


_ACTIVATIONS: dict[str, Gate] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


_PLAIN_ACTIVATIONS: dict[str, PlainActivation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


@dataclass(frozen=True, slots=True)
class HfValues:
    """The settings of a model.

    Attributes:
        family: The family's name.
        given: The settings in the file.
        values: The settings with the family's defaults for those that the file leaves out.
        neighbours: Whether rotary embeddings turn neighbours in a head together.
    """

    family: str
    given: Settings
    values: Settings
    neighbours: bool = False

    def interleaved(self) -> HfValues:
        """These settings for a family whose rotary embeddings turn neighbours in a head together."""
        return replace(self, neighbours=True)

    def named(self, names: Mapping[str, str]) -> HfValues:
        """These settings under the names that the family has for them.

        Args:
            names: Our name -> the family's; a number of layers, heads or the like.

        Raises:
            KeyError: One is missing.
            ValueError: One is no whole number above 0.
        """
        found = {ours: self.values[theirs] for ours, theirs in names.items()}
        for ours, theirs in names.items():
            check_count(theirs, found[ours], 1)
        return replace(self, values=self.values.but(found))

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return int(self.values["num_hidden_layers"])

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        values = self.values
        return int(values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"])

    def llama(self, *, gated: bool = True) -> ModelConfig:
        """The configuration that the settings give a Llama; families that are like it change what differs.

        Args:
            gated: Whether ``hidden_act`` is the activation of a gate.

        Raises:
            KeyError: A setting is missing.
            ValueError: One is not supported.
        """
        values = self.values
        heads = int(values["num_attention_heads"])
        head_dim = self.head_dim
        if values.get("use_bidirectional_attention"):
            raise ValueError("use_bidirectional_attention is not supported")
        if values.get("is_causal") is False:
            raise ValueError("is_causal false is not supported: tokens see those before them alone")
        bias = bool(values.get("attention_bias", False))
        rope = self.rope(values.get("rope_parameters") or values.get("rope_scaling"), float(values["rope_theta"]))
        return ModelConfig(
            architecture=self.family,
            vocab_size=int(values["vocab_size"]),
            hidden_size=int(values["hidden_size"]),
            intermediate_size=int(values["intermediate_size"]),
            num_layers=self.layers,
            num_heads=heads,
            num_kv_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            max_position=longest_position(values),
            ropes=(rope,) * self.layers,
            windows=(None,) * self.layers,
            activation=self.activation("hidden_act") if gated else "silu",
            tie_word_embeddings=bool(values["tie_word_embeddings"]),
            attention_scale=head_dim**-0.5,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bool(values.get("mlp_bias", False)),
        )

    def plain_activation(self, key: str) -> PlainActivation:
        """The activation of an MLP without a gate that a setting names.

        Raises:
            KeyError: The setting is missing.
            ValueError: It is not supported.
        """
        name = self.values[key]
        if name not in _PLAIN_ACTIVATIONS:
            raise ValueError(f"{key}: activation {name!r:.60} is not supported ({', '.join(_PLAIN_ACTIVATIONS)} are)")
        return _PLAIN_ACTIVATIONS[name]

    def activation(self, key: str) -> Gate:
        """The activation that a setting names; ``silu`` if it names none.

        Raises:
            ValueError: It is not supported.
        """
        name = self.values.get(key, "silu")
        if name not in _ACTIVATIONS:
            raise ValueError(f"{key}: activation {name!r} is not supported ({', '.join(_ACTIVATIONS)} are)")
        return _ACTIVATIONS[name]

    def windows(self, kinds: Sequence[str]) -> tuple[int | None, ...]:
        """Each layer's window, by the kinds of layers as ``layer_types`` has them.

        Raises:
            ValueError: There are more or fewer than layers.
        """
        if len(kinds) != self.layers:
            raise ValueError(f"layer_types has {len(kinds)} entries for {self.layers} layers")
        window = int(self.values["sliding_window"])
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def one_window(self) -> tuple[int | None, ...]:
        """The windows of layers that all have the same. The file may say null, which is not the default."""
        window = self.given.get("sliding_window", self.values.get("sliding_window"))
        return (None if window is None else int(window),) * self.layers

    def rope(self, given: Mapping[str, Any] | None, theta: float) -> RopeConfig:
        """A rotary embedding.

        Args:
            given: ``rope_scaling``, or ``rope_parameters`` of newer files; None: there is none.
            theta: The base if ``given`` has none.

        Raises:
            ValueError: Its kind is not supported.
        """
        return read_rope(given, theta, self.values, self.head_dim, interleaved=self.neighbours)


# Rotary position embedding, from ``rope_parameters`` of ``config.json``, or ``rope_scaling`` of older files.


def read_rope(
    given: Mapping[str, Any] | None,
    theta: float,
    values: Mapping[str, Any],
    head_dim: int,
    *,
    interleaved: bool = False,
) -> RopeConfig:
    """A rotary embedding.

    Args:
        given: Its settings; None: there are none.
        theta: The base if ``given`` has none.
        values: The model's settings.
        head_dim: Elements of a head.
        interleaved: Whether the family turns neighbours together.

    Raises:
        KeyError: A setting is missing.
        ValueError: One is not supported; names it.
    """
    given = given or {}
    if isinstance(given, Settings):  # three positions of a token, which are the same in text
        given.idle("mrope_section", "mrope_interleaved")
    part = float(given.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)))
    rotated = int(head_dim * part)
    if not 0 < rotated <= head_dim or rotated % 2:
        raise ValueError(f"partial_rotary_factor {part} of heads of {head_dim} elements is not supported")
    kind = given.get("rope_type", given.get("type", "default"))
    if given.get("type", kind) not in (kind, "mrope"):
        raise ValueError(f"rope_scaling says both rope_type {kind!r} and type {given['type']!r}")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"rope_scaling: rotary embedding type {kind!r} is not supported ({', '.join(_KINDS)} are)")
    return RopeConfig(
        float(given.get("rope_theta", theta)),
        _KINDS[kind](given, values, rotated // 2),
        rotated=None if rotated == head_dim else rotated,
        interleaved=interleaved,
        sections=_sections(given.get("mrope_section"), rotated // 2),
        mixed=given.get("mrope_interleaved") is True,
    )


def _sections(given: Any, pairs: int) -> tuple[int, ...]:
    """The pairs for each of three axes; empty: the setting does not say, or says it of heads of another size."""
    if not isinstance(given, list) or len(given) != _AXES or not all(isinstance(each, int) for each in given):
        return ()
    return tuple(given) if min(given) >= 0 and sum(given) == pairs else ()


_AXES = 3
"""Time, height and width."""


def longest_position(values: Mapping[str, Any]) -> int:
    """The longest context: ``max_position_embeddings``, or what yarn makes of a file that gives the length before scaling."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    longest = int(values["max_position_embeddings"])
    if given.get("rope_type", given.get("type")) != "yarn" or given.get("factor") is None:
        return longest
    return max(longest, int(_original(given, values) * float(given["factor"])))


def _original(given: Mapping[str, Any], values: Mapping[str, Any]) -> int:
    """The context length before scaling."""
    name = "original_max_position_embeddings"
    return int(given.get(name) or values.get(name) or values["max_position_embeddings"])


def _default(given: Mapping[str, Any], values: Mapping[str, Any], pairs: int) -> None:
    return None


def _linear(given: Mapping[str, Any], values: Mapping[str, Any], pairs: int) -> RopeScaling:
    return LinearScaling(float(given["factor"]))


def _llama3(given: Mapping[str, Any], values: Mapping[str, Any], pairs: int) -> RopeScaling:
    factor, low, high = (float(given[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    return Llama3Scaling(factor, low, high, _original(given, values))


def _yarn(given: Mapping[str, Any], values: Mapping[str, Any], pairs: int) -> RopeScaling:
    original = _original(given, values)
    factor = float(given.get("factor") or int(values["max_position_embeddings"]) / original)
    magnitude, scale, whole = (given.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if magnitude is None:
        magnitude = yarn_magnitude(factor)
        if scale and whole:
            magnitude = yarn_magnitude(factor, scale) / yarn_magnitude(factor, whole)
    fast, slow = float(given.get("beta_fast") or 32), float(given.get("beta_slow") or 1)
    return YarnScaling(factor, original, fast, slow, float(magnitude), bool(given.get("truncate", True)))


def _longrope(given: Mapping[str, Any], values: Mapping[str, Any], pairs: int) -> RopeScaling:
    original = _original(given, values)
    short, long = (tuple(map(float, given[name])) for name in ("short_factor", "long_factor"))
    for name, divisors in (("short_factor", short), ("long_factor", long)):
        if len(divisors) != pairs:
            raise ValueError(f"rope_scaling.{name} has {len(divisors)} numbers for {pairs} pairs of a head")
    factor, magnitude = given.get("factor"), given.get("attention_factor")
    if factor is None:
        factor = int(values["max_position_embeddings"]) / original
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(short, long, original, float(magnitude))


_KINDS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any], int], RopeScaling | None]] = {
    "default": _default,
    "mrope": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # its name in the first files of Phi-3
}


# What files of a model with latent attention (MLA) say of it: ``config.json`` by DeepSeek's names, GGUF by llama.cpp's.


LATENT_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "tie_word_embeddings": False, "rope_theta": 10_000.0, "rope_interleave": True,
}  # fmt: skip
"""DeepSeek's defaults."""
LATENT_GGUF_NAMES = {
    "ffn_norm": "post_attention_layernorm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
"""Name of a layer's tensor in GGUF files -> its name in Hugging Face's checkpoints."""
_LOG_FACTOR = 0.1
"""``yarn_log_multiplier`` of GGUF files is ``mscale_all_dim`` times this."""


def read_latent(found: HfValues) -> ModelConfig:
    """The configuration of a Llama whose attention is latent.

    Raises:
        KeyError: A setting is missing.
        ValueError: One is not supported.
    """
    values = found.values
    if values.get("attention_bias"):
        raise ValueError("attention_bias is not supported with latent attention")
    latent = LatentConfig(
        kv_lora_rank=int(values["kv_lora_rank"]),
        qk_nope_head_dim=int(values["qk_nope_head_dim"]),
        qk_rope_head_dim=int(values["qk_rope_head_dim"]),
        v_head_dim=int(values["v_head_dim"]),
        # A file may well say null, which is not the default.
        q_lora_rank=found.given.get("q_lora_rank", values.get("q_lora_rank")),
        rope_interleave=bool(values["rope_interleave"]),
    )
    rotary = replace(found, values=values.but({"head_dim": latent.qk_rope_head_dim}))
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    return replace(
        rotary.llama(),
        num_kv_heads=1,
        attention_scale=latent.query_dim**-0.5 * _temper(rope) ** 2,
        latent=latent,
        draft_layers=int(values.get("num_nextn_predict_layers", 0)),
    )


def read_gguf_latent(values: GgufValues) -> ModelConfig:
    """The same of a GGUF file.

    Raises:
        KeyError: A setting is missing.
        ValueError: One is not supported.
    """
    get, count = values.get, values.count
    rotated = count("rope.dimension_count")
    # Newer files say as the size of keys and values what the cache holds.
    queries = count("attention.key_length_mla", count("attention.key_length"))
    check_count(f"a key's size without {values.named('rope.dimension_count')}", queries - rotated, 1)
    latent = LatentConfig(
        kv_lora_rank=count("attention.kv_lora_rank"),
        qk_nope_head_dim=queries - rotated,
        qk_rope_head_dim=rotated,
        v_head_dim=count("attention.value_length_mla", count("attention.value_length")),
        q_lora_rank=count("attention.q_lora_rank", 0, least=0) or None,
    )
    config = values.llama(head_dim=rotated)
    [rope] = set(config.ropes)
    scale, share = latent.query_dim**-0.5, float(get("rope.scaling.yarn_log_multiplier", 0.0)) / _LOG_FACTOR
    if rope is not None and isinstance(rope.scaling, YarnScaling) and share:
        # They do not say what cosines and sines are multiplied by: in all published models it is 1.
        rope = replace(rope, scaling=replace(rope.scaling, magnitude=1.0))
        scale *= yarn_magnitude(float(get("rope.scaling.factor")), share) ** 2
    return replace(config, num_kv_heads=1, attention_scale=scale, latent=latent, ropes=(rope,) * config.num_layers)


def _temper(rope: Mapping[str, Any]) -> float:
    """The factor of queries and keys for yarn's long contexts."""
    factor, share = float(rope.get("factor", 1.0)), rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", rope.get("type", "default")) == "default" or factor <= 1.0 or not share:
        return 1.0
    return yarn_magnitude(factor, float(share))


# How a mixture's files say that experts are chosen; contradictions are refused by the files' names.


def read_routing(
    values: Mapping[str, Any], experts: str, chosen: str, groups: tuple[str, str] | None = None, **rest: Any
) -> Routing:
    """The routing that settings give.

    Args:
        values: The settings.
        experts: Which of them is the number of experts.
        chosen: The setting's name for the number of experts that a token goes to.
        groups: Which are the number of groups and of those that a token chooses; None: there is one group.
        **rest: What else :class:`Routing` takes.

    Raises:
        KeyError: A setting is missing.
        ValueError: The numbers do not fit together; names the settings.
    """
    names = {"experts": experts, "chosen": chosen, **dict(zip(("groups", "chosen_groups"), groups or (), strict=False))}
    numbers: dict[str, Any] = {part: int(values[name]) for part, name in names.items()}
    try:
        return Routing(**numbers, **rest)
    except ValueError as error:
        said = ", ".join(f"{name} {numbers[part]}" for part, name in names.items())
        raise ValueError(f"{said}: {error}") from error
