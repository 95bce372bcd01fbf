"""FlashInfer's attention: prefill with FlashAttention 3 if the chip has it, decode with the faster of FlashInfer's and Sapwood's
kernel."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from sapwood_kernels.attention.planned import PlannedAttention, Variant
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import Abilities, AttentionBackend, AttentionParts, StepAttention
from sapwood_worker.model.attention.paged import KernelAttention
from sapwood_worker.model.attention.triton import gpu_refusal, shared_decodes

# The package is imported where it is used: only the extra [gpu] installs it.


def _unfit(ops: DeviceOps) -> str | None:
    if find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed (extra [gpu])"
    return gpu_refusal(ops)


def _prefill(parts: AttentionParts) -> StepAttention:
    from sapwood_kernels.attention.flashinfer import PrefillAttention
    from sapwood_kernels.attention.float8_prefill import Float8PrefillAttention, WideningBuffer

    needs, shared, workspace = parts.needs, parts.shared, _workspace(parts)
    kernels: dict[Variant, PlannedAttention]
    if needs.cache_dtype != needs.shape.dtype:
        if "widened" not in shared:
            shared["widened"] = WideningBuffer(needs.shape, needs.longest, parts.pool.key_pages(0))
        kernels = {
            kind: Float8PrefillAttention(needs.shape, kind, shared["widened"], workspace) for kind in needs.kinds
        }
    else:
        kernels = {kind: PrefillAttention(needs.shape, kind, workspace) for kind in needs.kinds}
    return KernelAttention(parts.pool, kernels)


def _workspace(parts: AttentionParts) -> Tensor:
    from sapwood_kernels.attention.flashinfer import make_workspace

    if "workspace" not in parts.shared:
        parts.shared["workspace"] = make_workspace(parts.ops.device)
    workspace: Tensor = parts.shared["workspace"]
    return workspace


def _decode(parts: AttentionParts) -> StepAttention:
    return _decodes(parts)(None)


def _decodes(parts: AttentionParts) -> Callable[[int | None], StepAttention]:
    """Makes the attention for this many decodes at fixed addresses, or for any number (None)."""
    from sapwood_kernels.attention.flashinfer import DecodeAttention
    from sapwood_kernels.attention.split_decode import MOST_SPLIT, SplitDecodeAttention

    needs = parts.needs
    float8 = needs.cache_dtype != needs.shape.dtype
    workspace = _workspace(parts)

    def kernel(batch: int | None, kind: Variant) -> PlannedAttention:
        if float8 or (batch is not None and batch <= MOST_SPLIT):
            return SplitDecodeAttention(batch, parts.indices, needs.shape, kind, parts.ops)
        return DecodeAttention(batch, parts.indices, workspace, needs.shape, kind)

    return lambda batch: KernelAttention(parts.pool, {kind: kernel(batch, kind) for kind in needs.kinds})


FLASHINFER = AttentionBackend(
    Abilities(
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        cache_dtypes=frozenset({torch.float8_e4m3fn}),
        head_dims=frozenset({64, 128, 256}),
        device=_unfit,
    ),
    prefill=_prefill,
    decode=_decode,
    graphs=_decodes,
    shared=shared_decodes,
)
