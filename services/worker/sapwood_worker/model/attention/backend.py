"""The protocols of an attention backend: it plans each step once, and all layers use the plan.

In shapes: T tokens of a step, B requests, H query heads, K key/value heads, D elements of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sapwood_worker.model.pools.device_pool import KVDestination


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The constants of one layer's attention.

    Attributes:
        index: The pool's layer that it reads and writes.
        scale: Factor of query-key products.
        window: Positions a token sees, itself included; None for all before it.
        softcap: Products become ``softcap * tanh(product / softcap)``; None: they stay.
    """

    index: int
    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which tokens of a step belong to which request, and where the cache keeps their keys and values. On the host.

    Attributes:
        query_starts: int64 [B + 1]: request i's tokens are rows ``query_starts[i]`` .. ``query_starts[i + 1] - 1``; each
            has at least one.
        seq_lens: int64 [B]: keys of each request once this step's are written.
        page_table: int32 [B, P]: pages of each request in order; entries beyond its last page are undefined.
        cache_slots: int64 [T] on the device: where each token's key and value go.
    """

    query_starts: npt.NDArray[np.int64]
    seq_lens: npt.NDArray[np.int64]
    page_table: npt.NDArray[np.int32]
    cache_slots: Tensor


class AttentionPlan(Protocol):
    """A planned step. A layer either calls ``attend``, or writes to ``destination`` itself and calls ``attend_cached``."""

    def destination(self, layer: AttentionLayer) -> KVDestination:
        """Where a layer's keys and values of this step go."""
        ...

    def attend_cached(self, layer: AttentionLayer, query: Tensor) -> Tensor:
        """Attends over everything cached, this step's keys and values included: [T, H, D] -> [T, H * D], a new tensor."""
        ...


class AttentionBackend(Protocol):
    """One way to compute attention over the paged cache."""

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """Prepares a step. Does not mutate the batch; the plan is valid until the next call."""
        ...
