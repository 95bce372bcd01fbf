"""A CUDA GPU's operations where each row of a step comes out the same, to the bit, whatever rows are computed beside it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from sapwood_kernels.ops.contracts import FewRows, OneRow, StoreHeads
from sapwood_kernels.ops.cuda import CudaOps
from sapwood_kernels.rotary_pairs import RotaryPairs
from sapwood_kernels.triton_fixed_order import FixedOrderProduct
from sapwood_kernels.triton_qkv import norm_rope_store

_ANY_ROWS = (1 << 31) - 1
_HEADS = 4
"""Heads of a program: the same for all numbers of tokens."""


class FixedOrderCudaOps(CudaOps):
    """Linear layers of dense weights by one kernel for all numbers of rows."""

    def one_row(self, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None) -> OneRow | None:
        return None

    def few_rows(self, weight: Tensor, bias: Tensor | None) -> FewRows | None:
        return FewRows(FixedOrderProduct(weight, bias, self.processors), _ANY_ROWS, norm=0)

    def store_heads(
        self,
        num_heads: int,
        num_kv_heads: int,
        norm: tuple[Tensor, Tensor, float] | None,
        dtype: torch.dtype,
        pairs: RotaryPairs | None = None,
    ) -> StoreHeads:
        weights, eps = (None, 0.0) if norm is None else (norm[:2], norm[2])
        store = partial(
            norm_rope_store, num_heads=num_heads, norm_weights=weights, eps=eps, pairs=pairs, heads_together=_HEADS
        )
        return lambda qkv, cos, sin, to: store(qkv, cos, sin, to.keys, to.values, to.slots, to.scales)
