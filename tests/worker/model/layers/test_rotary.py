"""Rotary embedding: the angles that are computed are those of the table, to the bit."""

from __future__ import annotations

import pytest
import torch

from sapwood_kernels.ops.cpu import CpuOps
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.layers.rotary import LinearScaling, RopeConfig, RotaryEmbedding
from sapwood_worker.model.quantization.registry import LinearMethods

LONGEST = 4096


class CapturingOps(CpuOps):
    captures = True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(1e6),
        RopeConfig(1e4, rotated=20, interleaved=True),
        RopeConfig(5e5, LinearScaling(8.0, magnitude=1.3)),
    ],
)
def test_angles_without_a_table_are_those_of_the_table(rope, dtype):
    computed, looked_up = (
        RotaryEmbedding(64, rope, LONGEST, LayerContext(dtype, ops, LinearMethods("none", dtype, ops), Parallel()))
        for ops in (CpuOps(torch.device("cpu")), CapturingOps(torch.device("cpu")))
    )
    for count in (1, 2, 7, 33, LONGEST):
        positions = torch.randint(LONGEST, (count,))
        for ours, expected in zip(computed(positions)[:2], looked_up(positions)[:2], strict=True):
            assert ours.dtype == dtype and ours.shape == (count, 1, 64)
            assert torch.equal(ours, expected)
