"""Experts in float8 blocks with rounded inputs against the reference: on a GPU, else in Triton's interpreter and in torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sapwood_kernels import reference
from sapwood_kernels.experts.reference import expert_sum
from sapwood_kernels.experts.stack import StackOfProducts, StoredStack
from sapwood_kernels.experts.tiles.plan import TilePlan, TileShape
from tests.kernels.quantised.gluon_in_torch import in_torch

blocks = pytest.importorskip("sapwood_kernels.experts.triton_float8_blocks", reason="Triton is not installed")
triton_experts = pytest.importorskip("sapwood_kernels.experts.triton_experts")
triton_align = pytest.importorskip("sapwood_kernels.experts.tiles.triton_align")
many_tokens = pytest.importorskip("sapwood_kernels.experts.triton_many_tokens")
many = pytest.importorskip("sapwood_kernels.experts.triton_many_float8")
cuda = pytest.importorskip("sapwood_kernels.ops.cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS, HIDDEN = 3, 384
GATES = {"silu": reference.silu_mul, "gelu_tanh": reference.gelu_tanh_mul}


def quantise(x, *, grouped):
    """``triton_float8.quantise`` in torch: the interpreter rounds some numbers to float8 in a way of its own."""
    assert grouped
    codes, scales = reference.quantise_rows(x, blocks.BLOCK)
    return codes, scales.t().contiguous().t()


@pytest.fixture(autouse=True)
def _where_there_is_no_gpu(monkeypatch):
    """Many pairs are sorted in several parts."""
    monkeypatch.setattr(triton_align, "_BLOCK", 128)
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda.triton_float8, "quantise", quantise)
        of_tokens = {name: getattr(many_tokens, name) for name in ("_active", "_fill")}
        others = {"_multiply": many._multiply, **of_tokens}
        monkeypatch.setattr(many, "_grouped_float8_kernel", in_torch(many._grouped_float8_kernel, **others))


def stack(outputs, columns, generator, *, rounds="block"):
    codes = torch.empty(EXPERTS, outputs, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(EXPERTS, outputs // blocks.BLOCK, columns // blocks.BLOCK)
    for each in range(EXPERTS):
        weight = torch.randn(outputs, columns, generator=generator) / columns**0.5
        weight *= torch.rand(outputs // blocks.BLOCK, 1, generator=generator).repeat_interleave(blocks.BLOCK, 0) + 0.5
        codes[each], scales[each] = reference.quantise_blocks(weight)
    return StoredStack(codes.to(DEVICE), scales.to(DEVICE), blocks.BLOCK, rounds=rounds, tall=blocks.BLOCK)


def made(tokens, inner, dtype=torch.bfloat16, chosen=2):
    """Some pairs are of an expert that is not here, and the last one is hit by none."""
    generator = torch.Generator().manual_seed(tokens)
    noise = torch.rand(tokens, EXPERTS + 1, generator=generator)
    noise[:, EXPERTS - 1] = -1
    x = torch.randn(tokens, HIDDEN, generator=generator) * torch.rand(tokens, 1, generator=generator)
    ids, weights = noise.topk(chosen, -1).indices.int(), torch.rand(tokens, chosen, generator=generator)
    stacks = stack(2 * inner, HIDDEN, generator), stack(HIDDEN, inner, generator)
    return x.to(dtype).to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), *stacks


def of_rounded(each):
    """The products of a stack's experts with inputs rounded by groups, in float64."""

    def product_of(expert):
        def product(x):
            codes, scales = reference.quantise_rows(x, blocks.BLOCK)
            wide = reference.dequantise_blocks(each.codes[expert], each.scales[expert])
            return (reference.dequantise_blocks(codes, scales).double() @ wide.double().T).float()

        return product

    return StackOfProducts([product_of(expert) for expert in range(EXPERTS)], each.outputs)


def near(ours, theirs, most):
    """A number between two codes of float8 may go to either, so that few may differ by more."""
    assert ours.dtype == theirs.dtype
    assert (ours.float() - theirs.float()).norm() <= most * theirs.float().norm()


def plan(height, width):
    shape = TileShape(width, 128, 4, 3)
    return lambda pairs: TilePlan(height, shape, shape)


@pytest.mark.parametrize(
    ("tokens", "height", "width", "gate"), [(5, 16, 64, "silu"), (20, 32, 128, "gelu_tanh"), (9, 128, 256, "silu")]
)
def test_the_sum_is_that_of_rounded_inputs(tokens, height, width, gate):
    parts = made(tokens, 256 if height == 16 else 128, torch.float32)
    ours = triton_experts.expert_sum(*parts, gate, plan(height, width))
    theirs = expert_sum(*parts[:3], *map(of_rounded, parts[3:]), GATES[gate])
    near(ours, theirs, 0.004)
    unrounded = expert_sum(*parts, GATES[gate])
    assert (ours - theirs).norm() < 0.2 * (theirs - unrounded).norm()


@pytest.mark.parametrize(("height", "width"), [(16, 128), (128, 64)])
def test_a_product_is_within_float32s_rounding(height, width):
    x, ids, _, gate_up, _ = made(9, 128, torch.float32)
    tiles, shape = triton_align.align(ids, EXPERTS, height), TileShape(width, 128, 4, 3)
    ours = blocks.product(quantise(x, grouped=True), gate_up, tiles, ids.numel(), 2, shape, torch.float32)
    wanted = of_rounded(gate_up)
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert < EXPERTS:
            theirs = wanted.product(expert, x[pair // 2][None])[0]
            assert (ours[pair] - theirs).abs().max() < (1e-5 if DEVICE == "cpu" else 1e-3) * theirs.abs().max()


@pytest.mark.parametrize(("height", "rounds"), [(16, None), (1, "block")])
def test_inputs_that_may_not_be_rounded_are_not_nor_those_of_few_tokens(height, rounds):
    x, ids, weights, *stacks = made(5, 128, torch.float32)
    stacks = [replace(each, rounds=rounds) for each in stacks]
    ours = triton_experts.expert_sum(x, ids, weights, *stacks, "silu", plan(height, 64))
    near(ours, expert_sum(x, ids, weights, *stacks, reference.silu_mul), 1e-3 if DEVICE == "cuda" else 1e-5)


def test_gates_and_ups_are_whole_blocks_each():
    generator = torch.Generator().manual_seed(2)
    for outputs, alone, gated in ((384, True, False), (512, True, True)):
        matrices = stack(outputs, HIDDEN, generator)
        assert (blocks.serves(matrices), blocks.serves(matrices, "silu")) == (alone, gated)


@pytest.mark.parametrize(
    ("tokens", "inner", "processors", "gate", "dtype"),
    [
        (66, 256, 1, "silu", torch.bfloat16),
        (140, 128, 3, "gelu_tanh", torch.bfloat16),
        (70, 128, 100, "silu", torch.float16),
    ],
)
def test_many_tokens_by_programs_that_stay(tokens, inner, processors, gate, dtype):
    """Tiles are not all full, nor is the second 256 of the 384 columns."""
    parts = made(tokens, inner, dtype)
    ours = many.expert_sum(*parts, gate, processors)
    up, down = parts[3:]
    wide = parts[0].float(), *parts[1:3]
    theirs = expert_sum(*wide, of_rounded(up), of_rounded(down), GATES[gate])
    near(ours, theirs.to(dtype), 0.01)
    unrounded = expert_sum(*wide, up, down, GATES[gate])
    assert (ours - theirs).norm() < 0.4 * (theirs - unrounded).norm()


def test_many_tokens_are_added_to_what_is_there_or_go_nowhere():
    x, ids, weights, *stacks = made(66, 128)
    before = torch.randn(66, HIDDEN).bfloat16().to(DEVICE)
    total = before.clone()
    assert many.expert_sum(x, ids, weights, *stacks, "silu", 2, total) is total
    near(total, before + many.expert_sum(x, ids, weights, *stacks, "silu", 2), 0.01)
    assert not many.expert_sum(x, torch.full_like(ids, EXPERTS), weights, *stacks, "silu", 2).any()


def test_a_hopper_takes_that_kernel_for_many_tokens_that_may_be_rounded(monkeypatch):
    ops, calls = cuda.CudaOps(torch.device(DEVICE)), []
    monkeypatch.setattr(many, "expert_sum", lambda x, *_, **__: calls.append(len(x)) or x)
    monkeypatch.setattr(cuda.triton_experts, "expert_sum", lambda x, *_, **__: x)
    x, _, weights, *stacks = made(70, 128)
    plain = [replace(each, rounds=None) for each in stacks]
    least = next(pairs for pairs in range(2, 1 << 20, 2) if many.takes(pairs, EXPERTS)) // 2
    for hopper, of, taken in ((True, stacks, True), (True, plain, False), (False, stacks, False)):
        monkeypatch.setattr(ops, "_hopper", hopper)
        summed = ops.expert_sum(*of, "silu", 2)
        for tokens, of_dtype in ((least - 1, x), (least, x), (least, x.float())):
            calls.clear()
            summed(of_dtype, torch.zeros(tokens, 2, dtype=torch.int32, device=DEVICE), weights)
            assert bool(calls) == (taken and tokens == least and of_dtype is x)


def test_the_log_says_once_that_inputs_are_rounded(caplog):
    ops, (*_, up, down) = cuda.CudaOps(torch.device(DEVICE)), made(2, 128)
    with caplog.at_level("INFO"):
        for stacks in ((replace(up, rounds=None), down), (up, down), (up, down)):
            ops.expert_sum(*stacks, "silu", 2)
    assert [each.message for each in caplog.records if "rounded" in each.message] == [
        "experts: inputs are rounded to 8 bits where that pays, by a scale for each 128 of a row"
    ]
