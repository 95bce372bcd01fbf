"""Attention in which a token's result does not depend on what is computed beside it (``--deterministic``): on a GPU by one Triton
kernel for prompts and decodes, on a CPU by the native kernel of decodes, token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import (
    Abilities,
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    AttentionParts,
    StepAttention,
)
from sapwood_worker.model.attention.paged import KernelAttention
from sapwood_worker.model.attention.torch_native import NATIVE, NativeAttention
from sapwood_worker.model.attention.triton import TRITON


class EachToken:
    """Implements ``StepAttention`` for any ragged batch: each token as if it was the one that its request decodes.

    Args:
        decodes: Attention of one token of each request, in which each is computed by itself.
    """

    def __init__(self, decodes: StepAttention) -> None:
        self._decodes = decodes

    def plan(self, batch: AttentionBatch) -> None:
        counts = np.diff(batch.query_starts)
        request = np.repeat(np.arange(len(counts)), counts)
        rows = np.arange(len(request))
        behind = batch.query_starts[1:][request] - 1 - rows  # tokens of the request that follow in this step
        self._decodes.plan(
            replace(
                batch,
                query_starts=np.arange(len(request) + 1),
                seq_lens=batch.seq_lens[request] - behind,
                page_table=batch.page_table[request],
            )
        )

    def attend(self, layer: AttentionLayer, query: Tensor, out: Tensor | None = None) -> Tensor:
        return self._decodes.attend(layer, query, out)


def _unfit(ops: DeviceOps) -> str | None:
    backend = NATIVE if ops.device.type == "cpu" else TRITON
    return backend.abilities.device(ops)


def _any(parts: AttentionParts) -> StepAttention:
    if parts.ops.device.type == "cpu":
        assert NATIVE.decode is not None
        native = NATIVE.decode(parts)
        assert isinstance(native, NativeAttention)
        return EachToken(native)
    return _kernels(parts, None)


def _kernels(parts: AttentionParts, batch: int | None) -> StepAttention:
    from sapwood_kernels.attention.fixed_order import FixedOrderAttention

    shape, ops = parts.needs.shape, parts.ops
    kernels = {kind: FixedOrderAttention(batch, parts.indices, shape, kind, ops) for kind in parts.needs.kinds}
    return KernelAttention(parts.pool, kernels)


def _graphs(parts: AttentionParts) -> Callable[[int], StepAttention]:
    return lambda batch: _kernels(parts, batch)


FIXED_ORDER = AttentionBackend(
    Abilities(
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        cache_dtypes=frozenset({torch.float8_e4m3fn}),
        sinks=True,
        chunks=True,
        device=_unfit,
    ),
    prefill=_any,
    decode=_any,
    graphs=_graphs,
)
