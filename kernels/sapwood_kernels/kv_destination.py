"""Where a step's keys and values go in the cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sapwood_kernels import reference


@dataclass(frozen=True, slots=True)
class KVDestination:
    """Where a layer's keys and values of a step go.

    Attributes:
        keys: [P, page size, K, D], in any order except that D is last: the layer's key pages.
        values: The same, in the same order, for values.
        slots: int64 [T]: each token's slot: the page size times its page, plus its place there.
        scales: The divisors of keys and values when they are stored in a float8 cache.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor
    scales: tuple[float, float] = (1.0, 1.0)

    def store(self, key: Tensor, value: Tensor) -> None:
        """Writes the step's keys and values, [T, K, D] each, to their slots."""
        reference.store_kv(key, value, self.keys, self.values, self.slots, self.scales)

    def store_vectors(self, vectors: Tensor) -> None:
        """Writes the step's vectors [T, K, D] of a layer that keeps one vector for each token, used as key and as value."""
        reference.store_vectors(vectors, self.keys, self.slots, self.scales[0])
