"""GGUF's blocks in groups, against the package that defines them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from sapwood_kernels.native.products import TABLES, TYPES
from sapwood_kernels.quantised.gguf_groups import grouped_blocks
from sapwood_kernels.quantised.grouped import dequantise
from sapwood_testing.models.gguf_blocks import blocks

BITS = {
    "Q4_0": 4.75, "Q4_1": 5, "Q4_K": 6, "Q5_0": 8.75, "Q5_1": 9, "Q5_K": 10, "Q6_K": 10.5, "Q8_0": 8.75,
    "IQ4_NL": 4.5, "IQ4_XS": 5, "MXFP4": 5,
}  # fmt: skip


@pytest.mark.parametrize("kind", TYPES | TABLES)
def test_numbers_are_exactly_those_of_the_blocks(kind: str) -> None:
    rows = blocks(kind, 7, 768)
    weight = grouped_blocks(kind, rows[1:], 768)
    wanted = gguf.quants.dequantize(rows[1:].numpy(), gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(dequantise(weight).numpy(), wanted)
    held = (weight.codes, weight.scales, weight.zeros, weight.mins)
    bits = 8 * sum(each.nbytes for each in held if each is not None) / wanted.size
    assert bits == BITS[kind]
