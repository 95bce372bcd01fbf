"""The types of a device's operations: protocols of the objects called in each step, and plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from sapwood_kernels.kv_destination import KVDestination

Gate = Literal["silu", "gelu_tanh"]
"""The activation of a gated MLP."""
Float8 = tuple[Tensor, Tensor]
"""float8_e4m3fn values and their scales, as ``reference.quantise_rows`` and ``quantise_tensor`` return them."""
GROUP = 128
"""Numbers of a row that share a scale where scales are grouped."""


class Norm(Protocol):
    """An RMSNorm: computed by calling it, or by code that reads its weight (float32) and eps."""

    eps: float

    @property
    def weight(self) -> Tensor: ...

    def __call__(self, x: Any, /) -> Any: ...


class OneRow(Protocol):
    """``gate(norm(x) @ weight.T + bias) + add_to`` for a single row x [1, K], as ``triton_gemv.gemv`` computes it."""

    def __call__(
        self,
        x: Tensor,
        *,
        norm: tuple[Tensor, float] | None = ...,
        gate: Gate | None = ...,
        add_to: Tensor | None = ...,
        dtype: torch.dtype | None = ...,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class FewRows:
    """A product that takes a gated activation after it and the sum with a residual along.

    Attributes:
        product: As for :class:`OneRow`, for x [T, K].
        most: Largest T.
        norm: Largest T with which it takes the norm before it along, too.
    """

    product: OneRow
    most: int
    norm: int


class ManyRowsProduct(Protocol):
    """``gate(norm(x)) @ weight.T + add_to`` for x [T, K], or [T, 2 K] with a gated activation ``gate`` of the input.

    ``add_to`` [T, N] becomes the sum and is returned.
    """

    def __call__(
        self,
        x: Tensor,
        /,
        *,
        norm: tuple[Tensor, float] | None = ...,
        gate: Gate | None = ...,
        add_to: Tensor | None = ...,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class ManyRows:
    """A product of more rows than :class:`FewRows` has, which takes along what is before it and the sum with a residual.

    Attributes:
        product: What computes it.
        most: Largest T.
    """

    product: ManyRowsProduct
    most: int


class StoredProduct(Protocol):
    """``gate(norm(x) @ weight.T)`` of float32 rows [T, K] by matrices that are read as they are stored, outputs side by side.

    Norm and gate are computed for few rows only: as many as ``native.products.SMALL``.
    """

    def __call__(self, x: Tensor, /, *, norm: tuple[Tensor, float] | None = ..., gate: Gate | None = ...) -> Tensor: ...

    def rows(self, ids: Tensor, /) -> Tensor:
        """Rows of the first matrix, float32: int64 [T] -> [T, K]."""
        ...


StoreHeads = Callable[[Tensor, Tensor, Tensor, KVDestination], Tensor]
"""All between the QKV projection and attention: norms and rotates query and key heads, writes keys and values to the cache, and
returns the query heads [T, H, D]. It takes the projection [T, (H + 2K) * D], where query, key and value heads lie side by side,
and cos and sin [T, 1, D] as ``reference.rope`` has them."""


StoreLatent = Callable[[Tensor, Tensor, Tensor, Tensor, KVDestination], Tensor]
"""All between the projections and latent attention: norms and rotates vectors, writes them to the cache, and returns the rotated
queries as a new tensor. It takes vectors [T, R + E] and queries [T, H, N + E], the rows of both contiguous, and cos and sin
[T, 1, E]."""


@dataclass(frozen=True, slots=True)
class StoreAbsorbed:
    """:data:`StoreLatent` and ``LatentHeads.absorb`` of the queries that it returns, in one.

    Attributes:
        store: Does both; it takes the arguments of :data:`StoreLatent` and returns [T, H, R + E].
        most: Largest T.
    """

    store: StoreLatent
    most: int


class ExpertSum(Protocol):
    """The weighted sum of each token's experts, as ``experts.reference.expert_sum`` computes it, by weights of its own.

    Added to ``add_to`` in place if that is given, which is returned then.
    """

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, /, *, add_to: Tensor | None = None) -> Tensor: ...


class RouteTokens(Protocol):
    """Each token's experts, integers [T, k], and their weights, float32 [T, k], of a router's logits, float32 [T, E], or of parts
    of them, [T, S, E]. They are a step's rows from ``first`` on, which tells those that only pad it."""

    def __call__(self, logits: Tensor, /, first: int = 0) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class LatentProducts:
    """Kernels that replace ``LatentHeads.absorb``, ``LatentHeads.values`` and ``LatentHeads.expand``.

    Attributes:
        absorb: The first.
        values: The second.
        most: Largest T with which these two are called.
        expand: The third.
    """

    absorb: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor]
    most: int
    expand: Callable[[Tensor, slice, bool], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class NormedLogits:
    """A router's product of few rows with the norm before it.

    Attributes:
        product: Of x [T, K], the norm's weight and eps: the normed rows [T, K], and their logits, float32 [T, E].
        most: Largest T.
    """

    product: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
    most: int
