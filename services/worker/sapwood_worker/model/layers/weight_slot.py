"""The places that a checkpoint's tensors are loaded into."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """A tensor to be filled from a checkpoint.

    Attributes:
        target: A parameter or the part of a fused one; written in place.
        norm: Whether it is a norm's weight: dummy weights are 1, and 1 is added if the file stores the w of 1 + w.
    """

    target: Tensor
    norm: bool = False


WeightSlots = dict[str, WeightSlot]
"""Hugging Face tensor name -> slot."""
