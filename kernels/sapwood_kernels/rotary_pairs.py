"""Which numbers of a head rotary position embedding turns together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RotaryPairs:
    """The pairs of a head's numbers.

    Attributes:
        head_dim: Numbers of a head: D.
        rotated: How many of them, the first ones, are turned: R.
        interleaved: Whether pairs are neighbours (2 i, 2 i + 1); else (i, i + R / 2).
    """

    head_dim: int
    rotated: int
    interleaved: bool = False

    @property
    def are_halves(self) -> bool:
        """Whether each number of a head's first half is turned with that of the second."""
        return self.rotated == self.head_dim and not self.interleaved

    def partners(self) -> Tensor:
        """The partner with which each number of a head is turned, itself if it is not turned: int64 [D]."""
        at = torch.arange(self.head_dim)
        half = self.rotated // 2
        partner = at ^ 1 if self.interleaved else torch.where(at < half, at + half, at - half)
        return torch.where(at < self.rotated, partner, at)

    def spread(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of each number and of its partner.

        Args:
            cos: [..., R / 2], for each pair.
            sin: Likewise.

        Returns:
            Cosines [..., D], and sines, negated for the first number of a pair; 1 and 0 for what is not turned.
        """
        if self.interleaved:
            cos, sin = torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
        else:
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        if self.rotated == self.head_dim:
            return cos, sin
        rest = *cos.shape[:-1], self.head_dim - self.rotated
        return torch.cat((cos, cos.new_ones(rest)), dim=-1), torch.cat((sin, sin.new_zeros(rest)), dim=-1)
