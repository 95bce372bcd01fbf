"""A CPU's operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from sapwood_kernels import cpu
from sapwood_kernels.kv_destination import KVDestination
from sapwood_kernels.native import steps
from sapwood_kernels.native.products import ALL, GgufProduct, NativeLibrary, load_library
from sapwood_kernels.ops.contracts import Gate, StoredProduct, StoreHeads
from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.quantised.cpu_grouped import can_pack, packed_product, packed_weight
from sapwood_kernels.quantised.grouped import GroupedWeight
from sapwood_kernels.quantised.int8 import WeightProduct
from sapwood_kernels.rotary_pairs import RotaryPairs


class CpuOps(DeviceOps):
    """float32 runs what was compiled from C; where that or the type does not serve, the operations of ``cpu.py`` run."""

    default_dtype: Literal["float32", "bfloat16"] = "float32"

    @cached_property
    def native(self) -> NativeLibrary | None:
        """The compiled C library; None: there is none."""
        return load_library()

    def rms_norm(self, weight: Tensor, eps: float, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        if dtype != torch.float32:
            return super().rms_norm(weight, eps, dtype)
        if self.native is not None and weight.dim() == 1 and weight.is_contiguous():
            return steps.norm(self.native, weight, eps)
        return cpu.RmsNorm(weight, eps)

    def store_heads(
        self,
        num_heads: int,
        num_kv_heads: int,
        norm: tuple[Tensor, Tensor, float] | None,
        dtype: torch.dtype,
        pairs: RotaryPairs | None = None,
    ) -> StoreHeads:
        plain = super().store_heads(num_heads, num_kv_heads, norm, dtype, pairs)
        if self.native is None or dtype != torch.float32 or not (pairs is None or pairs.are_halves):
            return plain
        store = steps.StoreHeads(self.native, num_heads, num_kv_heads, norm)

        def store_or_plain(qkv: Tensor, cos: Tensor, sin: Tensor, to: KVDestination) -> Tensor:
            if to.keys.dtype != torch.float32 or not qkv.is_contiguous():
                return plain(qkv, cos, sin, to)
            return store(qkv, cos.contiguous(), sin.contiguous(), to.keys, to.values, to.slots)

        return store_or_plain

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return cpu.rope(x, cos, sin)

    def gated(self, gate: Gate) -> Callable[[Tensor], Tensor]:
        return cpu.silu_mul if gate == "silu" else cpu.gelu_tanh_mul

    def packed(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        return cpu.PackedLinear(weight, bias) if cpu.can_pack(weight) else None

    def grouped(self, weight: GroupedWeight) -> Callable[[Tensor], Tensor]:
        if self.native is not None and can_pack(weight):
            return packed_product(self.native, weight)
        return super().grouped(weight)

    def weight_product(self, weight: Tensor, scales: Tensor) -> WeightProduct:
        if self.native is not None and weight.shape[1] % 32 == 0:
            return packed_weight(self.native, weight, scales)
        return super().weight_product(weight, scales)

    def gguf_product(
        self, parts: Sequence[tuple[str, Tensor]], columns: int, *, digits: int = 0
    ) -> StoredProduct | None:
        if self.native is None or any(kind not in ALL for kind, _ in parts):
            return None
        return GgufProduct(self.native, parts, columns, digits=digits)
