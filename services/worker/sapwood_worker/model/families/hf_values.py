"""The settings in ``config.json`` of a Hugging Face model, and the parts that all families read alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sapwood_kernels.ops.contracts import Gate
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.rope_values import longest_position, read_rope
from sapwood_worker.model.families.settings import Settings
from sapwood_worker.model.layers.rotary import RopeConfig

_ACTIVATIONS: dict[str, Gate] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
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
