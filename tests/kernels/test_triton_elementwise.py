"""RMSNorm, gated activations and digests against the reference: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from sapwood_kernels import reference

pytest.importorskip("triton", reason="Triton is not installed")
norm = pytest.importorskip("sapwood_kernels.triton_norm")
activation = pytest.importorskip("sapwood_kernels.triton_activation")
digest = pytest.importorskip("sapwood_kernels.triton_digest")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 100), (3, 1280)])
def test_rms_norm_equals_the_reference_also_of_rows_that_lie_apart(rows: int, width: int):
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 2 * width)[:, :width] * 5, torch.rand(width) + 0.5
    wide = torch.empty(rows, 2 * width, device=DEVICE)
    wide[:, :width] = x
    got = norm.rms_norm(wide[:, :width], weight.to(DEVICE), 1e-5)
    torch.testing.assert_close(got.cpu(), reference.rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter rounds bfloat16 in its own way
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (5, 1000)])
def test_a_residual_is_added_to_and_normed_in_one_pass_as_in_two(rows: int, width: int, dtype: torch.dtype):
    norm = pytest.importorskip("sapwood_kernels.triton_norm")
    x, residual = torch.randn(2, rows, width).to(DEVICE, dtype).unbind()
    weight, total = torch.rand(width).to(DEVICE), x + residual
    got = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(got, norm.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 1100)])
def test_gated_activations_equal_the_reference(rows: int, width: int):
    torch.manual_seed(rows)
    x = torch.randn(rows, 2 * width) * 3
    for ours, theirs in (
        (activation.silu_mul, reference.silu_mul),
        (activation.gelu_tanh_mul, reference.gelu_tanh_mul),
    ):
        torch.testing.assert_close(ours(x.to(DEVICE)).cpu(), theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (9, 700)])
def test_digests_equal_the_reference_and_tell_a_bit_and_the_order_of_rows(rows: int, width: int):
    torch.manual_seed(rows)
    x = torch.randn(rows, width).bfloat16()
    other, turned = x.clone(), x.flip(0)
    other.view(torch.int16)[-1, 3] ^= 1
    found = []
    for each in (x, other, turned):
        ours, theirs = torch.tensor([5], device=DEVICE), torch.tensor([5])
        digest.add_digest(each.to(DEVICE).contiguous(), ours)
        reference.add_digest(each.contiguous(), theirs)
        assert ours.item() == theirs.item()
        found.append(theirs.item())
    assert found[1] != found[0] and (found[2] != found[0]) == (rows > 1)
