"""RMSNorm and gated activations against the reference: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from sapwood_kernels import reference

pytest.importorskip("triton", reason="Triton is not installed")
norm = pytest.importorskip("sapwood_kernels.triton_norm")
activation = pytest.importorskip("sapwood_kernels.triton_activation")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 100), (3, 1280)])
def test_rms_norm_equals_the_reference_also_of_rows_that_lie_apart(rows: int, width: int):
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 2 * width)[:, :width] * 5, torch.rand(width) + 0.5
    wide = torch.empty(rows, 2 * width, device=DEVICE)
    wide[:, :width] = x
    got = norm.rms_norm(wide[:, :width], weight.to(DEVICE), 1e-5)
    torch.testing.assert_close(got.cpu(), reference.rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 1100)])
def test_gated_activations_equal_the_reference(rows: int, width: int):
    torch.manual_seed(rows)
    x = torch.randn(rows, 2 * width) * 3
    for ours, theirs in (
        (activation.silu_mul, reference.silu_mul),
        (activation.gelu_tanh_mul, reference.gelu_tanh_mul),
    ):
        torch.testing.assert_close(ours(x.to(DEVICE)).cpu(), theirs(x), rtol=1e-4, atol=1e-5)
