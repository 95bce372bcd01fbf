"""A CPU's operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from sapwood_kernels import cpu
from sapwood_kernels.gguf.products import TYPES, GgufLibrary, GgufProduct, load_library
from sapwood_kernels.ops.device import DeviceOps, Gate, StoredProduct
from sapwood_kernels.quantised.cpu_grouped import PackedGroups, can_pack
from sapwood_kernels.quantised.grouped import GroupedWeight


class CpuOps(DeviceOps):
    """The operations of ``cpu.py`` where they apply."""

    default_dtype: Literal["float32", "bfloat16"] = "float32"

    @cached_property
    def _gguf(self) -> GgufLibrary | None:
        return load_library()

    def rms_norm(self, weight: Tensor, eps: float, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        return cpu.RmsNorm(weight, eps) if dtype == torch.float32 else super().rms_norm(weight, eps, dtype)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return cpu.rope(x, cos, sin)

    def gated(self, gate: Gate) -> Callable[[Tensor], Tensor]:
        return cpu.silu_mul if gate == "silu" else cpu.gelu_tanh_mul

    def packed(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        return cpu.PackedLinear(weight, bias) if cpu.can_pack(weight) else None

    def grouped(self, weight: GroupedWeight) -> Callable[[Tensor], Tensor]:
        return PackedGroups(weight) if can_pack(weight) else super().grouped(weight)

    def gguf_product(self, parts: Sequence[tuple[str, Tensor]], columns: int) -> StoredProduct | None:
        if self._gguf is None or any(kind not in TYPES for kind, _ in parts):
            return None
        return GgufProduct(self._gguf, parts, columns)
