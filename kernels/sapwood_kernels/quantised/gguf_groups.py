"""Blocks of GGUF files as weights in groups: the same numbers exactly, in the layout that all kernels of few bits read.

Types of 5 and 6 bits take 8 there. The blocks' layouts are those of ggml (``ggml-quants.h``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood_kernels.native.products import ALL, TABLES
from sapwood_kernels.quantised.grouped import E2M1, GroupedWeight, pack4

_CURVE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # IQ4's numbers by their codes
_SUB = 32  # numbers of a block, or of a part of a larger one, that share a scale


def grouped_blocks(kind: str, rows: Tensor, columns: int) -> GroupedWeight:
    """A matrix as a GGUF file stores it, in groups.

    Args:
        kind: Its type, one of ``TYPES`` or ``TABLES``.
        rows: Its rows' bytes, uint8 [N, bytes], on the device where the weight is to be.
        columns: Numbers in a row.
    """
    _, per_block, block_bytes = ALL[kind]
    blocks = rows.reshape(len(rows), columns // per_block, block_bytes)
    if kind == "Q6_K":
        return _six_bits(blocks, columns)
    if kind in TABLES:
        return _of_table(kind, blocks, columns)
    zeros: Tensor | None = None
    mins: Tensor | None = None
    if kind in ("Q4_K", "Q5_K"):
        factors, offsets = _scales_and_mins(blocks[..., 4:16])
        scales = _halves(blocks, 0).float() * factors
        mins = _halves(blocks, 2).float() * offsets
        low = blocks[..., -128:].reshape(*blocks.shape[:2], 4, 1, _SUB)
        codes = torch.cat((low & 15, low >> 4), -2).flatten(-3, -2)  # [N, blocks, 8, 32]
        if kind == "Q5_K":
            place = torch.arange(8, dtype=torch.uint8, device=rows.device)[:, None]
            codes |= (blocks[..., None, 16:48] >> place & 1) << 4
    elif kind == "Q8_0":
        scales, codes = _halves(blocks, 0), blocks[..., None, 2:] ^ 128  # signed bytes, 128 more
    else:
        scales = _halves(blocks, 0)
        low = blocks[..., None, -16:]
        codes = torch.cat((low & 15, low >> 4), -1)
        if kind in ("Q5_0", "Q5_1"):
            place = torch.arange(8, dtype=torch.uint8, device=rows.device)
            bits = blocks[..., -20:-16, None] >> place & 1
            codes |= bits.flatten(-2)[..., None, :] << 4
        if kind in ("Q4_1", "Q5_1"):
            mins = -_halves(blocks, 2)
    middle = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}.get(kind)
    if middle is not None:
        zeros = torch.full(scales.shape, middle, dtype=torch.uint8, device=rows.device).flatten(1)
    four = kind.startswith("Q4")
    codes = codes.flatten(1)
    return GroupedWeight(
        codes=pack4(codes) if four else codes,
        scales=scales.flatten(1),
        group=_SUB,
        columns=columns,
        bits=4 if four else 8,
        zeros=zeros,
        mins=None if mins is None else mins.flatten(1),
    )


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The float16 number at a byte of each block, [N, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _scales_and_mins(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight mins of 6 bits each, uint8 [..., 12] -> float32 [..., 8] both."""
    first, second, rest = packed.chunk(3, -1)
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), -1)
    mins = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), -1)
    return scales.float(), mins.float()


def _of_table(kind: str, blocks: Tensor, columns: int) -> GroupedWeight:
    head = {"IQ4_NL": 2, "IQ4_XS": 8, "MXFP4": 1}[kind]
    if kind == "MXFP4":
        exponents = blocks[..., 0].int()  # as a float32's; 0 is a number below the least of its ordinary ones
        scales = torch.where(exponents > 0, exponents << 23, 1 << 22).view(torch.float32)
    elif kind == "IQ4_NL":
        scales = _halves(blocks, 0).flatten(1)
    else:
        place = torch.arange(8, device=blocks.device)
        upper = blocks[..., 2:4].contiguous().view(torch.int16).int() >> 2 * place & 3
        lower = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(-2)
        scales = (_halves(blocks, 0).float() * ((lower | upper << 4) - 32)).flatten(1)
    halves = blocks[..., head:].reshape(*blocks.shape[:2], -1, _SUB // 2)
    codes = torch.cat((halves & 15, halves >> 4), -1).flatten(1)
    table = torch.tensor(E2M1 if kind == "MXFP4" else _CURVE, dtype=torch.float32, device=blocks.device)
    return GroupedWeight(pack4(codes), scales, _SUB, columns, bits=4, table=table)


def _six_bits(blocks: Tensor, columns: int) -> GroupedWeight:
    count = blocks.shape[:2]
    low, high = blocks[..., :128].reshape(*count, 2, 1, 64), blocks[..., 128:192].reshape(*count, 2, 1, _SUB)
    place = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)[:, None]
    codes = torch.cat((low & 15, low >> 4), -2).reshape(*count, 2, 4, _SUB)  # [N, blocks, 2, 4, 32]
    codes |= (high >> place & 3) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float() * _halves(blocks, 208).float()
    zeros = torch.full(scales.shape, 32, dtype=torch.uint8, device=blocks.device)
    return GroupedWeight(codes.flatten(1), scales.flatten(1), 16, columns, bits=8, zeros=zeros.flatten(1))
