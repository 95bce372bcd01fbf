"""Chooses the next token of every row at once.

Order of the filters: temperature; top-k; top-p over what top-k left, renormalised; min-p relative to the likeliest token.
Each filter is a threshold on the probability, so tokens exactly as likely as the last one kept are kept too, and the
result does not depend on how a sort breaks ties.

The token is then drawn by the row's random numbers, down a tree (``cpu_sampling``). Nothing in a row's result depends on another
row: it is a pure function of (seed, position, logits), and logits that are rounded a little otherwise seldom change it.

How the draw is computed is the device's own: torch calls (``cpu_sampling`` of ``sapwood_kernels.sampling``), or one
kernel that does all of it without waiting for the host (``triton_sampling``).
"""

from __future__ import annotations

from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.sampling.cpu_sampling import SamplingBatch


def sample(logits: Tensor, batch: SamplingBatch | None, ops: DeviceOps) -> tuple[Tensor, Tensor]:
    """Samples each row.

    Args:
        logits: float32 [R, V]; not changed.
        batch: Settings; None when all rows are greedy.
        ops: The device's operations.

    Returns:
        Token ids, int64 [R], and each row's largest logit, float32 [R]. Where that is not finite the row holds a NaN, an
        infinity or nothing to choose, and its token, in the vocabulary, means nothing.
    """
    largest, greedy = ops.row_max(logits)
    if batch is None:
        return greedy.clamp(min=0), largest
    chosen = ops.sample_rows(logits, largest, batch)
    return (chosen if batch.rows is None else greedy.clamp(min=0).index_copy_(0, batch.rows, chosen)), largest
