"""Random blocks as GGUF files store them."""

from __future__ import annotations

import numpy as np
import torch

from sapwood_kernels.native.products import ALL

HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}  # fmt: skip
"""Bytes in which each type's blocks have float16 numbers."""


def blocks(kind: str, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Random blocks whose float16 numbers are ordinary ones."""
    _, per_block, block_bytes = ALL[kind]
    chance = np.random.default_rng(seed)
    raw = chance.integers(0, 256, (rows, columns // per_block, block_bytes), np.uint8)
    for at in HALVES[kind]:
        numbers = chance.normal(0, 0.02, raw.shape[:2]).astype(np.float16)
        raw[..., at : at + 2] = numbers[..., None].view(np.uint8)
    if kind == "MXFP4":  # a block's exponent
        raw[..., 0] = chance.integers(118, 124, raw.shape[:2], np.uint8)
        raw[0, 0, 0], raw[0, 1, 0] = 0, 1
    return torch.from_numpy(raw.reshape(rows, -1))
