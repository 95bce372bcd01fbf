"""FlashInfer's paged attention: decode on tensor cores, prefill by FlashAttention 3 where the chip has it.

Thin: it owns FlashInfer's wrappers, and knows nothing of requests. Figures on an H200, 32/8 heads of 128
(flashinfer 0.6.12): decode at batch 256 x 1088 tokens 0.281 ms a layer on tensor cores, 0.39 ms without; prefill of 8192
tokens 547 TFLOP/s with fa3, 319 with fa2.
"""

from __future__ import annotations

from typing import Any

import flashinfer
import torch
from torch import Tensor

from sapwood_kernels.attention.planned import AttentionShape, PagedKeys, StoredPages, Variant

_WORKSPACE_BYTES = 256 << 20


def make_workspace(device: torch.device) -> Tensor:
    """Memory for partial results of a layer, uint8: attentions that are computed one after the other share it."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _sizes(shape: AttentionShape) -> tuple[int, int, int, int]:
    """The arguments that all layers share, in the order of FlashInfer's ``plan``."""
    return shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size


def _arguments(shape: AttentionShape, variant: Variant) -> dict[str, Any]:
    """The dtypes and the kind of a layer as arguments of FlashInfer's ``plan``."""
    return {
        "q_data_type": shape.dtype,
        "kv_data_type": shape.dtype,
        "sm_scale": variant.scale,
        "window_left": -1 if variant.window is None else variant.window - 1,
        "logits_soft_cap": variant.softcap,
    }


class PrefillAttention:
    """Implements ``PlannedAttention`` for chunks of prompts, decodes among them too, over a cache of the queries' dtype.

    The kernel gives each request a tile of 128 query rows and does not split its keys, so a decode takes several times as long
    here as in the decode kernel.

    Args:
        shape: The shape that all layers share.
        variant: The kind of layer.
        workspace: As :func:`make_workspace` makes it.
    """

    def __init__(self, shape: AttentionShape, variant: Variant, workspace: Tensor) -> None:
        self._shape = shape
        self._variant = variant
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="auto")

    def plan(self, query_indptr: Tensor, keys: PagedKeys) -> None:
        where = keys.indptr, keys.indices, keys.last_page_len
        arguments = _arguments(self._shape, self._variant)
        self._wrapper.plan(query_indptr, *where, *_sizes(self._shape), causal=True, **arguments)

    def run(self, query: Tensor, cache: StoredPages, out: Tensor | None = None) -> Tensor:
        assert cache.scales == (1.0, 1.0), "a cache of the queries' dtype has no scales"
        out = torch.empty_like(query) if out is None else out  # FlashInfer's own would be cleared first
        result: Tensor = self._wrapper.run(query, (cache.keys, cache.values), out=out)
        return result


class DecodeAttention:
    """Implements ``PlannedAttention`` for one token of each request, over a cache of the queries' dtype.

    Args:
        batch: The number of requests if it is captured in a CUDA graph, with buffers at fixed addresses; None: any number,
            planned again for each step.
        indices: int32 buffer of page ids; all batch sizes share it.
        workspace: As :func:`make_workspace` makes it.
        shape: The shape that all layers share.
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

    def plan(self, query_indptr: Tensor, keys: PagedKeys) -> None:
        """Prepares a step: writes FlashInfer's schedule on the current stream, to the fixed addresses if ``batch`` is given."""
        where = keys.indptr, keys.indices, keys.last_page_len
        self._wrapper.plan(*where, *_sizes(self._shape), **_arguments(self._shape, self._variant))

    def run(self, query: Tensor, cache: StoredPages, out: Tensor | None = None) -> Tensor:
        assert cache.scales == (1.0, 1.0), "a cache of the queries' dtype has no scales"
        result: Tensor = self._wrapper.run(query, (cache.keys, cache.values), out=out)
        return result
