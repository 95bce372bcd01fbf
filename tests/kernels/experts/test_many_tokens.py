"""The sum of a token's experts by programs that stay against the reference: on a Hopper, else with the kernel's body in torch."""

from __future__ import annotations

import pytest
import torch

from sapwood_kernels import reference
from sapwood_kernels.experts.reference import ClampedGate, expert_sum
from sapwood_kernels.experts.stack import DenseStack
from tests.kernels.quantised.gluon_in_torch import in_torch

many = pytest.importorskip("sapwood_kernels.experts.triton_many_tokens", reason="Triton is not installed")
triton_align = pytest.importorskip("sapwood_kernels.experts.tiles.triton_align")
cuda = pytest.importorskip("sapwood_kernels.ops.cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GATES = {"silu": reference.silu_mul, "gelu_tanh": reference.gelu_tanh_mul}


@pytest.fixture(autouse=True)
def _of_few_pairs_too(monkeypatch):
    """Sorted in several parts as many pairs are."""
    monkeypatch.setattr(triton_align, "_BLOCK", 128)
    if DEVICE == "cpu":
        others = {name: getattr(many, name) for name in ("_active", "_fill", "_multiply")}
        monkeypatch.setattr(many, "_grouped_kernel", in_torch(many._grouped_kernel, **others))


def made(tokens, chosen, experts, inner, dtype=torch.bfloat16, width=192):
    generator = torch.Generator().manual_seed(tokens)

    def numbers(*sizes):
        return (torch.randn(*sizes, generator=generator) / sizes[-1] ** 0.5).to(dtype).to(DEVICE)

    stacks = DenseStack(numbers(experts, 2 * inner, width)), DenseStack(numbers(experts, width, inner))
    # Some pairs are of an expert that is not here, and the last one is hit by none.
    noise = torch.rand(tokens, experts + 1, generator=generator)
    noise[:, experts - 1] = -1
    weights = torch.rand(tokens, chosen, generator=generator)
    return numbers(tokens, width) * 8, noise.topk(chosen, -1).indices.int().to(DEVICE), weights.to(DEVICE), *stacks


def near(ours, theirs):
    assert ours.dtype == theirs.dtype
    assert (ours.float() - theirs.float()).abs().max() <= 0.02 * theirs.float().abs().max()


@pytest.mark.parametrize(
    ("tokens", "experts", "inner", "processors", "dtype", "gate"),
    [
        (100, 4, 192, 1, torch.bfloat16, "silu"),
        (70, 5, 320, 3, torch.float16, "gelu_tanh"),
        (66, 3, 64, 100, torch.bfloat16, ClampedGate(limit=1.0)),
    ],
    ids=["one program", "several", "more than work"],
)
def test_the_sum_is_the_references(tokens, experts, inner, processors, dtype, gate):
    """Tiles and blocks of a matrix are not all full, and one is read in a single step."""
    parts = made(tokens, 2, experts, inner, dtype)
    near(many.expert_sum(*parts, gate, processors), expert_sum(*parts, GATES[gate] if isinstance(gate, str) else gate))


def test_the_sum_is_added_to_what_is_there():
    parts = made(90, 3, 4, 192)
    before = torch.randn(90, 192).bfloat16().to(DEVICE)
    total = before.clone()
    assert many.expert_sum(*parts, "silu", 2, total) is total
    near(total, before + expert_sum(*parts, reference.silu_mul))


def test_where_no_expert_is_here_the_sum_is_nothing():
    x, ids, weights, *stacks = made(70, 2, 4, 192)
    assert not many.expert_sum(x, torch.full_like(ids, 4), weights, *stacks, "silu", 2).any()


def test_a_hopper_takes_it_for_many_tokens_of_matrices_that_it_serves(monkeypatch):
    ops, calls = cuda.CudaOps(torch.device(DEVICE)), []
    monkeypatch.setattr(many, "expert_sum", lambda x, *_, **__: calls.append(len(x)) or x)
    x, _, weights, *stacks = made(70, 2, 4, 192)
    biased = [DenseStack(each.weight, each.weight[:, :, 0].contiguous()) for each in stacks]
    least = next(pairs for pairs in range(2, 1 << 20, 2) if many.takes(pairs, 4)) // 2
    for hopper, of, taken in ((True, stacks, True), (True, biased, False), (False, stacks, False)):
        monkeypatch.setattr(ops, "_hopper", hopper)
        monkeypatch.setattr(cuda.triton_experts, "expert_sum", lambda x, *_, **__: x)
        summed = ops.expert_sum(*of, "silu", 2)
        for tokens in (least - 1, least):
            ids = torch.zeros(tokens, 2, dtype=torch.int32, device=DEVICE)
            calls.clear()
            summed(x, ids, weights)
            assert bool(calls) == (taken and tokens == least)
