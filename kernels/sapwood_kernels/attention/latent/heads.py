"""Latent attention (MLA): heads whose keys and values are made of one vector that the cache keeps of each token.

The vector is a latent part [R], which a matrix expands to every head's key [N] and value [V], and a rotary part [E], which is the
end of each head's key. There are two ways to the same result (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1):

* *absorbed*: the matrix goes into the query and into the result, so that attention reads the cached vectors alone, as a single
  key head of R + E whose first R are the value; 2R + E operations for each query, key and head
* *expanded*: the keys and values of all heads are made first, R (N + V) operations for each key and head; then only N + E + V

In shapes: H heads, T queries, M keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.attention.planned import PlannedAttention, StoredPages
from sapwood_kernels.ops.contracts import LatentProducts


@dataclass(frozen=True, slots=True, eq=False)
class LatentHeads:
    """The heads of a layer.

    Attributes:
        up: [H, N + V, R]: what expands the latent part.
        nope: Numbers of a key that are not rotated: N.
        few: Kernels for :meth:`absorb` and :meth:`values` of few tokens, and for :meth:`expand`; None: there are none.
    """

    up: Tensor
    nope: int
    few: LatentProducts | None = None

    @property
    def rank(self) -> int:
        """Numbers of the latent part: R."""
        return self.up.shape[2]

    @property
    def value_dim(self) -> int:
        """Numbers of a head's value: V."""
        return self.up.shape[1] - self.nope

    @property
    def expands_from(self) -> int:
        """Queries of the same keys from which expanding takes fewer operations; 0: it never does."""
        saved = 2 * self.rank - self.up.shape[1]
        return self.rank * self.up.shape[1] // saved + 1 if saved > 0 else 0

    def absorb(self, query: Tensor) -> Tensor:
        """Queries [T, H, N + E] as they meet cached vectors: [T, H, R + E]."""
        if self.few is not None and len(query) <= self.few.most:
            return self.few.absorb(query)
        latent = torch.bmm(query[..., : self.nope].transpose(0, 1), self.up[:, : self.nope])
        return torch.cat((latent.transpose(0, 1), query[..., self.nope :]), -1)

    def values(self, latent: Tensor) -> Tensor:
        """Expands attention's sums of latent parts, [T, H, R], to the heads' values: [T, H, V]."""
        if self.few is not None and len(latent) <= self.few.most:
            return self.few.values(latent)
        return torch.bmm(latent.transpose(0, 1), self.up[:, self.nope :].transpose(1, 2)).transpose(0, 1)

    def expand(self, stored: Tensor, heads: slice, *, wide: bool = False) -> tuple[Tensor, Tensor]:
        """Cached vectors [M, R + E] as keys [M, h, N + E] and values [M, h, V] of some heads; ``wide``: values [M, h, N + E],
        filled up with zeros."""
        if self.few is not None:
            return self.few.expand(stored, heads, wide)
        up = self.up[heads]
        both = (stored[:, : self.rank] @ up.flatten(0, 1).t()).view(len(stored), *up.shape[:2])
        rotary = stored[:, None, self.rank :].expand(-1, len(up), -1)
        key, value = torch.cat((both[..., : self.nope], rotary), -1), both[..., self.nope :]
        return key, F.pad(value, (0, key.shape[2] - self.value_dim)) if wide else value


class PlannedLatentAttention(PlannedAttention, Protocol):
    """A planned attention of absorbed queries."""

    def values(self, query: Tensor, cache: StoredPages, heads: LatentHeads) -> Tensor:
        """:meth:`LatentHeads.values` of what :meth:`run` gives: [T, H, V]."""
        ...
