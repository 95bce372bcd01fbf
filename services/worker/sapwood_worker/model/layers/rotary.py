"""Rotary position embedding: frequencies, and the angles of one step's positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sapwood_kernels.rotary_pairs import RotaryPairs
from sapwood_worker.model.layers.layer import Layer, LayerContext

# Scalings of rotary frequencies, for contexts longer than those that a model was first trained for.


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
        """Names the variant that depends on the longest served context: cached keys of another variant are not used. Empty: keys
        do not depend on it."""
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
        """The pair that makes ``turns`` turns within the original context."""
        return size * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """The factor of cosines and sines in a scaling by ``factor``, so that attention stays sharp; ``scale`` is DeepSeek's."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Divides each frequency by a number of its own, from one of two lists.

    The list must not change while keys are cached, so it is chosen by the longest served context, not by each request's length.
    Source: Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens", 2024.

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


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """How queries grow with their position p: by a factor of ``1 + factor * ln(1 + floor((p + first) / floor))``.

    Attributes:
        floor: Tokens after which it begins, and of each step of it.
        factor: How much.
        first: The number of the first position.

    Source: the attention of Llama 4 (``first`` is 1) and Ministral 3 (0), as transformers computes it.
    """

    floor: float
    factor: float
    first: float = 1.0

    def of(self, positions: Tensor) -> Tensor:
        """Integers [T] -> float32 [T, 1, 1]."""
        steps = torch.floor((positions.float() + self.first) / self.floor)
        return (torch.log1p(steps) * self.factor + 1.0)[:, None, None]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer.

    Attributes:
        theta: Base of the wavelengths.
        scaling: The change of the frequencies; None: they are not changed.
        divisors: One for each pair of elements, dividing its frequency; GGUF files state llama3 scaling that way.
        rotated: How many numbers of a head, the first ones, are turned; None: all.
        interleaved: Whether neighbouring numbers are rotated together, not numbers that lie half the rotated width apart.
        growth: How queries grow with their position; None: they do not.
        sections: How many pairs are turned by a token's position on each of three axes; empty: there is one axis.
        mixed: Whether pairs of the three axes alternate, as far as they go, instead of being blocks.
    """

    theta: float
    scaling: RopeScaling | None = None
    divisors: tuple[float, ...] | None = None
    rotated: int | None = None
    interleaved: bool = False
    growth: QueryGrowth | None = None
    sections: tuple[int, ...] = ()
    mixed: bool = False

    def pairs(self, head_dim: int) -> RotaryPairs:
        """Which numbers of a head are turned together."""
        return RotaryPairs(head_dim, self.rotated or head_dim, self.interleaved)


def axis_of_pairs(sections: tuple[int, ...], *, mixed: bool) -> Tensor:
    """int64 [pairs]: by which axis' position each pair is turned. Arguments as in :class:`RopeConfig`."""
    if not mixed:
        return torch.repeat_interleave(torch.arange(len(sections)), torch.tensor(sections))
    axes = torch.zeros(sum(sections), dtype=torch.int64)
    for axis, pairs in enumerate(sections):
        if axis:
            axes[axis : pairs * len(sections) : len(sections)] = axis
    return axes


class Angles(NamedTuple):
    """The rotary angles of a step's positions for one kind of layer.

    Attributes:
        cos: Cosines [T, 1, D], as ``DeviceOps.store_heads`` takes them.
        sin: Sines, likewise.
        growth: float32 [T, 1, 1]: a factor of each token's query; None: 1.
    """

    cos: Tensor
    sin: Tensor
    growth: Tensor | None = None


def inverse_frequencies(size: int, rope: RopeConfig, positions: int) -> Tensor:
    """Radians per position of each pair that is turned, float32 [size / 2].

    Args:
        size: How many numbers of a head are turned.
        rope: The kind of rotary embedding.
        positions: The longest context that is served, in tokens.
    """
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    if rope.scaling is not None:
        frequencies = rope.scaling.scaled(frequencies, rope.theta, positions)
    if rope.divisors is not None:
        frequencies = frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    return frequencies


class RotaryEmbedding(Layer):
    """Angles for given positions, once a step and shared by the layers.

    If steps can be captured, angles are looked up in a table of ``max_position`` rows, because there each kernel launch counts.
    Otherwise they are computed, which takes microseconds and no memory.

    Args:
        head_dim: Elements of a head.
        rope: The kind of rotary embedding.
        max_position: Positions are below it.
        context: Where and how it is built.
    """

    def __init__(self, head_dim: int, rope: RopeConfig, max_position: int, context: LayerContext) -> None:
        super().__init__()
        self._pairs = rope.pairs(head_dim)
        self._magnitude = 1.0 if rope.scaling is None else rope.scaling.magnitude
        self._growth = rope.growth
        self._dtype, self._ops = context.dtype, context.ops
        self._frequencies = inverse_frequencies(self._pairs.rotated, rope, max_position).to(context.device)
        self._axes = axis_of_pairs(rope.sections, mixed=rope.mixed).to(context.device) if rope.sections else None
        every = torch.arange(max_position, device=context.device)
        self._table = self._computed(every) if context.ops.captures else None

    def _computed(self, positions: Tensor) -> Tensor:
        if positions.dim() == 1:
            angles = torch.outer(positions.float(), self._frequencies)
        else:
            assert self._axes is not None, "positions on three axes, and no pairs for them"
            angles = positions.index_select(0, self._axes).T.float() * self._frequencies
        return torch.cat((angles.cos() * self._magnitude, angles.sin() * self._magnitude), dim=-1).to(self._dtype)

    def forward(self, positions: Tensor) -> Angles:
        """Integers [T], or [3, T] on three axes -> the angles of each."""
        growth = None if self._growth is None else self._growth.of(positions)
        if self._table is not None and positions.dim() == 1:
            return Angles(*self._ops.angles(self._table, positions, self._pairs), growth)
        cos, sin = self._computed(positions)[:, None].chunk(2, dim=-1)
        return Angles(*self._pairs.spread(cos, sin), growth)


class NoRotation(Layer):
    """The angles of layers whose heads know no position: all zero.

    Args:
        head_dim: Elements of a head.
        context: Where and how it is built.
        growth: How queries grow with their position; None: they do not.
    """

    def __init__(self, head_dim: int, context: LayerContext, growth: QueryGrowth | None = None) -> None:
        super().__init__()
        self._head_dim, self._dtype, self._growth = head_dim, context.dtype, growth

    def forward(self, positions: Tensor) -> Angles:
        """Cosines of 1 and sines of 0, which rotate nothing."""
        shape = len(positions), 1, self._head_dim
        cos = torch.ones(shape, dtype=self._dtype, device=positions.device)
        return Angles(cos, torch.zeros_like(cos), None if self._growth is None else self._growth.of(positions))
