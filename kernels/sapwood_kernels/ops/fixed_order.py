"""A device's operations where each row of a step comes out the same, to the bit, whatever rows are computed beside it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.ops.contracts import FewRows
from sapwood_kernels.ops.cpu import CpuOps

_ROWS = 16
"""Rows of every product on a CPU; fewer are filled up."""


class FixedOrderCpuOps(CpuOps):
    """Products of float32 weights take 16 rows at a time: the libraries choose another order of sums for other numbers."""

    def few_rows(self, weight: Tensor, bias: Tensor | None) -> FewRows | None:
        return None

    def packed(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        return lambda x: sixteen_rows(x, weight, bias)


def sixteen_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` of x [T, K], sixteen rows at a time: [T, N]."""
    count = len(x)
    filled = -(-count // _ROWS) * _ROWS
    if filled != count:
        x = torch.cat((x, x.new_zeros(filled - count, x.shape[1])))
    blocks = [F.linear(block, weight, bias) for block in torch.split(x, _ROWS)]
    return (blocks[0] if len(blocks) == 1 else torch.cat(blocks))[:count]
