"""Attention of prompts from their first token on by cuDNN, through torch, and of what else is in a batch by our own kernel.

Half as fast again on a Hopper GPU, whose matrix units Triton keeps less busy: for it keys and values are gathered from their
pages, which takes a hundredth of the time. cuDNN knows no pages, and of causal masks only that of tokens that are all of their
keys; it plans again for each length that it has not seen (``cudnn_lengths``), so that short prompts are not worth it.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.attention.cudnn_lengths import padded
from sapwood_kernels.attention.planned import AttentionShape, PagedKeys, StoredPages, Variant
from sapwood_kernels.attention.tiled_prefill import TiledPrefillAttention
from sapwood_kernels.attention.triton_gather import gather

logger = logging.getLogger(__name__)

LEAST = 2048
"""Tokens from which a prompt is computed so."""


def serves(shape: AttentionShape, variant: Variant, stored: torch.dtype, device: torch.device) -> bool:
    """Whether cuDNN is there for layers of a kind, with keys and values stored in a dtype, and pays."""
    plain = variant.window is None and variant.softcap is None and not variant.sinks
    return plain and stored == shape.dtype and device.type == "cuda" and _has_cudnn(device, shape)


@cache
def _has_cudnn(device: torch.device, shape: AttentionShape) -> bool:
    if torch.version.cuda is None or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query, key, value = (
        torch.zeros(1, heads, LEAST, shape.head_dim, dtype=shape.dtype, device=device)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    except RuntimeError as reason:
        logger.info("whole prompts are not computed by cuDNN: %s", reason)
        return False
    return True


class WholePromptAttention:
    """Implements :class:`sapwood_kernels.attention.planned.PlannedAttention` for any ragged batch.

    Args:
        own: The kernel of what is no whole prompt.
        shape: The shape that all layers share.
        variant: The kind of layer: without window, softcap and sinks.
    """

    def __init__(self, own: TiledPrefillAttention, shape: AttentionShape, variant: Variant) -> None:
        self._own, self._shape, self._scale = own, shape, variant.scale
        self._whole: list[tuple[slice, Tensor]] = []
        self._others = True

    def plan(self, query_indptr: Tensor, keys: PagedKeys) -> None:
        lengths, counts = keys.lengths(self._shape.page_size), query_indptr.diff()
        whole = (counts == lengths) & (counts >= LEAST)
        self._whole = [
            (slice(int(query_indptr[i]), int(query_indptr[i + 1])), keys.indices[int(keys.indptr[i]) : int(keys.indptr[i + 1])])
            for i in whole.nonzero().flatten().tolist()
        ]  # fmt: skip
        self._others = len(self._whole) < len(counts)
        if self._others:
            self._own.plan(query_indptr, keys, leaving_out=whole.numpy())

    def run(self, query: Tensor, cache: StoredPages, out: Tensor | None = None) -> Tensor:
        if out is None and not self._others and len(self._whole) == 1:  # what it makes needs no place of its own
            return self._attended(query, cache, self._whole[0][1])
        out = torch.empty_like(query) if out is None else out
        if self._others:
            self._own.run(query, cache, out)
        for tokens, pages in self._whole:
            out[tokens] = self._attended(query[tokens], cache, pages)
        return out

    def _attended(self, asked: Tensor, cache: StoredPages, pages: Tensor) -> Tensor:
        """Of a whole prompt: [T, H, D], contiguous."""
        query = padded(asked)
        keys, values = gather(cache.keys, cache.values, pages, len(asked), len(query))
        q, k, v = (each.transpose(0, 1)[None] for each in (query, keys, values))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=True)
        return found[0, :, : len(asked)].transpose(0, 1).contiguous()
