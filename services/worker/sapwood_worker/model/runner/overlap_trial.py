"""Measures from how many tokens on a model's sums over ranks are to run while the rest of a product is computed, and whether what
comes of it is right."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.distributed.calibration import Trial, as_it_is, time_on_host
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.overlap import (
    Overlap,
    SideStream,
    SideThread,
    best_table,
    counts_tried,
    sizes_tried,
)
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.distributed.torch_group import TorchGroup
from sapwood_worker.model.families.decoder import DecoderLayer
from sapwood_worker.model.layers.attention import Attention
from sapwood_worker.model.layers.linear import RowLinear
from sapwood_worker.model.layers.mlp import GatedMLP
from sapwood_worker.model.layers.norm import RMSNorm
from sapwood_worker.records.model_info import OVERLAPPED

logger = logging.getLogger(__name__)

_TRIES = 2
_QUEUED = 6
"""Calls that a device gets at once if it computes by itself: as in a step, the host is then ahead of it."""


@torch.inference_mode()
def overlap_sums(parallel: Parallel, model: nn.Module, ops: DeviceOps, dtype: torch.dtype, most: int) -> None:
    """Has long products be summed in pieces where that is quicker; called by all ranks together.

    Args:
        parallel: The groups.
        model: The model, or this rank's part of one. What is measured is its first layer without attention, where that is two
            products with a sum each and norms alone see them, else its widest product with a sum.
        ops: The device's operations.
        dtype: Of activations.
        most: Tokens of the largest step.
    """
    group = parallel.tp
    if group.size == 1 or parallel.rows is not None:
        return
    layers = [each for each in model.modules() if isinstance(each, RowLinear) and each.ranks is not None]
    sizes = sizes_tried(most)
    if not layers or not sizes:
        return
    layer = max(layers, key=lambda each: each.shape.columns.size)
    run = next((found for each in model.modules() if (found := _after_attention(each)) is not None), layer)
    first = run.output if isinstance(run, _AfterAttention) else layer
    x = torch.full((sizes[-1], first.shape.columns.size), 0.5, dtype=dtype, device=ops.device)
    residual = torch.zeros(sizes[-1], first.shape.rows, dtype=dtype, device=ops.device)
    overlap = Overlap(group.all_reduce, SideThread() if ops.device.type == "cpu" else SideStream(ops.device))
    group.overlap = overlap
    tried = [(rows, count) for rows in sizes for count in counts_tried(rows)]
    own = []
    for rows, count in tried:
        overlap.cut([(0, count)])
        call = partial(run, x[:rows], None, residual[:rows])
        own.append(min(_seconds(call, overlap, ops) for _ in range(_TRIES)))  # the first is slower
    # All ranks go by the slowest one's seconds, so that they cut alike.
    slowest = list(map(max, *group.exchange(own)))
    table = best_table([(*each, seconds) for each, seconds in zip(tried, slowest, strict=True)])
    trial = Trial(group, ops, (dtype,), timer=time_on_host, replay=as_it_is if ops.device.type == "cpu" else _captured)
    fault = trial.fault(_Pieces(group, layer, *each, dtype, ops) for each in table if each[1] > 1)
    if fault:
        logger.warning("all-reduce: products in pieces are not used: %s", fault)
        if group.sums is not None:
            group.sums.refuse(OVERLAPPED, fault)
    overlap.cut([] if fault else table)
    overlap.summed = 0
    logger.info("all-reduce beside %s", overlap.words or "no product: that is not quicker here, or not right")
    took = ", ".join(
        f"{rows} in {count}: {1e6 * each:.0f} us" for (rows, count), each in zip(tried, slowest, strict=True)
    )
    logger.info("products of so many tokens, in so many pieces: %s", took)


class _AfterAttention:
    """What of a layer comes after its attention, as it is in a step.

    Args:
        output: Attention's output.
        norm: Sees the residual after it.
        mlp: Sees that.
    """

    def __init__(self, output: RowLinear, norm: RMSNorm, mlp: GatedMLP) -> None:
        self.output, self._norm, self._mlp = output, norm, mlp

    def __call__(self, x: Tensor, gate: None, residual: Tensor) -> None:
        self.output(x, gate, residual)
        self._mlp(residual, self._norm, residual)


def _after_attention(module: nn.Module) -> _AfterAttention | None:
    if not isinstance(module, DecoderLayer) or not isinstance(module.attention, Attention):
        return None
    output, mlp = module.attention.output, module.mlp
    if output.ranks is None or output.ranks.following is None or not isinstance(mlp, GatedMLP) or mlp.ranks is None:
        return None
    return _AfterAttention(output, output.ranks.following, mlp)


class _Pieces:
    """A product whose pieces are summed while the next is computed. Implements
    :class:`~sapwood_worker.model.distributed.trial_cases.Case`.

    Args:
        group: The ranks.
        layer: The layer.
        rows: Tokens.
        count: Pieces.
        dtype: Of activations.
        ops: The device's operations.
    """

    def __init__(
        self, group: Group, layer: RowLinear, rows: int, count: int, dtype: torch.dtype, ops: DeviceOps
    ) -> None:
        assert group.overlap is not None
        self._input = torch.empty(rows, layer.shape.columns.size, dtype=dtype, device=ops.device)
        self.x = self._input.view(-1)
        self._before = torch.linspace(-1, 1, rows * layer.shape.rows, device=ops.device).view(rows, -1).to(dtype)
        self._residual = torch.empty_like(self._before)
        self._group, self._layer, self._beside = group, layer, group.overlap
        # What it is compared with: the same pieces, each summed by torch's backend before the next is computed.
        self._apart = Overlap(group.backend.sum if isinstance(group, TorchGroup) else group.all_reduce, _at_once)
        for each in (self._beside, self._apart):
            each.cut([(0, count)])

    def run(self) -> None:
        self._residual.copy_(self._before)
        self._layer(self._input, None, self._residual)
        if self._group.overlap is not None:
            self._group.overlap.settle()

    def wrong(self, every: Tensor) -> str:
        found = self._residual.clone()
        self._group.overlap = self._apart
        self.run()
        self._group.overlap = self._beside
        # The backend may add the ranks' parts up in another order.
        most = 4 * torch.finfo(found.dtype).eps * float(self._residual.abs().max())
        return "" if torch.allclose(found, self._residual, rtol=0, atol=most) else "sum of a product in pieces"


def _at_once(call: Callable[[], object]) -> Callable[[], object]:
    call()
    return lambda: None


def _captured(call: Callable[[], None]) -> Callable[[], None]:
    from sapwood_worker.model.distributed.peer_sums import captured  # only CUDA builds of torch have triton

    return captured(call)


def _seconds(call: Callable[[], object], overlap: Overlap, ops: DeviceOps) -> float:
    fence = ops.fence()
    fence.set()
    fence.wait()
    calls = _QUEUED if ops.asynchronous else 1
    began = time.perf_counter()
    for _ in range(calls):
        call()
        overlap.settle()
    fence.set()
    fence.wait()
    return (time.perf_counter() - began) / calls
