"""A linear layer in float8 (W8A8): weights are quantised once, activations in each call.

There are three ways of scaling. By row: one scale for each output channel of the weight and for each token; finer than by tensor
and, for many tokens, as fast on an H200. By tensor: one scale for the weight and one for all tokens of a step; products of few
tokens are faster, but the scale takes a pass of its own over the activations. By block: one scale for each 128 x 128 numbers of
the weight and each 128 of a token, as in DeepSeek-V3's (2024) checkpoints. On CUDA ``torch._scaled_mm`` multiplies. Where it does
not take such scales (blocks where K / 128 is not a multiple of 4), and on CPUs, the same rounded numbers are multiplied in the
model's dtype: the reference, slow on a GPU, since it widens the weight for each product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels import reference
from sapwood_kernels.ops.device import GROUP, DeviceOps, Gate

Scaling = Literal["row", "block", "tensor"]

_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class Quantised:
    """Activations in float8.

    Attributes:
        values: float8_e4m3fn [at least T, K].
        scales: float32 [at least T, 1 or K / 128]; [1, 1] by tensor.
        rows: T.
    """

    values: Tensor
    scales: Tensor
    rows: int


def can_quantise(weight: Tensor) -> bool:
    """Whether the GPU's matrix units take a weight of this shape."""
    return weight.shape[0] % _ALIGNED == 0 and weight.shape[1] % _ALIGNED == 0


class Float8Linear:
    """``x @ weight.T + bias``.

    Args:
        weight: [N, K], which :func:`can_quantise`; not kept.
        bias: [N].
        ops: The operations of the weight's device.
        scaling: Which numbers share a scale; by block only where both sides of the weight are multiples of 128, else by row.

    Attributes:
        weight: float8_e4m3fn [N, K].
        scales: float32 [N, 1], [N / 128, K / 128] by block, or [1, 1] by tensor.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, ops: DeviceOps, *, scaling: Scaling) -> None:
        self._tensor = scaling == "tensor"
        self._block = scaling == "block" and weight.shape[0] % GROUP == 0 and weight.shape[1] % GROUP == 0
        self._bias = bias
        self._dtype = weight.dtype
        if self._block:
            self.weight, scales = reference.quantise_blocks(weight)
            # cuBLAS wants rows of a multiple of 4 scales in memory.
            self.scales = F.pad(scales, (0, -scales.shape[1] % 4))[:, : scales.shape[1]]
        else:
            quantise = reference.quantise_tensor if self._tensor else reference.quantise_rows
            self.weight, self.scales = quantise(weight)
        self._ops = ops
        self._scaled = self._takes_scales(weight)
        self._dense: Tensor | None = None
        if not self._scaled and not ops.asynchronous:  # a GPU's memory holds it once
            self._dense = reference.dequantise_blocks(self.weight, self.scales).to(self._dtype)

    @property
    def row_scales(self) -> Tensor:
        """The scales where they are by block, else one for each output channel: [N / 128, K / 128] or [N, 1]."""
        return self.scales.expand(len(self.weight), 1).contiguous() if self._tensor else self.scales

    def quantise(self, x: Tensor) -> Quantised:
        """Quantises x [T, K]."""
        if self._tensor:
            return Quantised(*self._ops.quantise_tensor(x), x.shape[0])
        return Quantised(*self._ops.quantise(x, grouped=self._block), x.shape[0])

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Quantised:
        """Norms x [T, K] (RMSNorm with ``weight``, float32 [K]), then quantises it."""
        if self._tensor:
            return self.quantise(self._ops.rms_norm(weight, eps, x.dtype)(x))
        return Quantised(*self._ops.quantise_normed(x, weight, eps, grouped=self._block), x.shape[0])

    def gate(self, gate_up: Tensor, gate: Gate) -> Quantised:
        """Applies a gated activation to [T, 2K], then quantises the result [T, K]."""
        if self._tensor:
            return self.quantise(self._ops.gated(gate)(gate_up))
        return Quantised(*self._ops.quantise_gated(gate_up, gate, grouped=self._block), gate_up.shape[0])

    def __call__(self, x: Quantised) -> Tensor:
        """Multiplies: a new tensor [T, N]."""
        if not self._scaled:
            wide = reference.dequantise_blocks(x.values[: x.rows], x.scales[: x.rows]).to(self._dtype)
            dense = self._dense
            if dense is None:
                dense = reference.dequantise_blocks(self.weight, self.scales).to(self._dtype)
            return F.linear(wide, dense, self._bias)
        result = self._scaled_product(x)
        return result if self._bias is None else result.add_(self._bias)

    def _scaled_product(self, x: Quantised) -> Tensor:
        # Products are summed with fewer bits than float32 has; that error is far below float8's rounding.
        dtype = torch.bfloat16 if self._dtype == torch.float32 else self._dtype  # torch cannot return float32 here
        product = self._ops.scaled_product((x.values, x.scales), (self.weight, self.scales), dtype, exact=self._block)
        return product[: x.rows].to(self._dtype)

    def _takes_scales(self, weight: Tensor) -> bool:
        try:
            self._scaled_product(self.quantise(weight.new_zeros(1, weight.shape[1])))
        except RuntimeError:
            return False
        return True
