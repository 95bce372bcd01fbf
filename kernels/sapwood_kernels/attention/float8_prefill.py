"""Attention of prompt chunks over a float8 cache: the pages are widened into a buffer, which FlashAttention 3 then reads.

FlashInfer's kernel that reads float8 with wider queries is three times slower than FlashAttention 3 on an H200 (164 against 542
TFLOP/s for 8192 tokens, 32/8 heads of 128), and widening costs little compared with attention. Requests are taken in groups whose
pages fit in the buffer.

Cost compared with attention's: for each number of the chunks' contexts one byte is read and two are written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sapwood_kernels.attention.flashinfer import PrefillAttention
from sapwood_kernels.attention.planned import AttentionShape, PagedKeys, StoredPages, Variant
from sapwood_kernels.attention.triton_kv_dequantise import dequantise_pages

_LEAST_TOKENS = 32768


class WideningBuffer:
    """The buffer that pages are widened into; all kinds of layer share it, as they use it one after the other.

    Args:
        shape: The shape that all layers share.
        tokens: Tokens of the longest request.
        like: Pages of the cache [P, page_size, K, D]: the buffer's lie in the same order.
    """

    def __init__(self, shape: AttentionShape, tokens: int, like: Tensor) -> None:
        self.num_pages = -(-max(tokens, _LEAST_TOKENS) // shape.page_size)
        size, strides = (self.num_pages, *like.shape[1:]), (like[0].numel(), *like.stride()[1:])
        self.keys, self.values = (
            torch.empty_strided(size, strides, dtype=shape.dtype, device=like.device) for _ in range(2)
        )
        self.pages = torch.arange(self.num_pages, dtype=torch.int32, device=like.device)


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests whose pages fit in the buffer.

    Attributes:
        attention: The attention planned for them.
        rows: Their rows in the step.
        pages: int32 on the device: their pages in the cache.
    """

    attention: PrefillAttention
    rows: slice
    pages: Tensor


class Float8PrefillAttention:
    """Implements ``PlannedAttention`` for chunks of prompts over a float8 cache.

    Args:
        shape: The shape that all layers share.
        variant: The kind of layer.
        buffer: The buffer for widened pages.
        workspace: As ``PrefillAttention`` takes it.
    """

    def __init__(self, shape: AttentionShape, variant: Variant, buffer: WideningBuffer, workspace: Tensor) -> None:
        self._shape, self._variant, self._buffer, self._workspace = shape, variant, buffer, workspace
        self._attentions: list[PrefillAttention] = []
        self._groups: list[_Group] = []

    def plan(self, query_indptr: Tensor, keys: PagedKeys) -> None:
        ends = keys.indptr.tolist()
        rows = query_indptr.tolist()
        self._groups = []
        first = 0
        while first + 1 < len(ends):
            last = first + 1
            while last + 1 < len(ends) and ends[last + 1] - ends[first] <= self._buffer.num_pages:
                last += 1
            if len(self._groups) == len(self._attentions):
                self._attentions.append(PrefillAttention(self._shape, self._variant, self._workspace))
            attention = self._attentions[len(self._groups)]
            count = ends[last] - ends[first]
            widened = PagedKeys(
                keys.indptr[first : last + 1] - ends[first], self._buffer.pages[:count], keys.last_page_len[first:last]
            )
            attention.plan(query_indptr[first : last + 1] - rows[first], widened)
            pages = keys.indices[ends[first] : ends[last]]
            self._groups.append(_Group(attention, slice(rows[first], rows[last]), pages))
            first = last

    def run(self, query: Tensor, cache: StoredPages, out: Tensor | None = None) -> Tensor:
        result = torch.empty_like(query) if out is None else out
        buffer = self._buffer
        for group in self._groups:
            dequantise_pages(cache.keys, cache.values, group.pages, buffer.keys, buffer.values, cache.scales)
            group.attention.run(query[group.rows], StoredPages(buffer.keys, buffer.values), result[group.rows])
        return result
