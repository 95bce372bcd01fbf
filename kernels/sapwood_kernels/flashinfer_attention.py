"""FlashInfer's paged attention: decode on tensor cores, prefill by FlashAttention 3 where the chip has it.

Thin: it owns the workspaces and FlashInfer's wrappers, and knows nothing of requests. Figures on an H200, 32/8 heads of 128
(flashinfer 0.6.12): decode at batch 256 x 1088 tokens 0.281 ms a layer on tensor cores, 0.39 ms without; prefill of 8192
tokens 547 TFLOP/s with fa3, 319 with fa2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import flashinfer
import torch
from torch import Tensor

_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What all layers of a model share.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        head_dim: Elements of a head.
        page_size: Tokens in a page.
        dtype: The dtype of queries, and of the keys and values that these kernels read.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Variant:
    """What may differ between layers; the fields are arguments of ``reference.attention``."""

    scale: float
    window: int | None
    softcap: float | None

    def arguments(self) -> dict[str, Any]:
        """The fields as arguments of FlashInfer's ``plan``."""
        return {
            "sm_scale": self.scale,
            "window_left": -1 if self.window is None else self.window - 1,
            "logits_soft_cap": self.softcap,
        }


@dataclass(frozen=True, slots=True)
class PagedKeys:
    """Where each request's keys are.

    Attributes:
        indptr: int32 [B + 1] on the host: request i has entries ``indptr[i]`` .. ``indptr[i + 1] - 1`` of ``indices``.
        indices: int32 [sum] on the device: page ids.
        last_page_len: int32 [B] on the host: tokens in each request's last page.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor

    def split(self, count: int) -> tuple[PagedKeys, PagedKeys]:
        """The keys of the first ``count`` requests, and those of the others."""
        at = int(self.indptr[count])
        first = PagedKeys(self.indptr[: count + 1], self.indices[:at], self.last_page_len[:count])
        return first, PagedKeys(self.indptr[count:] - at, self.indices[at:], self.last_page_len[count:])


class PrefillAttention:
    """Attention of chunks of prompts, decodes among them too; planned anew for each step.

    Args:
        shape: What all layers share.
        variant: The kind of layer.
        device: The CUDA device.
    """

    def __init__(self, shape: AttentionShape, variant: Variant, device: torch.device) -> None:
        self._shape = shape
        self._variant = variant
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="auto")

    def plan(self, query_indptr: Tensor, keys: PagedKeys) -> None:
        """Prepares a step; ``query_indptr`` is int32 [B + 1] on the host. Valid until the next call."""
        shape = self._shape
        self._wrapper.plan(
            query_indptr,
            keys.indptr,
            keys.indices,
            keys.last_page_len,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=True,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            **self._variant.arguments(),
        )

    def run(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        scales: tuple[float, float] = (1.0, 1.0),
        out: Tensor | None = None,
    ) -> Tensor:
        """[T, H, D] and pages [P, page_size, K, D] of the same dtype -> [T, H, D], in ``out`` if given."""
        assert scales == (1.0, 1.0), "a cache of the queries' dtype has no scales"
        out = torch.empty_like(query) if out is None else out  # FlashInfer's own would be cleared first
        result: Tensor = self._wrapper.run(query, (key_pages, value_pages), out=out)
        return result


class DecodeAttention:
    """Attention of one token for each request.

    Args:
        batch: The number of requests if it is captured in a CUDA graph, with buffers at fixed addresses; None: any number,
            planned anew for each step.
        indices: int32 buffer of page ids; all batch sizes share it.
        workspace: uint8 buffer; all batch sizes share it.
        shape: What all layers share.
        variant: The kind of layer.
    """

    def __init__(
        self, batch: int | None, indices: Tensor, workspace: Tensor, shape: AttentionShape, variant: Variant
    ) -> None:
        self._shape = shape
        self._variant = variant
        fixed: dict[str, Any] = {}
        if batch is not None:
            fixed = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": torch.zeros(batch + 1, dtype=torch.int32, device=indices.device),
                "paged_kv_indices_buffer": indices,
                "paged_kv_last_page_len_buffer": torch.ones(batch, dtype=torch.int32, device=indices.device),
            }
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, **fixed)

    @staticmethod
    def workspace(device: torch.device) -> Tensor:
        """A workspace for the constructor, uint8."""
        return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def plan(self, keys: PagedKeys) -> None:
        """Prepares a step: writes FlashInfer's schedule on the current stream, to the fixed addresses if ``batch`` is given."""
        shape = self._shape
        self._wrapper.plan(
            keys.indptr,
            keys.indices,
            keys.last_page_len,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            **self._variant.arguments(),
        )

    def run(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        scales: tuple[float, float] = (1.0, 1.0),
        out: Tensor | None = None,
    ) -> Tensor:
        """[B, H, D] and pages [P, page_size, K, D] of the same dtype -> [B, H, D], in ``out`` if given."""
        assert scales == (1.0, 1.0), "a cache of the queries' dtype has no scales"
        result: Tensor = self._wrapper.run(query, (key_pages, value_pages), out=out)
        return result


class DecodePart(Protocol):
    """Attention of any number of requests, one token each."""

    def plan(self, keys: PagedKeys) -> None:
        """Prepares a step."""
        ...

    def run(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        scales: tuple[float, float] = ...,
        out: Tensor | None = None,
    ) -> Tensor:
        """[B, H, D] and pages [P, page_size, K, D] -> [B, H, D], in ``out`` if given."""
        ...


class PrefillPart(Protocol):
    """Attention of chunks of prompts."""

    def plan(self, query_indptr: Tensor, keys: PagedKeys) -> None:
        """Prepares a step; ``query_indptr`` is int32 [B + 1] on the host. Valid until the next call."""
        ...

    def run(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        scales: tuple[float, float] = ...,
        out: Tensor | None = None,
    ) -> Tensor:
        """[T, H, D] and pages [P, page_size, K, D] -> [T, H, D], in ``out`` if given."""
        ...


class MixedAttention:
    """A step whose first requests decode while others prefill: each part in the kernel made for it.

    The prefill kernel gives each request a tile of 128 query rows and does not split its keys, so a decode takes several times as
    long there as in the decode kernel.

    Args:
        decode: For the first requests.
        prefill: For the others.
    """

    def __init__(self, decode: DecodePart, prefill: PrefillPart) -> None:
        self._decode = decode
        self._prefill = prefill
        self._decodes = 0

    def plan(self, query_indptr: Tensor, keys: PagedKeys, decodes: int) -> None:
        """Prepares a step of which the first ``decodes`` requests have one token each, and others follow."""
        first, rest = keys.split(decodes)
        self._decode.plan(first)
        self._prefill.plan(query_indptr[decodes:] - decodes, rest)
        self._decodes = decodes

    def run(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        scales: tuple[float, float] = (1.0, 1.0),
        out: Tensor | None = None,
    ) -> Tensor:
        """[T, H, D] and pages [P, page_size, K, D] -> [T, H, D], in ``out`` if given."""
        out = torch.empty_like(query) if out is None else out
        count = self._decodes
        self._decode.run(query[:count], key_pages, value_pages, scales, out[:count])
        self._prefill.run(query[count:], key_pages, value_pages, scales, out[count:])
        return out
