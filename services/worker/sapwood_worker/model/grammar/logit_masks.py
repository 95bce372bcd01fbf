"""Applies grammar masks to logits."""

from __future__ import annotations

from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.records.step import Step


def apply_masks(logits: Tensor, step: Step, ops: DeviceOps) -> None:
    """Forbids, in place, what the grammars of a step's requests forbid. Waits until their masks are filled.

    Args:
        logits: float [R, V], one row for each position that the step samples.
        step: The step.
        ops: The operations of the logits' device.
    """
    if step.masks is None:
        return
    bitmask = ops.to_device(step.masks.result())
    rows = None if len(step.masked) == len(logits) else ops.to_device(step.masked)
    ops.forbid_tokens(logits, bitmask, rows)
