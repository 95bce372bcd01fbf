"""The arguments of every kernel for attention over the paged cache: shapes, the kind of layer, and where keys lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What all layers of a model share.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        head_dim: Elements of a head.
        page_size: Tokens in a page.
        dtype: The dtype of queries.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Variant:
    """The settings that may differ between layers. The fields are arguments of ``reference.attention``; ``sinks`` says whether
    there are sinks."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: bool = False
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class SharedRuns:
    """Stretches of keys that several requests of a batch have in common, as a forest: who shares a run shares its parent, too.

    A run begins where its parent ends, or at the first key, and ends before the first of a request's new tokens.

    Attributes:
        order: int64 [B]: the requests, so that those of a run stand side by side.
        first: int64 [R]: where in ``order`` a run's requests begin; parents come before their children.
        count: int64 [R]: how many they are, at least 2.
        begin: int64 [R]: the position of a run's first key.
        end: int64 [R]: the position after its last; a multiple of the page size, and less than each request's keys.
    """

    order: IntArray
    first: IntArray
    count: IntArray
    begin: IntArray
    end: IntArray

    @property
    def spared(self) -> int:
        """Keys that need not be read, as another request of the batch reads them."""
        return int(((self.count - 1) * (self.end - self.begin)).sum())


@dataclass(frozen=True, slots=True)
class PagedKeys:
    """Where each request's keys are.

    Attributes:
        indptr: int32 [B + 1] on the host: request i has entries ``indptr[i]`` .. ``indptr[i + 1] - 1`` of ``indices``.
        indices: int32 [sum] on the device: page ids.
        last_page_len: int32 [B] on the host: tokens in each request's last page.
        runs: The keys that requests share, if these are read once.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    runs: SharedRuns | None = None

    def lengths(self, page_size: int) -> Tensor:
        """int32 [B] on the host: each request's keys."""
        return (self.indptr[1:] - self.indptr[:-1] - 1) * page_size + self.last_page_len

    def split(self, count: int) -> tuple[PagedKeys, PagedKeys]:
        """The keys of the first ``count`` requests, to which alone ``runs`` belong, and those of the others."""
        at = int(self.indptr[count])
        first = PagedKeys(self.indptr[: count + 1], self.indices[:at], self.last_page_len[:count], self.runs)
        return first, PagedKeys(self.indptr[count:] - at, self.indices[at:], self.last_page_len[count:])


class StoredPages(NamedTuple):
    """A layer's keys and values, and its sinks.

    Attributes:
        keys: [P, page_size, K, D] in any order except that D is last.
        values: The same, in the same order.
        scales: Factors of the stored keys and values.
        sinks: float32 [H], as ``reference.attention`` has them; None: there are none.
    """

    keys: Tensor
    values: Tensor
    scales: tuple[float, float] = (1.0, 1.0)
    sinks: Tensor | None = None


class PlannedAttention(Protocol):
    """Attention of one kind of layer, planned for each step and then run for each such layer."""

    def plan(self, query_indptr: Tensor, keys: PagedKeys) -> None:
        """Prepares a step on the current stream. Valid until the next call; mutates buffers of its own only.

        Args:
            query_indptr: int32 [B + 1] on the host: request i's tokens are rows ``query_indptr[i]`` up to the next's.
            keys: Where the requests' keys are; it may read them until the device has done all that was queued by then.
        """
        ...

    def run(self, query: Tensor, cache: StoredPages, out: Tensor | None = None) -> Tensor:
        """Computes a layer on the current stream.

        Args:
            query: [T, H, D], contiguous.
            cache: The layer's keys and values.
            out: [T, H, D], contiguous: the result is written here; None: to a new tensor.

        Returns:
            [T, H, D].
        """
        ...


@runtime_checkable
class AdvancingAttention(Protocol):
    """A :class:`PlannedAttention` whose plan can be moved to other positions of the same requests without the host. No plan
    waits for the device to have read that before."""

    def advance(self, by: int | Tensor) -> None:
        """Changes the number of keys of each request; the plan's pages must hold them.

        Args:
            by: How many; int64 [B] on the device: how many each.
        """
        ...


class PartAttention(PlannedAttention, Protocol):
    """A planned attention whose results can be added to those over other keys."""

    def run(self, query: Tensor, cache: StoredPages, out: Tensor | None = None, sums: Tensor | None = None) -> Tensor:
        """As :meth:`PlannedAttention.run`.

        Args:
            query, cache, out: The same.
            sums: float32 [T, H], contiguous: gets the logarithms, to base 2, of the sums of weights.
        """
        ...
