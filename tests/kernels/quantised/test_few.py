"""Products of one row and of few with 4-bit groups against its definition: on a GPU, else with the kernel's body in torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from sapwood_kernels import reference
from sapwood_kernels.quantised.grouped import GroupedWeight, dequantise, round_to_groups
from tests.kernels.quantised.gluon_in_torch import in_torch

triton_few = pytest.importorskip("sapwood_kernels.quantised.triton_few", reason="Triton is not installed")
triton_one = pytest.importorskip("sapwood_kernels.quantised.triton_one", reason="Triton is not installed")
triton_one_wide = pytest.importorskip("sapwood_kernels.quantised.triton_one_wide", reason="Triton is not installed")
cuda = pytest.importorskip("sapwood_kernels.ops.cuda", reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 else "cpu"
GATES = {"silu": reference.silu_mul, "gelu_tanh": reference.gelu_tanh_mul}


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(triton_few, "_few_kernel", in_torch(triton_few._few_kernel, _quarters=triton_few._quarters))
        others = {name: getattr(triton_one, name) for name in ("_held", "_digits", "_larger", "store_output")}
        monkeypatch.setattr(triton_one, "_one_kernel", in_torch(triton_one._one_kernel, **others))
        others = {
            name: getattr(triton_one_wide, name) for name in ("_pair_codes", "_pair_values", "_taken", "store_output")
        }
        monkeypatch.setattr(triton_one_wide, "_one_kernel", in_torch(triton_one_wide._one_kernel, **others))


def made(rows: int, columns: int, group: int, dtype: torch.dtype) -> GroupedWeight:
    weight = round_to_groups(torch.randn(rows, columns).to(dtype), group)
    return replace(weight, **{name: getattr(weight, name).to(DEVICE) for name in ("codes", "scales", "zeros")})


def near(got: Tensor, wanted: Tensor) -> None:
    limit = 0.004 if got.dtype == torch.bfloat16 else 0.0005
    assert got.shape == wanted.shape
    assert float((got.float() - wanted).norm() / wanted.norm()) < limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("count", "columns", "group"), [(1, 640, 128), (3, 1280, 256), (8, 640, 640), (13, 1152, 128)])
def test_products_are_those_of_the_numbers(dtype, count, columns, group):
    torch.manual_seed(count)
    weight = made(128, columns, group, dtype)
    assert triton_few.serves(weight, dtype)
    x = torch.randn(count, 2 * columns, device=DEVICE).to(dtype)[:, columns:]  # rows that lie apart
    near(triton_few.few_rows(x, weight), x.float() @ dequantise(weight).t())


@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("alone", [False, True])
def test_gate_bias_and_sum_are_taken_along_by_weights_of_any_kind(alone, gate, biased):
    """By two rows, and by a row alone, which is normed as well."""
    seed, count, columns = (3, 1, 1536) if alone else (2, 2, 640)
    torch.manual_seed(seed)
    order, factors = torch.randperm(columns, device=DEVICE), torch.rand(128, 1, device=DEVICE) + 0.5
    weight = replace(made(128, columns, 128, torch.bfloat16), zeros=None, order=order, factors=factors)
    x = torch.randn(count, columns, device=DEVICE).bfloat16()
    product, taken = triton_few.few_rows, x.float()
    if alone:
        norm = torch.rand(columns, device=DEVICE) + 0.5, 1e-5
        product, taken = partial(triton_one.one_row, norm=norm), reference.rms_norm(taken, *norm)
    bias = torch.randn(128, device=DEVICE).bfloat16() if biased else None
    wanted = taken @ dequantise(weight).t()
    if bias is not None:
        wanted += bias.float()
    if gate is not None:
        wanted = GATES[gate](wanted)
    total = torch.randn_like(wanted).bfloat16()
    wanted += total.float()
    assert product(x, weight, bias=bias, gate=gate, add_to=total) is total
    near(total, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [512, 1024, 3584, 14336])
@pytest.mark.parametrize("normed", [True, False])
def test_a_row_alone_is_normed_and_multiplied(dtype, columns, normed):
    torch.manual_seed(columns)
    weight = made(64, columns, 128, dtype)
    assert triton_one.serves(weight, dtype)
    x = torch.randn(1, columns, device=DEVICE).to(dtype) * 3
    norm = torch.rand(columns, device=DEVICE) + 0.5
    wanted = x.float()
    if normed:
        wanted = reference.rms_norm(wanted, norm, 1e-6)
    near(triton_one.one_row(x, weight, norm=(norm, 1e-6) if normed else None), wanted @ dequantise(weight).t())


@pytest.mark.parametrize("outlier", [1.0, 300.0, 1e4])
def test_a_row_alone_is_multiplied_exactly_beside_an_outlier(outlier):
    torch.manual_seed(4)
    weight = made(64, 1024, 128, torch.bfloat16)
    x = torch.randn(1, 1024, device=DEVICE).bfloat16()
    x[0, 77] = outlier
    got = triton_one.one_row(x, weight, dtype=torch.float32)
    wanted = x.double() @ dequantise(weight).double().t()
    others = wanted - x[:, 77].double() * dequantise(weight)[:, 77].double()
    # Digits are of 23 bits of the largest: next to 10 000, others are known to 0.0024.
    assert float((got - wanted).norm() / others.norm()) < 3e-6 + 1e-6 * outlier


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_a_row_of_what_is_no_number_gives_none_and_zeros_give_zeros(value):
    x = torch.full((1, 512), 1.0 if value else 0.0, device=DEVICE).bfloat16()
    x[0, 3] = value
    got = triton_one.one_row(x, made(64, 512, 128, torch.bfloat16), dtype=torch.float32)
    assert not got.isfinite().any() if value else not got.any()


@pytest.mark.parametrize("blocks", [(1, 4, 1, 1), (2, 1, 4, 2), (4, 2, 2, 1)])
def test_a_row_alone_is_the_same_whatever_a_program_takes(blocks):
    torch.manual_seed(5)
    weight, x = made(128, 1024, 128, torch.bfloat16), torch.randn(1, 1024, device=DEVICE).bfloat16()
    gate = "silu" if blocks[2] > 1 else None
    got, wanted = (triton_one.one_row(x, weight, gate=gate, blocks=each) for each in (triton_one.Blocks(*blocks), None))
    near(got, wanted.float())


def test_a_hopper_takes_the_row_kernel_up_to_16_rows_and_gemv_for_other_weights(monkeypatch):
    ops = cuda.CudaOps(torch.device(DEVICE))
    monkeypatch.setattr(ops, "_hopper", True)
    few = ops.grouped_few(made(128, 640, 128, torch.bfloat16), None, torch.bfloat16)
    assert few is not None and (few.most, few.norm) == (16, 0)
    one = ops.grouped_few(made(128, 1024, 128, torch.bfloat16), None, torch.bfloat16)
    assert one is not None and (one.most, one.norm) == (16, 1)
    row, norm = torch.randn(1, 1024, device=DEVICE).bfloat16(), (torch.ones(1024, device=DEVICE), 1e-6)
    assert one.product(row, norm=norm, gate="silu").shape == (1, 64)
    assert one.product(row.expand(2, -1), gate="silu").shape == (2, 64)
    x = torch.randn(2, 640, device=DEVICE).bfloat16()
    assert few.product(x, gate="silu").shape == (2, 64)
    other = ops.grouped_few(made(128, 640, 64, torch.bfloat16), None, torch.bfloat16)
    assert other is not None and (other.most, other.norm) == (1, 1)


@pytest.mark.parametrize("fails", ["says something else", "says nothing", "cannot be compiled"])
def test_a_kernel_of_one_row_that_fails_is_not_used(monkeypatch, fails):
    ops = cuda.CudaOps(torch.device(DEVICE))
    monkeypatch.setattr(ops, "_hopper", True)
    right, calls = triton_one.one_row, []

    def one_row(x, weight, **others):
        calls.append(x)
        if fails == "cannot be compiled":
            raise RuntimeError(fails)
        return right(x, weight, **others) * (1.1 if fails == "says something else" else float("nan"))

    monkeypatch.setattr(triton_one, "one_row", one_row)
    weight = made(128, 1024, 128, torch.bfloat16)
    few = ops.grouped_few(weight, None, torch.bfloat16)
    assert few is not None and (few.most, few.norm) == (16, 0)
    tried = len(calls)
    x = torch.randn(1, 1024, device=DEVICE).bfloat16()
    near(few.product(x), x.float() @ dequantise(weight).t())
    assert ops.grouped_few(made(128, 1024, 128, torch.bfloat16), None, torch.bfloat16).norm == 0
    assert tried and len(calls) == tried


def test_tiles_divide_every_weight_that_is_served():
    for rows in (64, 4096, 6144, 16384, 28672):
        for columns in (128, 4096, 14336):
            for count in (1, 2, 16):
                for gated in (False, True):
                    splits, wide, tall, _ = triton_few.block_shape(count, rows, columns, gated=gated)
                    assert rows % (16 * wide * tall) == 0
                    assert splits * wide in (1, 2, 4, 8)


def test_shares_of_a_row_alone_are_whole():
    for rows in (64, 28672):
        for columns in (512, 2560, 3584, 4096, 5120, 8192, 12288, 14336, 28672):
            for gated in (False, True):
                shape = triton_one.block_shape(rows, columns, gated=gated)
                assert shape is not None
                shares, wide, tall, depth = shape
                assert columns % (256 * shares) == 0 and 1 <= depth <= columns // (256 * shares) <= 8
                assert rows % (16 * wide * tall) == 0 and shares * wide <= 16
                shares, tall, depth = triton_one_wide.block_shape(columns, gated=gated)
                assert columns % (256 * shares) == 0 and 1 <= depth <= columns // (256 * shares) <= 8
                assert rows % (16 * tall) == 0
    assert triton_one.block_shape(4096, 11008, gated=False) is None  # 43 pairs of groups


def test_other_weights_are_left_to_others():
    weight = made(128, 640, 64, torch.bfloat16)
    assert not triton_few.serves(weight, torch.bfloat16)
    assert not triton_few.serves(made(96, 640, 128, torch.bfloat16), torch.bfloat16)
    assert not triton_few.serves(made(128, 640, 128, torch.bfloat16), torch.float32)
