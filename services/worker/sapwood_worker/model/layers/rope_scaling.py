"""Scalings of rotary frequencies, for contexts longer than those that a model was first trained for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class RopeScaling(Protocol):
    """A change of the frequencies."""

    @property
    def magnitude(self) -> float:
        """Factor of all cosines and sines."""
        ...

    def scaled(self, frequencies: Tensor, theta: float, positions: int) -> Tensor:
        """The changed frequencies.

        Args:
            frequencies: ``theta ** -(2 i / N)`` for each of the N / 2 pairs, float32.
            theta: Their base.
            positions: The longest context that is served, in tokens.
        """
        ...

    def variant(self, positions: int) -> str:
        """Names what depends on the longest context that is served: keys of another variant are not used. Empty: nothing."""
        ...


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Divides every frequency.

    Source: Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation", 2023.

    Attributes:
        factor: By how much.
        magnitude: Factor of cosines and sines.
    """

    factor: float
    magnitude: float = 1.0

    def scaled(self, frequencies: Tensor, theta: float, positions: int) -> Tensor:
        return frequencies / self.factor

    def variant(self, positions: int) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Divides low frequencies, and blends between those and the high ones. Source: Llama 3.1's model code, Meta, 2024.

    Attributes:
        factor: By how much.
        low_freq_factor: Wavelengths over ``original_max_position / low_freq_factor`` are divided.
        high_freq_factor: Wavelengths under ``original_max_position / high_freq_factor`` stay as they are.
        original_max_position: The context length before scaling.
        magnitude: Factor of cosines and sines.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int
    magnitude: float = 1.0

    def scaled(self, frequencies: Tensor, theta: float, positions: int) -> Tensor:
        wavelengths = 2 * math.pi / frequencies
        low, high, length = self.low_freq_factor, self.high_freq_factor, self.original_max_position
        # 1 for short wavelengths, which stay; 0 for long ones, which are divided; a ramp between.
        kept = ((length / wavelengths - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies

    def variant(self, positions: int) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Divides the pairs that turn seldom within the original context, and blends between those and the others.

    Source: Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023.

    Attributes:
        factor: By how much.
        original_max_position: The context length before scaling.
        beta_fast: Pairs that turn more often than this stay as they are.
        beta_slow: Pairs that turn less often are divided.
        magnitude: Factor of cosines and sines: :func:`yarn_magnitude` of the factor unless a model has another.
        truncate: Whether the pairs between which it blends are whole numbers.
    """

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    magnitude: float
    truncate: bool = True

    def scaled(self, frequencies: Tensor, theta: float, positions: int) -> Tensor:
        size = 2 * len(frequencies)
        first, last = (self._pair(turns, size, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        ramp = (torch.arange(len(frequencies), dtype=torch.float32) - first) / max(last - first, 0.001)
        divided = ramp.clamp(0, 1)
        return divided * frequencies / self.factor + (1 - divided) * frequencies

    def variant(self, positions: int) -> str:
        return ""

    def _pair(self, turns: float, size: int, theta: float) -> float:
        """The pair that turns so often within the original context."""
        return size * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """What a scaling by ``factor`` multiplies cosines and sines with, so that attention stays sharp; ``scale`` is DeepSeek's."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Divides each frequency by a number of its own, from one of two lists.

    Which list it is must not change while keys are cached, so it goes by the longest context that is served, not by each
    request's length. Source: Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens", 2024.

    Attributes:
        short: The list for contexts of up to ``original_max_position`` tokens.
        long: The list for longer ones.
        original_max_position: The context length before scaling.
        magnitude: Factor of cosines and sines.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    magnitude: float

    def scaled(self, frequencies: Tensor, theta: float, positions: int) -> Tensor:
        divisors = self.long if self.variant(positions) == "long" else self.short
        return frequencies / torch.tensor(divisors, dtype=torch.float32)

    def variant(self, positions: int) -> str:
        return "long" if positions > self.original_max_position else "short"
