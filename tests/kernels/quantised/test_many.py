"""Products of many rows with 4-bit groups against their definition: on a Hopper, else with the kernel's body in torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sapwood_kernels import reference
from sapwood_kernels.quantised.grouped import dequantise
from tests.kernels.quantised.gluon_in_torch import in_torch
from tests.kernels.quantised.test_few import DEVICE, made, near

triton_many = pytest.importorskip("sapwood_kernels.quantised.triton_many", reason="Triton is not installed")
cuda = pytest.importorskip("sapwood_kernels.ops.cuda", reason="Triton is not installed")


_PARTS = (
    "_added", "_fill_codes", "_fill_inputs", "_flat_quarters", "_in_place", "_multiply", "_numbers", "_ordered", "_quarters",
    "_share", "_side_by_side", "_values",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    if DEVICE == "cpu":
        others = {name: getattr(triton_many, name) for name in _PARTS}
        monkeypatch.setattr(triton_many, "_many_kernel", in_torch(triton_many._many_kernel, **others))


@pytest.mark.parametrize(
    ("dtype", "count", "columns", "group", "processors"),
    [
        (torch.bfloat16, 17, 640, 128, 2),
        (torch.float16, 70, 768, 256, 5),
        (torch.float16, 40, 640, 640, 3),
        (torch.bfloat16, 130, 384, 128, 100),
    ],
)
def test_products_are_those_of_the_numbers_whatever_share_a_program_has(dtype, count, columns, group, processors):
    torch.manual_seed(count)
    weight = made(256, columns, group, dtype)
    assert triton_many.serves(weight, dtype)
    x = torch.randn(count, 2 * columns, device=DEVICE).to(dtype)[:, columns:]  # rows that lie apart
    blocks = triton_many.Blocks(256, 3) if count > 128 else None  # those that larger weights have
    near(triton_many.product(x, weight, processors, blocks=blocks), x.float() @ dequantise(weight).t())


def test_scales_of_another_dtype_an_order_and_no_zeros_are_taken():
    torch.manual_seed(1)
    weight = made(128, 640, 128, torch.float16)
    weight = replace(weight, scales=weight.scales.float(), zeros=None, order=torch.randperm(640, device=DEVICE))
    x = torch.randn(20, 640, device=DEVICE).half()
    near(triton_many.product(x, weight, 3), x.float() @ dequantise(weight).t())


def test_a_ring_that_has_room_for_two_groups_is_filled_again():
    torch.manual_seed(3)
    weight, x = made(128, 640, 128, torch.bfloat16), torch.randn(20, 640, device=DEVICE).bfloat16()
    got = triton_many.product(x, weight, 1, blocks=triton_many.Blocks(32, 2))
    near(got, x.float() @ dequantise(weight).t())


@pytest.mark.parametrize("processors", [1, 3])  # a program has the whole tile, or a part
def test_a_norm_a_gate_and_a_residual_go_along(processors):
    torch.manual_seed(2)
    weight = made(256, 640, 128, torch.float16)
    wide, norm = dequantise(weight).t(), (torch.rand(640, device=DEVICE) + 0.5, 1e-5)
    x, total = torch.randn(20, 1280, device=DEVICE).half(), torch.randn(20, 256, device=DEVICE).half()
    wanted = reference.rms_norm(x[:, :640].float(), *norm) @ wide + total.float()
    assert triton_many.product(x[:, :640], weight, processors, norm=norm, add_to=total) is total
    for got, exact in (
        (total, wanted),
        (triton_many.product(x, weight, processors, gate="silu"), reference.silu_mul(x.float()) @ wide),
    ):
        assert float((got.float() - exact).norm() / exact.norm()) < 0.001


@pytest.mark.timeout(60)
def test_the_kernel_ends_where_marks_were_never_cleared(monkeypatch):
    """As in a rehearsal, which launches what is compiled already and leaves out what is not."""

    def uncleared(x, cleared, **how):
        cleared.fill_(-8)  # of both programs' bits none is set
        return permuted(x, **how)

    torch.manual_seed(4)
    permuted = triton_many.permuted
    monkeypatch.setattr(triton_many, "permuted", uncleared)
    weight, x = made(128, 640, 128, torch.bfloat16), torch.randn(20, 640, device=DEVICE).bfloat16()
    near(triton_many.product(x, weight, 3), x.float() @ dequantise(weight).t())


def test_a_hopper_takes_it_for_17_rows_and_more(monkeypatch):
    ops = cuda.CudaOps(torch.device(DEVICE))
    monkeypatch.setattr(ops, "_hopper", True)
    weight, calls = made(128, 640, 128, torch.bfloat16), []
    monkeypatch.setattr(triton_many, "product", lambda x, **_: calls.append(len(x)) or x)
    assert ops.grouped_many(weight, torch.bfloat16).most == triton_many.MOST
    assert ops.grouped_many(made(64, 640, 128, torch.bfloat16), torch.bfloat16) is None
    product = ops.grouped(weight)
    for count in (16, 17, triton_many.MOST, triton_many.MOST + 1):
        product(torch.randn(count, 640, device=DEVICE).bfloat16())
    product(torch.randn(20, 640, device=DEVICE))
    assert calls == [17, triton_many.MOST]
