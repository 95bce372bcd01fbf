"""Where a named tensor of a checkpoint goes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """A tensor to be filled from a checkpoint.

    Attributes:
        target: A parameter or the part of a fused one; written in place.
        norm: A norm's weight: initial value 1, and where the file stores w of 1 + w, 1 is added.
    """

    target: Tensor
    norm: bool = False


WeightSlots = dict[str, WeightSlot]
"""Hugging Face tensor name -> slot."""
