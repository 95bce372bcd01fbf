"""The sum of a token's experts by Triton's grouped products, on a GPU or interpreted, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sapwood_kernels import reference
from sapwood_kernels.experts.reference import ClampedGate, expert_sum
from sapwood_kernels.experts.routing import Routing
from sapwood_kernels.experts.stack import DenseStack, StackOfProducts, StoredStack, stacked
from sapwood_kernels.experts.tiles.plan import TilePlan, TileShape, TileTable
from sapwood_kernels.experts.tiles.tuning import Tuning
from sapwood_kernels.native.products import ALL
from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.quantised import int8
from sapwood_kernels.quantised.gguf_groups import grouped_blocks
from sapwood_kernels.quantised.grouped import GroupedWeight, dequantise

pytest.importorskip("triton", reason="Triton is not installed")
triton_experts = pytest.importorskip("sapwood_kernels.experts.triton_experts")
cuda = pytest.importorskip("sapwood_kernels.ops.cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS = 6
ALONE = TilePlan(1, TileShape(32, 64, 4, 1), TileShape(64, 4096, 8, 1))
"""Each pair by itself."""


def made(tokens, chosen, dtype, *, bias=False, width=72, inner=20):
    generator = torch.Generator().manual_seed(tokens)

    def numbers(*sizes):
        return (torch.randn(*sizes, generator=generator) / sizes[-1] ** 0.5).to(dtype).to(DEVICE)

    gate_up = DenseStack(numbers(EXPERTS, 2 * inner, width), numbers(EXPERTS, 2 * inner) if bias else None)
    down = DenseStack(numbers(EXPERTS, width, inner), numbers(EXPERTS, width) if bias else None)
    # Expert 4 is hit by none.
    among = torch.tensor([each for each in range(EXPERTS) if each != 4])
    ids = torch.stack([among[torch.randperm(5, generator=generator)[:chosen]] for _ in range(tokens)]).to(DEVICE)
    weights = torch.rand(tokens, chosen, generator=generator).to(DEVICE)
    return numbers(tokens, width) * 8, ids, weights, gate_up, down


GATES = {"silu": reference.silu_mul, "gelu_tanh": reference.gelu_tanh_mul}


def both(parts, gate, plan=None):
    """The kernels' sum, by a plan if it is given, and the reference's."""
    tiles = None if plan is None else lambda pairs: plan
    activate = GATES[gate] if isinstance(gate, str) else gate
    return triton_experts.expert_sum(*parts, gate, tiles), expert_sum(*parts, activate)


def near(ours, theirs, limit):
    assert ours.dtype == theirs.dtype
    assert (ours.float() - theirs.float()).abs().max() <= limit * theirs.float().abs().max()


@pytest.mark.parametrize(("tokens", "chosen"), [(1, 1), (1, 4), (9, 2), (50, 5)])
def test_the_sum_is_the_references(tokens, chosen):
    parts = made(tokens, chosen, torch.float32)
    near(*both(parts, "silu"), 1e-5)


@pytest.mark.parametrize("plan", [None, ALONE])
def test_the_sum_is_added_to_what_is_there(plan):
    ops = cuda.CudaOps(torch.device(DEVICE))
    x, ids, weights, *stacks = made(9, 2, torch.float32)
    before = torch.randn(9, 72, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    total, tiles = before.clone(), None if plan is None else lambda pairs: plan
    assert triton_experts.expert_sum(x, ids, weights, *stacks, "silu", tiles, total) is total
    near(total, before + expert_sum(x, ids, weights, *stacks, reference.silu_mul), 1e-5)
    for own in (ops, DeviceOps(torch.device(DEVICE))):
        again = before.clone()
        assert own.expert_sum(*stacks, "silu", 2)(x, ids, weights, add_to=again) is again
        near(again, total, 1e-5)


# The interpreter's products of bfloat16 are wrong.
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if torch.cuda.is_available() else [torch.float16])
def test_half_precision_with_biases_and_a_clamped_gate(dtype):
    parts = made(11, 3, dtype, bias=True)
    near(*both(parts, ClampedGate(limit=1.0)), 0.02)


def test_experts_that_are_elsewhere_add_nothing():
    x, ids, weights, *stacks = made(20, 4, torch.float32)
    here = [DenseStack(each.weight[:3].contiguous()) for each in stacks]
    local = ids.clamp(max=3)
    assert (local == 3).any()
    for plan in (None, ALONE):
        near(*both((x, local, weights, *here), "silu", plan), 1e-5)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", ClampedGate(limit=1.0)], ids=["silu", "gelu", "clamped"])
@pytest.mark.parametrize(("tokens", "chosen"), [(1, 1), (3, 4)])
def test_few_tokens_are_not_sorted_and_have_the_references_sum(tokens, chosen, gate, monkeypatch):
    """The width is no whole number of blocks, and experts are shared."""
    monkeypatch.setattr(triton_experts, "align", None)
    near(*both(made(tokens, chosen, torch.float32, bias=True), gate, ALONE), 1e-5)


def test_without_a_plan_pairs_are_sorted_only_where_several_share_an_expert(monkeypatch):
    sorted_ones = []
    align = triton_experts.align
    monkeypatch.setattr(triton_experts, "align", lambda *args: (sorted_ones.append(args), align(*args))[1])
    for tokens, times in ((1, 0), (2, 0), (3, 1)):
        near(*both(made(tokens, 1, torch.float32), "silu"), 1e-5)
        assert len(sorted_ones) == times


def stored(bits, *sizes):
    """A stack in few bits: in float8 with a scale for each 128 of a row, or in 4 bits with one for each 32."""
    generator = torch.Generator().manual_seed(bits)
    if bits == 8:
        codes = torch.randn(EXPERTS, *sizes, generator=generator).to(torch.float8_e4m3fn)
        scales = torch.rand(EXPERTS, sizes[0], -(-sizes[1] // 128), generator=generator) / sizes[1] ** 0.5
        return StoredStack(codes.to(DEVICE), scales.to(DEVICE), 128)
    codes = torch.randint(0, 256, (EXPERTS, sizes[0], sizes[1] // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(122, 126, (EXPERTS, sizes[0], sizes[1] // 32), generator=generator, dtype=torch.uint8)
    bias = torch.randn(EXPERTS, sizes[0], generator=generator)
    return StoredStack(codes.to(DEVICE), scales.to(DEVICE), 32, bias.to(DEVICE))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("tokens", [1, 40])
def test_matrices_in_few_bits_are_widened_as_they_are_multiplied(bits, tokens):
    x, ids, weights, *_ = made(tokens, 3, torch.float32, width=160)
    parts = x, ids, weights, stored(bits, 192, 160), stored(bits, 160, 96)
    near(*both(parts, "silu", ALONE if tokens == 1 else None), 1e-5)


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 160), (8, 64), (8, 160)])
@pytest.mark.parametrize("tokens", [1, 40])
def test_integers_are_widened_as_they_are_multiplied(bits, group, tokens):
    generator = torch.Generator().manual_seed(bits)

    def stack(rows, columns):
        groups = -(-columns // group)
        codes = torch.randint(0, 256, (EXPERTS, rows, columns * bits // 8), generator=generator, dtype=torch.uint8)
        zeros = torch.randint(0, 1 << bits, (EXPERTS, rows, groups), generator=generator, dtype=torch.uint8)
        scales = torch.rand(EXPERTS, rows, groups, generator=generator) / (1 << bits) / columns**0.5
        return StoredStack(codes.to(DEVICE), scales.half().to(DEVICE), group, None, zeros.to(DEVICE), bits)

    x, ids, weights, *_ = made(tokens, 3, torch.float32, width=160)
    parts = x, ids, weights, stack(192, 160), stack(160, 96)
    near(*both(parts, "silu", ALONE if tokens == 1 else None), 1e-5)


def one_scale(kind, rows, columns):
    """Float8 or int8 with a scale a row."""
    wide = torch.randn(EXPERTS, rows, columns, generator=torch.Generator().manual_seed(rows)) / columns**0.5
    most = 448 if kind == "float8" else 127
    scales = wide.abs().amax(2, keepdim=True) / most
    codes = (wide / scales).to(torch.float8_e4m3fn) if kind == "float8" else (wide / scales).round().to(torch.int8)
    integers = None if kind == "float8" else 8
    return StoredStack(codes.to(DEVICE), scales.to(DEVICE), columns, integers=integers)


@pytest.mark.parametrize("kind", ["float8", "int8"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_rows_with_one_scale_are_scaled_once(kind, tokens):
    x, ids, weights, *_ = made(tokens, 3, torch.float32, width=160)
    parts = x, ids, weights, one_scale(kind, 192, 160), one_scale(kind, 160, 96)
    near(*both(parts, "silu", ALONE if tokens == 1 else None), 1e-5)


# The interpreter rounds some numbers to float8 in a way of its own.
@pytest.mark.parametrize("kind", ["int8", *(["float8"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("height", [64, 128])
def test_many_tokens_are_rounded_where_they_may_be(kind, height):
    x, ids, weights, *_ = made(40, 3, torch.float32, width=160)
    stacks = [replace(one_scale(kind, *sizes), rounds="row") for sizes in ((192, 160), (160, 96))]
    rounding = reference.quantise_rows if kind == "float8" else int8.quantise_rows

    def of_rounded(stack, expert):
        def product(inputs):
            codes, scales = rounding(inputs)
            return stack.product(expert, codes.float() * scales)

        return product

    oracle = [StackOfProducts([of_rounded(each, expert) for expert in range(EXPERTS)], each.outputs) for each in stacks]
    shape = TileShape(64, 64, 4, 3)
    ours = triton_experts.expert_sum(x, ids, weights, *stacks, "silu", lambda pairs: TilePlan(height, shape, shape))
    theirs = expert_sum(x, ids, weights, *oracle, reference.silu_mul)
    near(ours, theirs, 0.02)  # a number between two codes may go to either: an H200 was 0.012 away
    unrounded = expert_sum(x, ids, weights, *stacks, reference.silu_mul)
    assert (ours - theirs).norm() < 0.3 * (theirs - unrounded).norm()


@pytest.mark.parametrize(
    ("table", "scales_dtype", "group"), [(True, torch.float32, 64), (False, torch.float8_e4m3fn, 16)]
)
@pytest.mark.parametrize("tokens", [1, 40])
def test_tables_factors_minima_and_orders(table, scales_dtype, group, tokens):
    generator = torch.Generator().manual_seed(group)

    def stack(rows, columns):
        groups = -(-columns // group)

        def numbers(*sizes):
            return torch.rand(EXPERTS, *sizes, generator=generator).to(DEVICE)

        codes = torch.randint(0, 256, (EXPERTS, rows, columns // 2), generator=generator, dtype=torch.uint8)
        order = torch.stack([torch.randperm(columns, generator=generator) for _ in range(EXPERTS)]).int()
        return StoredStack(
            codes.to(DEVICE), (numbers(rows, groups) / columns**0.5).to(scales_dtype), group, numbers(rows),
            mins=numbers(rows, groups) / columns, table=torch.linspace(-1, 1, 16, device=DEVICE) if table else None,
            factors=numbers(rows, 1) + 0.5, orders=order.to(DEVICE),
        )  # fmt: skip

    x, ids, weights, *_ = made(tokens, 3, torch.float32, width=160)
    parts = x, ids, weights, stack(192, 160), stack(160, 96)
    near(*both(parts, "silu", ALONE if tokens == 1 else None), 1e-5)


@pytest.mark.parametrize(("kind", "bits"), [("Q4_K", 6), ("Q5_K", 10), ("Q6_K", 10.5), ("Q4_1", 5), ("IQ4_XS", 5)])
def test_gguf_blocks_are_stacked_and_multiplied(kind, bits):
    """Random bytes, but for the scales, which are float16 numbers."""
    generator = torch.Generator().manual_seed(len(kind))
    _, per_block, size = ALL[kind]

    def stack(rows, columns):
        blocks = torch.randint(
            0, 256, (EXPERTS, rows, columns // per_block, size), generator=generator, dtype=torch.uint8
        )
        ones = torch.full((EXPERTS, rows, columns // per_block, 1), 0.01).half().view(torch.uint8)
        places = {"Q6_K": (208,), "IQ4_XS": (0,)}.get(kind, (0, 2))
        for at in places:
            blocks[..., at : at + 2] = ones
        weights = [grouped_blocks(kind, each.flatten(1).to(DEVICE), columns) for each in blocks]
        made = stacked(weights, EXPERTS)
        held = (made.codes, made.scales, made.zeros, made.mins)
        assert 8 * sum(each.nbytes for each in held if each is not None) == bits * EXPERTS * rows * columns
        for expert, weight in enumerate(weights):
            assert torch.equal(dequantise(made.weight(expert)), dequantise(weight))
        return made

    x, ids, weights, *_ = made(4, 1, torch.float32, width=256)
    parts = x, ids, weights, stack(512, 256), stack(256, 256)
    near(*both(parts, "silu"), 1e-5)


def test_experts_in_different_layouts_are_no_stack():
    weights = [GroupedWeight(torch.zeros(4, 32, dtype=torch.int8), torch.ones(4, 1), 32, 32, bits=8) for _ in range(3)]
    plain = weights[2]
    for other in (
        {"mins": torch.ones(4, 1)},
        {"codes": plain.codes.to(torch.float8_e4m3fn)},
        {"scales": plain.codes[:, :1]},
    ):
        weights[2] = replace(plain, **other)
        with pytest.raises(ValueError, match="its layout is not that of the first expert, 2 before it"):
            stacked(weights, 3)
    with pytest.raises(ValueError, match="groups of 24 among 48 inputs"):
        stacked([GroupedWeight(torch.zeros(4, 48, dtype=torch.int8), torch.ones(4, 2), 24, 48, bits=8)], 1)


@pytest.mark.parametrize(
    ("routing", "corrected"),
    [
        (Routing(12, 3), False),
        (Routing(12, 1, renormalise=True), False),
        (Routing(12, 12, renormalise=True, scale=2.5), False),
        (Routing(130, 4, "sigmoid", renormalise=True), True),
        (Routing(12, 3, groups=4, chosen_groups=2, scale=16.0), False),
        (Routing(12, 4, "sigmoid", True, 2.5, groups=4, chosen_groups=2, group_score="two_best"), True),
        (Routing(12, 3, scale=2.5, shared=2), False),
    ],
)
def test_routing_is_the_references_and_is_counted(routing, corrected):
    logits = torch.randn(9, routing.experts, generator=torch.Generator().manual_seed(1)).to(DEVICE) * 2
    correction = torch.linspace(-0.4, 0.4, routing.experts).roll(5).to(DEVICE) if corrected else None
    (ours, counts), (theirs, expected) = (
        (ops(torch.device(DEVICE)).router(routing, correction, counts)(logits), counts)
        for ops in (cuda.CudaOps, DeviceOps)
        for counts in [torch.zeros(routing.experts, dtype=torch.int64, device=DEVICE)]
    )
    assert torch.equal(counts, expected) and int(counts.sum()) == 9 * routing.chosen
    dense = [
        torch.zeros(9, routing.experts + routing.shared, device=DEVICE).scatter_(1, ids.long(), weights)
        for ids, weights in (ours, theirs)
    ]
    torch.testing.assert_close(*dense)
    assert bool((dense[0][:, routing.experts :] == 1).all())


@pytest.mark.parametrize("shared", [0, 1])
def test_rows_that_pad_a_step_go_to_no_expert(shared):
    ops, counts = cuda.CudaOps(torch.device(DEVICE)), torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
    route, every = ops.router(Routing(EXPERTS, 2, shared=shared), None, counts), EXPERTS + shared
    logits = torch.randn(9, EXPERTS, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    with ops.padded(5):
        ids, _ = route(logits)
        pieces = [route(logits[first : first + 3].contiguous(), first)[0] for first in (0, 3, 6)]
    assert ids[:5].max() < every and bool((ids[5:] == every).all()) and int(counts.sum()) == 2 * 10
    assert torch.equal(torch.cat(pieces), ids), "in pieces, too"
    tiles = triton_experts.align(ids, every, 16)
    used = tiles.places.view(-1, 16)[tiles.experts < every].flatten().tolist()
    assert sorted(pair for pair in used if pair < ids.numel()) == list(range(5 * (2 + shared)))
    assert route(logits)[0].max() < every, "the next step is not padded"


def test_rows_that_pad_the_parts_of_ranks_go_to_no_expert(monkeypatch):
    """Three ranks replay 4 rows each, of which 2, none and 3 are tokens; one rank routes its own rows by themselves, too."""
    ops, counts = cuda.CudaOps(torch.device(DEVICE)), torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    joined, alone = ops.router(Routing(EXPERTS, 2), None, counts, 3), ops.router(Routing(EXPERTS, 2), None, counts)
    logits = torch.randn(12, EXPERTS, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    with ops.padded(3, [2, 0, 3]):
        ids, _ = joined(logits)
        own, _ = alone(logits[8:].contiguous())
    assert (ids[:, 0] < EXPERTS).nonzero()[:, 0].tolist() == [0, 1, 8, 9, 10] and torch.equal(own, ids[8:])
    assert int(counts.sum()) == 2 * (5 + 3)
    assert joined(logits[:7].contiguous())[0].max() < EXPERTS, (
        "the next step is not padded, nor are its ranks' rows alike"
    )


def test_logits_that_are_no_numbers_name_experts_that_there_are():
    counts = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
    logits = torch.full((3, EXPERTS), float("nan"), device=DEVICE)
    ids, _ = cuda.CudaOps(torch.device(DEVICE)).router(Routing(EXPERTS, 2), None, counts)(logits)
    assert int(ids.min()) >= 0 and int(ids.max()) < EXPERTS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tiles_are_measured_once_and_give_the_same_sum(tmp_path):
    x, ids, weights, *stacks = made(50, 2, torch.bfloat16, width=256, inner=128)
    sources = []
    for _ in range(2):
        ops = cuda.CudaOps(torch.device(DEVICE))
        ops.tune_experts(3.0, tmp_path)
        found = ops.expert_sum(*stacks, "silu", 2)(x, ids, weights)
        near(found, expert_sum(x, ids, weights, *stacks, reference.silu_mul), 0.02)
        sources.append(ops.tuning.source)
    assert sources == ["measured", "file"] and len(list(tmp_path.iterdir())) == 1


def test_layers_of_a_file_with_several_types_have_tiles_of_their_own(monkeypatch, tmp_path):
    wide = DenseStack(torch.zeros(EXPERTS, 32, 16, dtype=torch.bfloat16))
    codes, scales = torch.zeros(EXPERTS, 32, 16, dtype=torch.uint8), torch.ones(EXPERTS, 32, 1)
    few = StoredStack(codes, scales, 16, None, torch.zeros(EXPERTS, 32, 1, dtype=torch.uint8), 8)
    found = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(cuda, "ProductTimer", lambda *args: None)
    monkeypatch.setattr(
        cuda, "tuned", lambda *args, stored: (found.append((args[3].name, stored)), (TileTable(2), Tuning()))[1]
    )
    ops = cuda.CudaOps(torch.device(DEVICE))
    ops.tune_experts(1.0, tmp_path)
    for pair in ((wide, wide), (wide, few), (few, wide), (few, few), (wide, few)):
        ops.expert_sum(*pair, "silu", 2)
    names, stored = zip(*found, strict=True)
    assert len(set(names)) == 4 and stored == (False, True, True, True)
    ops.tune_experts(0.0, tmp_path)
    tables = [ops.expert_sum(*pair, "silu", 2).keywords["tiles"].__self__ for pair in ((wide, wide), (wide, few))]
    assert [each.stored for each in tables] == [False, True]


def test_a_gpu_takes_the_kernel_for_experts_it_has_a_product_for(monkeypatch):
    ops = cuda.CudaOps(torch.device(DEVICE))
    parts = made(5, 2, torch.float32)
    expected = expert_sum(*parts, reference.silu_mul)
    taken = []
    product = triton_experts.product
    monkeypatch.setattr(triton_experts, "product", lambda *args: (taken.append(args), product(*args))[1])
    near(ops.expert_sum(*parts[3:], "silu", 2)(*parts[:3]), expected, 1e-5)
    assert len(taken) == 2
    others = [
        StackOfProducts([lambda x, e=e, s=s: s.product(e, x) for e in range(EXPERTS)], s.outputs) for s in parts[3:]
    ]
    near(ops.expert_sum(*others, "silu", 2)(*parts[:3]), expected, 1e-5)
    assert len(taken) == 2
