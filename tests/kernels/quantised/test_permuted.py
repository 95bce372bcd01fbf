"""Rows in the order of ``triton_many``, against what they are made of."""

from __future__ import annotations

import pytest
import torch

from sapwood_kernels import reference

triton_permuted = pytest.importorskip("sapwood_kernels.quantised.triton_permuted", reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def in_order(x: torch.Tensor) -> torch.Tensor:
    """Input 32 t + 8 j + 4 b + i of each group as its column 32 i + 8 j + 2 t + b."""
    groups = x.reshape(len(x), -1, 4, 4, 2, 4)  # t, j, b, i
    return groups.permute(0, 1, 5, 3, 2, 4).reshape(x.shape)


@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
def test_rows_that_lie_apart_are_put_in_order_after_a_gate(gate):
    torch.manual_seed(0)
    width = 384 * (1 if gate is None else 2)
    x = torch.randn(19, 2 * width, device=DEVICE).bfloat16()[:, width:]
    given = {None: lambda each: each, "silu": reference.silu_mul, "gelu_tanh": reference.gelu_tanh_mul}[gate](x)
    got = triton_permuted.permuted(x, gate=gate)
    torch.testing.assert_close(got, in_order(given), rtol=1e-2, atol=1e-3)
    if gate is None:
        assert torch.equal(got, in_order(given))


def test_a_norm_and_an_order_come_first():
    torch.manual_seed(1)
    x, weight = torch.randn(3, 640, device=DEVICE).half(), torch.rand(640, device=DEVICE)
    order = torch.randperm(640, device=DEVICE)
    got = triton_permuted.permuted(x, order=order, norm=(weight, 1e-5))
    wanted = in_order(reference.rms_norm(x, weight, 1e-5).index_select(1, order))
    torch.testing.assert_close(got, wanted, rtol=2e-3, atol=1e-4)
