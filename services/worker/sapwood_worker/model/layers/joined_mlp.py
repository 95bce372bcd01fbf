"""An MLP that ranks with rows of their own compute together."""

from __future__ import annotations

from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.distributed.own_rows import OwnRows
from sapwood_worker.model.layers.layer import Layer
from sapwood_worker.model.layers.mlp import GatedMLP, PlainMLP
from sapwood_worker.model.layers.norm import AnyNorm
from sapwood_worker.model.layers.sparse.sparse_mlp import SparseMLP


class JoinedMLP(Layer):
    """All ranks' rows go to all ranks; each computes its part of the MLP for all of them, and gets the sum for its own.

    Args:
        mlp: The MLP, of which ranks keep their parts of the sum.
        rows: What each rank has.
        ops: The device's operations.
    """

    def __init__(self, mlp: GatedMLP | PlainMLP | SparseMLP, rows: OwnRows, ops: DeviceOps) -> None:
        super().__init__()
        self.mlp = mlp
        self._rows, self._ops = rows, ops

    def forward(self, hidden: Tensor, norm: AnyNorm | None, residual: Tensor | None = None) -> Tensor:
        """[T, hidden_size], normed first by ``norm`` -> [T, hidden_size], added to ``residual`` in place if there is one."""
        every = self._rows.gather(hidden)
        self._ops.add_digest(every, self._rows.seen)
        result = self._rows.scatter_sum(self.mlp(every, norm), len(hidden))
        if residual is None:
            return result
        residual += result
        return residual
