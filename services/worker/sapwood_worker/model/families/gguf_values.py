"""The settings in the metadata of a GGUF file.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, with each architecture's conventions as llama.cpp has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sapwood_common.models.gguf_file import GgufFile
from sapwood_worker.model.layers.rotary import RopeConfig


@dataclass(frozen=True, slots=True)
class GgufValues:
    """The settings of a model.

    Attributes:
        file: The open file.
        architecture: Prefix of the keys.
        rope_divisors: The values of its tensor ``rope_freqs.weight``, if it has one.
    """

    file: GgufFile
    architecture: str
    rope_divisors: tuple[float, ...] | None = None

    def get(self, key: str, default: Any = None) -> Any:
        """A setting.

        Raises:
            KeyError: The file does not say, and there is no default.
        """
        name = f"{self.architecture}.{key}"
        return self.file.metadata[name] if default is None else self.file.metadata.get(name, default)

    def rope(self, theta: float) -> RopeConfig:
        """The rotary embedding, with the base ``theta`` where the file does not say.

        Raises:
            ValueError: Its kind is not supported.
        """
        theta = float(self.get("rope.freq_base", theta))
        kind = self.get("rope.scaling.type", "none")
        if kind == "linear":
            factor = float(self.get("rope.scaling.factor"))
            return RopeConfig(theta, "linear", factor=factor, divisors=self.rope_divisors)
        if kind == "none":
            return RopeConfig(theta, divisors=self.rope_divisors)
        raise ValueError(f"rotary embedding scaling {kind!r} is not supported (linear is)")
