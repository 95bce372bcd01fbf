"""Layers as formats of quantised checkpoints lay them out, each made number by number from the format's description."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Stored = tuple[dict[str, Tensor], Tensor]
"""Tensors by what follows the layer's name, and the numbers that they stand for, float32 [N, K]."""

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes packed into int32, along a dimension, the first in the lowest bits; ``order`` names what stands in each place."""
    codes = codes.long().movedim(dim, -1)
    each = 32 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % each))
    codes = codes.view(*codes.shape[:-1], -1, each)
    if order is not None:
        codes = codes[..., list(order)]
    total = sum(codes[..., place] << (bits * place) for place in range(each))
    assert isinstance(total, Tensor)
    signed = torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)
    return signed.movedim(-1, dim).contiguous()


def rounded(
    weight: Tensor, bits: int, groups: Tensor, *, sym: bool, steps: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], zeros and scales [N, G], for each column's group in ``groups``."""
    count = int(groups.max()) + 1
    apart = [weight[:, groups == group] for group in range(count)]
    least = torch.stack([each.amin(1).clamp(max=0) for each in apart], 1)
    most = torch.stack([each.amax(1).clamp(min=0) for each in apart], 1)
    top = (1 << bits) - 1
    if sym:
        scales = (2 * torch.maximum(most, -least) / top * steps).half()
        zeros = torch.full(scales.shape, (top + 1) // 2)
    else:
        scales = ((most - least) / top * steps).half()
        zeros = (-least / scales.float()).round().clamp(0, top).long()
    each = scales.float()[:, groups]
    codes = (weight / each + zeros[:, groups]).round().clamp(0, top).long()
    return codes, zeros, scales


def gptq(
    weight: Tensor, *, bits: int = 4, group: int = 32, sym: bool = False, order: Tensor | None = None, version: int = 1
) -> Stored:
    """GPTQ: ``order`` is each column's group, where columns were taken by importance."""
    columns = weight.shape[1]
    groups = torch.arange(columns) // group if order is None else order
    codes, zeros, scales = rounded(weight, bits, groups, sym=sym)
    wide = (codes - zeros[:, groups]) * scales.float()[:, groups]
    packed = words(zeros.t(), bits, 1)
    if version == 1:  # one less, in arithmetic of whole words: what a zero of 0 lacks is borrowed from its neighbour
        packed = packed - sum(1 << (bits * place) for place in range(32 // bits))
    tensors = {
        "qweight": words(codes.t(), bits, 0),
        "qzeros": packed,
        "scales": scales.t().contiguous(),
        "g_idx": groups.to(torch.int32),
    }
    return tensors, wide


def awq(weight: Tensor, *, group: int = 32) -> Stored:
    """AWQ, version gemm."""
    groups = torch.arange(weight.shape[1]) // group
    codes, zeros, scales = rounded(weight, 4, groups, sym=False)
    tensors = {
        "qweight": words(codes.t(), 4, 1, _AWQ_ORDER),
        "qzeros": words(zeros.t(), 4, 1, _AWQ_ORDER),
        "scales": scales.t().contiguous(),
    }
    return tensors, (codes - zeros[:, groups]) * scales.float()[:, groups]


def pack_quantized(
    weight: Tensor, *, bits: int = 4, group: int = 32, sym: bool = True, order: Tensor | None = None
) -> Stored:
    """compressed-tensors' ``pack-quantized``."""
    groups = torch.arange(weight.shape[1]) // group if order is None else order
    codes, zeros, scales = rounded(weight, bits, groups, sym=sym)
    tensors = {
        "weight_packed": words(codes, bits, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not sym:
        tensors["weight_zero_point"] = words(zeros, bits, 0)
    if order is not None:
        tensors["weight_g_idx"] = groups.to(torch.int32)
    return tensors, (codes - zeros[:, groups]) * scales.float()[:, groups]


def int8(weight: Tensor, *, by: str = "channel") -> Stored:
    """compressed-tensors' ``int-quantized``, by ``channel`` or ``tensor``."""
    most = weight.abs().amax(1, keepdim=True) if by == "channel" else weight.abs().amax().view(1)
    scales = most / 127
    codes = (weight / scales).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def float8(weight: Tensor, *, block: tuple[int, int] | None, name: str = "weight_scale") -> Stored:
    """float8 with a scale for each block, those at the edges smaller; None: one in all."""
    rows, columns = weight.shape
    tall, wide = block or (rows, columns)
    padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % tall))
    apart = padded.view(padded.shape[0] // tall, tall, padded.shape[1] // wide, wide)
    scales = apart.abs().amax((1, 3)) / 448
    each = scales.repeat_interleave(tall, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    codes = (weight / each).to(torch.float8_e4m3fn)
    stored = scales.view(()) if block is None else scales
    return {"weight": codes, name: stored}, codes.float() * each


def nvfp4(weight: Tensor, *, kind: str) -> Stored:
    """NVFP4 as ``compressed-tensors`` or ``modelopt`` store it."""
    apart = _apart(weight, 16)
    whole = 448 * 6 / weight.abs().max()
    scales = (apart.abs().amax(2) / 6 * whole).to(torch.float8_e4m3fn)
    each = scales.float() / whole
    codes = (apart / each[..., None].clamp(min=1e-9)).flatten(1)
    codes = (codes[..., None] - _E2M1).abs().argmin(-1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    wide = (_apart(_E2M1[codes], 16) * each[..., None]).flatten(1)
    if kind == "modelopt":
        return {
            "weight": packed,
            "weight_scale": scales,
            "weight_scale_2": 1 / whole,
            "input_scale": torch.tensor(1.0),
        }, wide
    return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole.view(1)}, wide


def mxfp4(weight: Tensor) -> Stored:
    """MXFP4 as compressed-tensors stores it."""
    apart = _apart(weight, 32)
    exponents = (apart.abs().amax(2) / 6).log2().ceil().clamp(-127, 127)
    codes = ((apart * 2.0 ** -exponents[..., None]).flatten(1)[..., None] - _E2M1).abs().argmin(-1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    wide = (_apart(_E2M1[codes], 32) * 2.0 ** exponents[..., None]).flatten(1)
    return {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}, wide


def nf4(weight: Tensor, *, nested: bool = False, block: int = 64) -> Stored:
    """bitsandbytes' 4 bits by a table, the scales in 8 bits of their own if ``nested``."""
    table = torch.tensor(_NF4)
    apart = weight.reshape(-1, block)
    most = apart.abs().amax(1)
    settings: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": block,
        "dtype": "float32",
        "shape": list(weight.shape),
    }
    tensors = {"weight.quant_map": table, "weight.absmax": most}
    if nested:
        mean = most.mean()
        count = 256
        inner = torch.nn.functional.pad(most - mean, (0, -len(most) % count)).view(-1, count)
        largest = inner.abs().amax(1)
        map256 = torch.linspace(-1, 1, 256)
        codes256 = ((inner / largest[:, None])[..., None] - map256).abs().argmin(-1).flatten()[: len(most)]
        most = map256[codes256] * largest.repeat_interleave(count)[: len(most)] + mean
        settings |= {"nested_blocksize": count, "nested_offset": float(mean), "nested_dtype": "float32"}
        tensors |= {
            "weight.absmax": codes256.to(torch.uint8),
            "weight.nested_absmax": largest,
            "weight.nested_quant_map": map256,
        }
    codes = ((apart / most[:, None])[..., None] - table).abs().argmin(-1)
    flat = codes.flatten()
    tensors["weight"] = (flat[::2] << 4 | flat[1::2]).to(torch.uint8).view(-1, 1)
    encoded = json.dumps(settings).encode()
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(encoded), dtype=torch.uint8)
    return tensors, (table[codes] * most[:, None]).view(weight.shape)


def llm_int8(weight: Tensor) -> Stored:
    """bitsandbytes' int8."""
    most = weight.abs().amax(1)
    codes = (weight / most[:, None] * 127).round().to(torch.int8)
    return {"weight": codes, "SCB": most, "weight_format": torch.tensor(0, dtype=torch.uint8)}, codes.float() * (
        most / 127
    )[:, None]


def _apart(numbers: Tensor, size: int) -> Tensor:
    return numbers.reshape(len(numbers), -1, size)


def shuffled(columns: int, group: int) -> Tensor:
    """The groups of columns that were taken by importance."""
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    groups = torch.empty(columns, dtype=torch.long)
    groups[order] = torch.arange(columns) // group
    return groups


Layout = Callable[[Tensor], Stored]
