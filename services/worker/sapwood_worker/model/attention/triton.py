"""Attention with Sapwood's Triton kernels, prefill and decode; for latent layers only decode, together with torch's flash
attention."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec

import torch

from sapwood_kernels.attention.planned import PlannedAttention, Variant
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import (
    Abilities,
    AttentionBackend,
    AttentionNeeds,
    AttentionParts,
    StepAttention,
)
from sapwood_worker.model.attention.latent_prefill import LEAST_PLANNED, LatentPrefill
from sapwood_worker.model.attention.paged import KernelAttention, LatentKernelAttention

_LEAST = (8, 0)
"""The first compute capability with asynchronous copies and bfloat16 matrix units."""


def gpu_refusal(ops: DeviceOps) -> str | None:
    """Why a device's kind cannot run kernels for GPUs; None: it can."""
    if ops.device.type != "cuda":
        return "it needs a CUDA GPU"
    capability = torch.cuda.get_device_capability(ops.device)
    if capability < _LEAST:
        return f"it needs compute capability {_LEAST[0]}.{_LEAST[1]}, and this GPU has {capability[0]}.{capability[1]}"
    return None


def _unfit(ops: DeviceOps) -> str | None:
    if find_spec("triton") is None:
        return "the package triton is not installed (extra [gpu])"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return None if interpreted and ops.device.type == "cpu" else gpu_refusal(ops)


def _prefill(parts: AttentionParts) -> StepAttention:
    from sapwood_kernels.attention.tiled_prefill import TiledPrefillAttention
    from sapwood_kernels.attention.whole_prompts import WholePromptAttention, serves

    if parts.needs.latent:
        return LatentPrefill(parts.pool, parts.ops)
    shape, ops, pool = parts.needs.shape, parts.ops, parts.pool

    def kernel(kind: Variant) -> PlannedAttention:
        own = TiledPrefillAttention(shape, kind, ops)
        return WholePromptAttention(own, shape, kind) if serves(shape, kind, pool.dtype, ops.device) else own

    return KernelAttention(pool, {kind: kernel(kind) for kind in parts.needs.kinds})


def _plans_from(parts: AttentionParts) -> int | None:
    from sapwood_kernels.attention.cudnn_lengths import prefers_cudnn
    from sapwood_kernels.attention.whole_prompts import LEAST, serves

    needs, device = parts.needs, parts.ops.device
    if needs.latent:
        return LEAST_PLANNED if prefers_cudnn(device) else None
    served = any(serves(needs.shape, kind, parts.pool.dtype, device) for kind in needs.kinds)
    return LEAST if served else None


def _shared_prompts(parts: AttentionParts) -> StepAttention:
    """The attention of chunks of prompts that share keys. Layers with a window see few of these keys, and are computed as
    usual."""
    from sapwood_kernels.attention.shared.prefill import SharedPrefillAttention
    from sapwood_kernels.attention.tiled_prefill import TiledPrefillAttention

    shape, ops = parts.needs.shape, parts.ops

    def kernel(kind: Variant) -> PlannedAttention:
        own = TiledPrefillAttention(shape, kind, ops)
        if kind.window is not None:
            return own
        return SharedPrefillAttention(own, TiledPrefillAttention(shape, kind, ops, causal=False), shape.page_size, ops)

    return KernelAttention(parts.pool, {kind: kernel(kind) for kind in parts.needs.kinds})


def _prompt_tile(needs: AttentionNeeds) -> int:
    from sapwood_kernels.attention.triton_prefill import tile_tokens

    shape = needs.shape
    return tile_tokens(shape.num_heads // shape.num_kv_heads, shape.head_dim, shape.dtype)


def _decode(parts: AttentionParts) -> StepAttention:
    return _decodes(parts)(None)


def _decodes(parts: AttentionParts) -> Callable[[int | None], StepAttention]:
    from sapwood_kernels.attention.latent.decode import LatentDecodeAttention
    from sapwood_kernels.attention.split_decode import SplitDecodeAttention

    needs, ops, pool = parts.needs, parts.ops, parts.pool

    def made(batch: int | None) -> StepAttention:
        args = batch, parts.indices, needs.shape
        if needs.latent:
            return LatentKernelAttention(pool, {kind: LatentDecodeAttention(*args, kind, ops) for kind in needs.kinds})
        return KernelAttention(pool, {kind: SplitDecodeAttention(*args, kind, ops) for kind in needs.kinds})

    return made


def shared_decodes(parts: AttentionParts) -> Callable[[int | None], StepAttention]:
    """Makes the attention for this many decodes that share keys, or for any number (None)."""
    from sapwood_kernels.attention.latent.decode import SharedLatentDecodeAttention
    from sapwood_kernels.attention.shared_decode import SharedDecodeAttention

    needs, ops, pool = parts.needs, parts.ops, parts.pool

    def made(batch: int | None) -> StepAttention:
        args = batch, parts.indices, needs.shape
        if needs.latent:
            return LatentKernelAttention(
                pool, {kind: SharedLatentDecodeAttention(*args, kind, ops) for kind in needs.kinds}
            )
        return KernelAttention(pool, {kind: SharedDecodeAttention(*args, kind, ops) for kind in needs.kinds})

    return made


TRITON = AttentionBackend(
    Abilities(
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        cache_dtypes=frozenset({torch.float8_e4m3fn}),
        sinks=True,
        chunks=True,
        device=_unfit,
    ),
    prefill=_prefill,
    decode=_decode,
    graphs=_decodes,
    shared=shared_decodes,
    shared_prompts=_shared_prompts,
    prompt_tile=_prompt_tile,
    latent=frozenset({"prefill", "decode"}),
    orders_prompts=True,
    plans_from=_plans_from,
)
