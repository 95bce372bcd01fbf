"""What a checkpoint in float8 by blocks stores of a layer, told from the layer: for weights that are made up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sapwood_kernels.ops.contracts import GROUP
from sapwood_worker.model.quantization.linear_method import LinearShape
from sapwood_worker.model.weight_slot import StoredTensor


def in_blocks(quantization: Mapping[str, Any]) -> bool:
    """Whether ``quantization_config`` says what DeepSeek-V3's does: float8 with a scale for each 128 x 128."""
    return quantization.get("quant_method") == "fp8" and quantization.get("weight_block_size") == [GROUP, GROUP]


def blocks_of(shape: LinearShape) -> dict[str, StoredTensor]:
    """The tensors that such a checkpoint has of a linear layer's projections, by name."""
    tensors = {}
    for part in shape.parts:
        sizes = part.rows.total, shape.columns.total
        scales = tuple(-(-size // GROUP) for size in sizes)
        tensors[f"{part.name}.weight"] = StoredTensor(sizes, "F8_E4M3")
        tensors[f"{part.name}.weight_scale_inv"] = StoredTensor(scales, "F32", scales=True)
    return tensors
