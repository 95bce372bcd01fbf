"""Measures from how many tokens on a model's sums over ranks are to run while the rest of a product is computed."""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor, nn

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.distributed.overlap import (
    Overlap,
    SideStream,
    SideThread,
    best_table,
    counts_tried,
    sizes_tried,
)
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.layers.linear import RowLinear

logger = logging.getLogger(__name__)

_TRIES = 2


@torch.inference_mode()
def overlap_sums(parallel: Parallel, model: nn.Module, ops: DeviceOps, dtype: torch.dtype, most: int) -> None:
    """Has long products be summed in pieces where that is quicker; called by all ranks together.

    Args:
        parallel: The groups.
        model: The model, or this rank's part of one. Its widest layer that ends in a sum is what is measured.
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
    x = torch.full((sizes[-1], layer.shape.columns.size), 0.5, dtype=dtype, device=ops.device)
    residual = torch.zeros(sizes[-1], layer.shape.rows, dtype=dtype, device=ops.device)
    overlap = Overlap(group.all_reduce, SideThread() if ops.device.type == "cpu" else SideStream(ops.device))
    group.overlap = overlap
    tried = [(rows, count) for rows in sizes for count in counts_tried(rows)]
    own = []
    for rows, count in tried:
        overlap.cut([(0, count)])
        own.append(min(_seconds(layer, x[:rows], residual[:rows], ops) for _ in range(_TRIES)))  # the first is slower
    # All ranks go by the slowest one's seconds, so that they cut alike.
    slowest = map(max, *group.exchange(own))
    overlap.cut(best_table([(*each, seconds) for each, seconds in zip(tried, slowest, strict=True)]))
    overlap.summed = 0
    logger.info("all-reduce beside %s", overlap.words or "no product: that is not quicker here")


def _seconds(layer: RowLinear, x: Tensor, residual: Tensor, ops: DeviceOps) -> float:
    fence = ops.fence()
    fence.set()
    fence.wait()
    began = time.perf_counter()
    layer(x, None, residual)
    fence.set()
    fence.wait()
    return time.perf_counter() - began
