"""A router's product and the slots of what it chose, on a GPU or interpreted, against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sapwood_kernels import reference
from sapwood_kernels.experts.routing import Routing
from sapwood_kernels.ops.device import DeviceOps

pytest.importorskip("triton", reason="Triton is not installed")
triton_routing = pytest.importorskip("sapwood_kernels.experts.triton_routing")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("rows", [1, 16, 17, 530])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_are_those_of_float32_for_any_number_of_rows(rows: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, 200, generator=draw) * 8).to(dtype).to(DEVICE)
    weight = (torch.randn(20, 200, generator=draw) / 14).to(DEVICE)
    bias = torch.randn(20, generator=draw).to(DEVICE)
    for each in (None, bias):
        exact = F.linear(x.double(), weight.double(), None if each is None else each.double())
        found = triton_routing.logits(x, weight, each)
        assert found.dtype == torch.float32
        if found.dim() == 3:  # parts
            assert found.shape[1] > 1
            found = found.double().sum(1)
        assert (found.double() - exact).abs().max() <= 2e-6 * exact.abs().max()


def test_a_weight_is_narrowed_only_if_it_stays_the_same() -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    assert triton_routing.narrowed(weight, torch.bfloat16) is None
    found = triton_routing.narrowed(weight.bfloat16().float(), torch.bfloat16)
    assert found is not None and torch.equal(found, weight.bfloat16())
    assert triton_routing.narrowed(weight, torch.float32) is None, "that is the weight itself"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "width", "experts"), [(17, 200, 20), (34, 600, 130)])
def test_a_decodes_rows_by_a_weight_of_16_bits_have_the_logits_of_float32(
    rows: int, width: int, experts: int, bias: bool
) -> None:
    draw = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, width, generator=draw) * 8).half().to(DEVICE)
    weight = (torch.randn(experts, width, generator=draw) / 14).half().to(DEVICE)
    shift = torch.randn(experts, generator=draw).to(DEVICE) if bias else None
    parts = triton_routing.logits(x, weight.float(), shift, weight)
    assert parts.shape == (rows, -(-width // 256), experts)
    exact = F.linear(x.double(), weight.double(), None if shift is None else shift.double())
    assert (parts.double().sum(1) - exact).abs().max() <= 2e-6 * exact.abs().max()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_many_rows_by_a_weight_of_16_bits_have_the_logits_of_float32() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(700, 2048, generator=draw).bfloat16().to(DEVICE)
    weight = torch.randn(64, 2048, generator=draw).bfloat16().to(DEVICE)
    bias = torch.randn(64, generator=draw).to(DEVICE)
    found = triton_routing.logits(x, weight.float(), bias, weight)
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert found.dtype == torch.float32 and (found.double() - exact).abs().max() <= 2e-5 * exact.abs().max()


def test_a_rows_logits_do_not_change_with_the_few_beside_it() -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(16, 96, generator=draw).to(DEVICE), torch.randn(12, 96, generator=draw).to(DEVICE)
    every = triton_routing.logits(x, weight, None)
    for row in range(16):
        assert torch.equal(triton_routing.logits(x[row : row + 1], weight, None)[0], every[row])


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_few_rows_are_normed_in_the_same_launch(rows: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, 200, generator=draw) * 8).to(dtype).to(DEVICE)
    weight, bias = (torch.randn(*sizes, generator=draw).to(DEVICE) for sizes in ((20, 200), (20,)))
    norm = (torch.rand(200, generator=draw) + 0.5).to(DEVICE)
    kept = x.clone()
    normed, logits = triton_routing.normed_logits(x, norm, 1e-3, weight, bias)
    expected = reference.rms_norm(x, norm, 1e-3)
    assert torch.equal(x, kept) and normed.dtype == dtype
    torch.testing.assert_close(normed, expected, atol=1e-6 if dtype == torch.float32 else 2e-3, rtol=0)
    torch.testing.assert_close(logits, triton_routing.logits(normed, weight, bias))


@pytest.mark.parametrize("shares", [1, 5])
def test_experts_are_chosen_by_the_sum_of_the_parts(shares: int) -> None:
    routing, draw = Routing(12, 3, renormalise=True), torch.Generator().manual_seed(shares)
    parts = torch.randn(9, shares, 12, generator=draw).to(DEVICE)
    counts, live = torch.zeros(2, 12, dtype=torch.int64, device=DEVICE), torch.full((1,), 9, device=DEVICE).int()
    whole = triton_routing.route(parts.sum(1), routing, None, counts[0], live)
    ids, weights = triton_routing.route(parts, routing, None, counts[1], live)
    assert torch.equal(ids, whole[0]) and torch.equal(*counts) and int(counts[0].sum()) == 27
    torch.testing.assert_close(weights, whole[1])


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_are_taken_in_turns(first: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    table, copies = torch.randint(9, (8, 4), generator=draw), torch.randint(1, 5, (8,), generator=draw)
    ids = torch.randint(8, (70, 6), generator=draw).to(dtype)
    expected = DeviceOps(torch.device("cpu")).turns(table, copies, ids, first)
    assert len(set(expected.flatten().tolist())) > 5
    assert torch.equal(
        triton_routing.turns(*(each.to(DEVICE) for each in (table, copies, ids)), first).cpu(), expected.int()
    )
