"""What a layer in 4-bit groups has in one pass with its product, by how many rows there are."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood_kernels import reference
from sapwood_kernels.ops.contracts import Gate, ManyRows
from sapwood_kernels.ops.cpu import CpuOps
from sapwood_kernels.quantised.grouped import GroupedWeight, dequantise
from sapwood_worker.model.quantization.grouped import INT4
from sapwood_worker.model.quantization.linear_method import Fuses, LinearShape, Part
from sapwood_worker.model.weight_slot import whole


class _FusesManyRows(CpuOps):
    """A CPU with a product of up to 32 rows that takes along what a GPU's does."""

    def grouped_many(self, weight: GroupedWeight, dtype: torch.dtype) -> ManyRows:
        wide = dequantise(weight).t()

        def product(
            x: Tensor,
            *,
            norm: tuple[Tensor, float] | None = None,
            gate: Gate | None = None,
            add_to: Tensor | None = None,
        ) -> Tensor:
            taken = reference.silu_mul(x) if gate else x if norm is None else reference.rms_norm(x, *norm)
            return taken @ wide if add_to is None else add_to.add_(taken @ wide)

        return ManyRows(product, 32)


class _Norm:
    weight, eps = torch.rand(256) + 0.5, 1e-5


def test_norm_gate_and_residual_are_fused_up_to_most_rows_with_the_bias_once():
    torch.manual_seed(0)
    ops = _FusesManyRows(torch.device("cpu"))
    assert INT4.quantise is not None
    method = INT4.quantise(LinearShape((Part("a", whole(128)),), whole(256), True), torch.float32, ops)
    assert method is not None
    for slot in method.slots().values():
        slot.target.copy_(torch.randn(slot.target.shape))
    method.finish()
    assert method.fuses(32) == Fuses(norm=True, gate_before=True, residual=True)
    assert method.fuses(33) == Fuses()
    x, wide, residual = torch.randn(32, 256), torch.randn(32, 512), torch.randn(32, 128)
    plain = method.apply(torch.cat((reference.rms_norm(x, _Norm.weight, _Norm.eps), reference.silu_mul(wide))))
    wanted = plain[:32] + residual
    assert method.apply(x, norm=_Norm(), residual=residual) is residual  # type: ignore[arg-type]
    torch.testing.assert_close(residual, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(method.apply(wide, gate_before="silu"), plain[32:], rtol=1e-4, atol=1e-4)
