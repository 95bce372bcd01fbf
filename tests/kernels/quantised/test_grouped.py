"""Products with weights of 4 and 8 bits against their definition: torch's, and the kernels', on a GPU or interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sapwood_kernels import reference
from sapwood_kernels.native.products import load_library
from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.ops.factory import device_ops
from sapwood_kernels.quantised import int8
from sapwood_kernels.quantised.cpu_grouped import can_pack, plain_product
from sapwood_kernels.quantised.grouped import GroupedWeight, dequantise, joined, pack4, round_to_groups

pytest.importorskip("triton", reason="Triton is not installed")
triton_row = pytest.importorskip("sapwood_kernels.quantised.triton_row")
triton_int8 = pytest.importorskip("sapwood_kernels.quantised.triton_int8")
triton_grouped = pytest.importorskip("sapwood_kernels.quantised.triton_grouped")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GATES = {"silu": reference.silu_mul, "gelu_tanh": reference.gelu_tanh_mul}
KINDS = {
    # bits, group, what else
    "int4 with zeros": (4, 32, "zeros"),
    "int4 of a whole row": (4, 0, "zeros"),
    "int4 in order": (4, 32, "order"),
    "4 bits with mins": (4, 32, "mins"),
    "8 bits with mins and factors": (8, 16, "mins and factors"),
    "a table": (4, 32, "table"),
    "a table with factors": (4, 16, "factors"),
    "8 bits with zeros": (8, 32, "zeros"),
    "float8": (8, 64, "float8"),
    "float8 by rows": (8, 0, "float8"),
}


def made(kind: str, rows: int = 16, columns: int = 160) -> GroupedWeight:
    bits, group, what = KINDS[kind]
    draw = torch.Generator().manual_seed(rows + columns)
    groups = -(-columns // group) if group else 1
    codes = torch.randint(1 << bits, (rows, columns), generator=draw).to(torch.uint8)
    if bits == 4:
        codes = pack4(codes)
    if what == "float8":
        codes = torch.randn(rows, columns, generator=draw).to(torch.float8_e4m3fn)
    scales = (torch.rand(rows, groups, generator=draw) + 0.1).half()
    zeros = torch.randint(1 << bits, (rows, groups), generator=draw).to(torch.uint8)
    return GroupedWeight(
        codes.to(DEVICE),
        scales.to(DEVICE),
        group or columns,
        columns,
        bits=bits,
        zeros=zeros.to(DEVICE) if what in ("zeros", "order") else None,
        table=torch.randn(16, generator=draw).to(DEVICE) if what in ("table", "factors") else None,
        factors=(torch.rand(rows, 1, generator=draw) + 0.5).to(DEVICE) if "factors" in what else None,
        mins=torch.randn(rows, groups, generator=draw).to(DEVICE) if "mins" in what else None,
        order=torch.randperm(columns, generator=draw).to(DEVICE) if what == "order" else None,
    )


def near(got: Tensor, wanted: Tensor, limit: float = 1e-5) -> None:
    assert got.shape == wanted.shape
    assert float((got.float() - wanted.float()).norm() / wanted.float().norm()) < limit


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [160, 150])
def test_the_plain_product_is_that_of_the_numbers(kind: str, columns: int):
    weight = made(kind, columns=columns)
    x = torch.randn(5, columns, device=DEVICE)
    near(plain_product(weight)(x), x @ dequantise(weight).t())


@pytest.mark.skipif(DEVICE == "cuda", reason="a CPU's")
@pytest.mark.skipif(load_library() is None, reason="nothing is compiled: python hatch_build.py")
def test_a_cpu_packs_groups_of_4_bits_and_multiplies_with_the_same_numbers():
    weight = made("int4 in order")
    assert can_pack(weight)
    assert not can_pack(made("a table"))
    product = device_ops("cpu").grouped(weight)
    torch.testing.assert_close(product(torch.eye(160)), dequantise(weight).t(), rtol=0, atol=0)
    x = torch.randn(5, 160)
    near(product(x), x @ dequantise(weight).t())
    near(product(x.bfloat16()), x.bfloat16().float() @ dequantise(weight).t(), 0.005)


@pytest.mark.skipif(DEVICE == "cuda" or load_library() is None, reason="a CPU's, compiled from C")
@pytest.mark.parametrize("group", [32, 64, 128, 640])
@pytest.mark.parametrize("zeros", [True, False])
def test_a_cpu_s_product_is_that_of_the_numbers_for_few_tokens_and_many(group: int, zeros: bool):
    torch.manual_seed(4)
    weight = round_to_groups(torch.randn(37, 640).bfloat16(), group)
    if not zeros:
        weight = replace(weight, zeros=None)
    product = device_ops("cpu").grouped(weight)
    torch.testing.assert_close(product(torch.eye(640)), dequantise(weight).t(), rtol=0, atol=0)
    for tokens in (1, 9, 40):
        x = torch.randn(tokens, 640)
        near(product(x), x @ dequantise(weight).t(), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_s_product_of_many_rows_is_that_of_the_numbers(kind: str):
    weight = made(kind, columns=150)
    assert triton_grouped.serves(weight)
    x = torch.randn(20, 150, device=DEVICE)
    near(triton_grouped.product(x, weight, 1, (16, 16, 64, 4, 2)), x @ dequantise(weight).t())
    near(triton_grouped.widened(weight, torch.float32), dequantise(weight, ordered=False), 1e-6)


@pytest.mark.parametrize(
    ("kind", "normed", "gate", "biased"),
    [
        *((kind, True, "silu", True) for kind in KINDS),
        ("int4 in order", False, None, True),
        ("a table", True, "gelu_tanh", False),
    ],
)
def test_the_kernel_s_product_of_one_row_takes_norm_gate_and_sum_along(
    kind: str, normed: bool, gate: str, biased: bool
):
    weight = made(kind, columns=150)
    assert triton_row.serves(weight)
    torch.manual_seed(1)
    x, factors = torch.randn(1, 150, device=DEVICE), torch.rand(150, device=DEVICE) + 0.5
    bias = torch.randn(16, device=DEVICE) if biased else None
    expected = (reference.rms_norm(x, factors, 1e-6) if normed else x) @ dequantise(weight).t()
    if bias is not None:
        expected = expected + bias
    if gate is not None:
        expected = GATES[gate](expected)
    total = torch.randn_like(expected)
    wanted = total + expected
    norm = (factors, 1e-6) if normed else None
    got = triton_row.row_product(x, weight, bias=bias, norm=norm, gate=gate, add_to=total, blocks=(8, 64, 1))
    assert got is total
    near(total, wanted, 1e-4)


def test_neighbours_of_one_layout_become_one_weight():
    one, other = made("float8"), made("float8", rows=16)
    (both,) = joined([one, other])
    torch.testing.assert_close(dequantise(both), torch.cat((dequantise(one), dequantise(other))), rtol=0, atol=0)
    assert len(joined([one, made("int4 with zeros"), made("int4 in order")])) == 3


def test_rounding_to_groups_loses_half_a_step_at_most():
    weight = torch.randn(8, 256) * torch.logspace(-3, 3, 8)[:, None]
    rounded = round_to_groups(weight, 64)
    error = (dequantise(rounded) - weight).abs().view(8, 4, 64).amax(-1)
    assert (error <= 1.02 * rounded.scales).all()  # half a step for the number, half a step for the zero
    assert rounded.codes.shape == (8, 128)


def test_int8_products_are_exact_but_for_the_rounding_of_activations():
    x, weight, scales = torch.randn(20, 150), torch.randint(-127, 128, (16, 150)).to(torch.int8), torch.rand(16, 1)
    codes, own = int8.quantise_rows(x)
    assert ((codes * own - x).abs() <= 0.501 * own).all()
    expected = (codes.double() @ weight.double().t() * own * scales.t()).float()
    torch.testing.assert_close(int8.product(x, weight, scales), expected)
    got = triton_int8.product(x.to(DEVICE), weight.to(DEVICE), scales.to(DEVICE), 1, (16, 16, 64, 4, 2))
    near(got.cpu(), expected, 1e-3)  # halves may be rounded to the other side


@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
def test_an_int8_product_takes_norm_gate_and_sum_along(gate):
    torch.manual_seed(5)
    x, weight, scales = torch.randn(20, 300), torch.randint(-127, 128, (16, 150)).to(torch.int8), torch.rand(16, 1)
    norm = None
    if gate is None:
        x, norm = x[:, :150] * 3, (torch.rand(150) + 0.5, 1e-5)
    before = reference.rms_norm(x, *norm) if norm is not None else GATES[gate](x)
    total = torch.randn(20, 16)
    wanted = total + int8.product(before, weight, scales)
    settings = {
        "norm": None if norm is None else (norm[0].to(DEVICE), norm[1]),
        "gate": gate,
        "add_to": total.clone().to(DEVICE),
    }
    got = triton_int8.product(x.to(DEVICE), weight.to(DEVICE), scales.to(DEVICE), 1, (16, 16, 64, 4, 2), **settings)
    assert got is settings["add_to"]
    near(got.cpu(), wanted, 1e-3)  # halves may be rounded to the other side
    assert DeviceOps(torch.device("cpu")).int8_product(x, weight, scales, norm=norm, gate=gate, add_to=total) is total
    torch.testing.assert_close(total, wanted)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("outputs", [16, 12])  # whole tiles of both halves, and a tile that ends beyond the last output
def test_a_gate_after_an_int8_product_reads_both_halves_of_the_weight(gate, outputs):
    torch.manual_seed(6)
    x, norm = torch.randn(20, 128), (torch.rand(128) + 0.5, 1e-5)
    weight, scales = torch.randint(-127, 128, (2 * outputs, 128)).to(torch.int8), torch.rand(2 * outputs, 1) / 500
    wanted = GATES[gate](int8.product(reference.rms_norm(x, *norm), weight, scales))
    around = {"norm": (norm[0].to(DEVICE), norm[1]), "gate_after": gate}
    got = triton_int8.product(x.to(DEVICE), weight.to(DEVICE), scales.to(DEVICE), 1, (16, 16, 64, 4, 2), **around)
    assert got.shape == (20, outputs)
    near(got.cpu(), wanted, 1e-3)
    own = DeviceOps(torch.device("cpu")).int8_product(x, weight, scales, norm=norm, gate_after=gate)
    torch.testing.assert_close(own, wanted)
