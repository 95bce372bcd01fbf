"""Rotary position embedding: frequencies, and the angles of one step's positions.

Frequency scalings follow transformers' ``modeling_rope_utils`` (linear, llama3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sapwood_worker.model.layers.context import LayerContext
from sapwood_worker.model.layers.layer import Layer


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer.

    Attributes:
        theta: Base of the wavelengths.
        scaling: ``linear`` divides every frequency by ``factor``; ``llama3`` divides the low ones and blends between.
        factor: By how much ``scaling`` divides frequencies.
        low_freq_factor: llama3: wavelengths over ``original_max_position / low_freq_factor`` are divided by ``factor``.
        high_freq_factor: llama3: wavelengths under ``original_max_position / high_freq_factor`` stay as they are.
        original_max_position: llama3: the context length before scaling.
        divisors: One for each pair of elements, dividing its frequency; GGUF files state llama3 scaling that way.
    """

    theta: float
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    divisors: tuple[float, ...] | None = None


def inverse_frequencies(head_dim: int, rope: RopeConfig) -> Tensor:
    """Radians per position, float32 [head_dim / 2]."""
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.scaling == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling == "llama3":
        frequencies = _llama3(frequencies, rope)
    if rope.divisors is not None:
        frequencies = frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    low, high, length = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position
    # 1 for short wavelengths, which stay; 0 for long ones, which are divided; a ramp between.
    kept = ((length / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


class RotaryEmbedding(Layer):
    """Angles for given positions, looked up once a step and shared by the layers.

    Args:
        frequencies: float32 [head_dim / 2].
        max_position: Positions are below it; the table takes ``max_position * head_dim`` elements.
        context: Where and how it is built.
    """

    def __init__(self, frequencies: Tensor, max_position: int, context: LayerContext) -> None:
        super().__init__()
        positions = torch.arange(max_position, dtype=torch.float32, device=context.device)
        angles = torch.outer(positions, frequencies.to(context.device))
        table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(context.dtype)
        self.register_buffer("_table", table, persistent=False)
        self._table: Tensor

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Integers [T] -> cosines and sines, each [T, 1, head_dim], as ``DeviceOps.store_heads`` wants them."""
        cos, sin = self._table.index_select(0, positions)[:, None].chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
