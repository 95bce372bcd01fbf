"""Products of adapters: the kernels against plain torch, and plain torch against merged weights. On a GPU, else in Triton's
interpreter."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_kernels import reference
from sapwood_kernels.lora.layout import NONE, Gate, LoraPlace, LoraProducts, RowGroups
from sapwood_kernels.lora.reference import TorchLora

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter has no products of bfloat16
LIMIT = 0.01 if DEVICE == "cuda" else 1e-5
GATES = {"silu": reference.silu_mul, "gelu_tanh": reference.gelu_tanh_mul}
SLOTS, MOST = 5, 48
RANKS = np.array([16, 48, 32, 16, 48])


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


def made_place(parts: tuple[int, ...], columns: int, offset: int = 7) -> LoraPlace:
    """A layer's slots, in which other layers' matrices, NaN here, lie before and behind the place's."""
    place = LoraPlace(torch.empty(0), offset, parts, columns)
    memory = torch.full((SLOTS, (offset + place.cells + 3) * MOST), float("nan"), device=DEVICE, dtype=DTYPE)
    place = LoraPlace(memory, offset, parts, columns)
    for slot, rank in enumerate(RANKS.tolist()):
        for each in place.matrices(slot, rank):
            each.copy_(drawn(*each.shape) / each.shape[1] ** 0.5)
    return place


def merged(place: LoraPlace, slot: int) -> torch.Tensor:
    """What an adapter adds to the layer's weight: float32 [N, K]."""
    rank = int(RANKS[slot])
    a, b = place.matrices(slot, rank)
    first, products = 0, []
    for part, size in enumerate(place.parts):
        products.append(b[first : first + size].float() @ a[part * rank : (part + 1) * rank].float())
        first += size
    return torch.cat(products)


def expected(place: LoraPlace, slots: np.ndarray, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    result = out.float().clone()
    for row, slot in enumerate(slots.tolist()):
        if slot != NONE:
            result[row] += merged(place, slot) @ x[row].float()
    return result


@given(slots=st.lists(st.integers(NONE, 4), min_size=1, max_size=70), most=st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_every_row_is_in_one_group_of_its_own_slot(slots: list[int], most: int) -> None:
    groups = RowGroups.of(np.array(slots), most)
    assert sorted(groups.order.tolist()) == list(range(len(slots)))
    assert groups.counts.min() >= 1 and groups.counts.max() <= most and groups.counts.sum() == len(slots)
    seen = []
    for slot, start, count in zip(groups.slots, groups.starts, groups.counts, strict=True):
        rows = groups.order[start : start + count].tolist()
        assert all(slots[row] == slot for row in rows)
        seen += rows
    assert sorted(seen) == list(range(len(slots)))
    wanted = sum(-(-slots.count(slot) // most) for slot in set(slots))
    assert len(groups.slots) == wanted


def computed(
    lora: LoraProducts, place: LoraPlace, x: torch.Tensor, out: torch.Tensor, gate: Gate | None
) -> torch.Tensor:
    low = lora.shrink(place, x)
    return lora.add(place, low, out) if gate is None else lora.add_gated(place, low, out, gate)


BATCHES = {
    "decodes of several adapters": np.array([0, 3, NONE, 1, 1, 4, 0, 2]),
    "one adapter": np.full(19, 2),
    "a prompt between two": np.repeat([1, NONE, 4], [9, 5, 70]),
    "base rows at the ends": np.repeat([NONE, 3, NONE], [4, 3, 2]),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("parts", "columns"), [((160, 32, 32), 136), ((72,), 200), ((40, 40), 520)])
def test_torch_adds_what_merged_weights_would(batch: str, parts: tuple[int, ...], columns: int) -> None:
    torch.manual_seed(0)
    slots, place = BATCHES[batch], made_place(parts, columns)
    x, out = drawn(len(slots), columns), drawn(len(slots), sum(parts))
    wanted = expected(place, slots, x, out)
    lora = TorchLora(RANKS, lambda gate: GATES[gate], torch.device(DEVICE))
    lora.begin(slots)
    base = out[slots == NONE].clone()
    found = lora.add(place, lora.shrink(place, x), out)
    assert found is out
    assert (found.float() - wanted).norm() < LIMIT * wanted.norm()
    assert torch.equal(found[slots == NONE], base), "rows without an adapter are left alone"


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("gate", "parts", "columns"),
    [
        (None, (160, 32, 32), 136),
        (None, (72,), 1200),
        (None, (264, 264), 520),
        ("silu", (264, 264), 520),
        ("gelu_tanh", (40, 40), 1100),
    ],
)
def test_kernels_add_what_torch_does(batch: str, gate: Gate | None, parts: tuple[int, ...], columns: int) -> None:
    triton_lora = pytest.importorskip("sapwood_kernels.lora.triton_lora")
    torch.manual_seed(0)
    slots, place = BATCHES[batch], made_place(parts, columns)
    x = drawn(len(slots), columns + 8)[:, :columns]  # rows that lie apart
    out = drawn(len(slots), sum(parts))
    wanted = expected(place, slots, x, out)
    if gate is not None:
        wanted = GATES[gate](wanted)
    lora = triton_lora.TritonLora(MOST)
    for most in (triton_lora.FEW, triton_lora.MANY):
        groups = RowGroups.of(slots, most)
        several = np.zeros((5, len(groups.slots) + 2), np.int64)  # the last ones are empty
        ranks = np.where(groups.slots == NONE, 0, RANKS[groups.slots])
        several[:, : len(groups.slots)] = groups.slots, groups.starts, groups.counts, ranks, groups.order[groups.starts]
        order, each = (torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE) for array in (groups.order, several))
        lora.begin(triton_lora.Rows(order, each, most))
        target = out.clone()
        found = computed(lora, place, x, target, gate)
        assert (found.float() - wanted).norm() < LIMIT * wanted.norm()
        if gate is None:
            assert found is target and torch.equal(found[slots == NONE], out[slots == NONE])
        assert torch.equal(computed(lora, place, x, out.clone(), gate), found), "the result is the same each time"


def test_a_step_has_large_groups_only_where_its_kernels_do_not_overlap() -> None:
    """Otherwise it would be the only one with such kernels, and they would be compiled while it is served."""
    cuda_slots = pytest.importorskip("sapwood_kernels.lora.cuda_slots")
    triton_lora = pytest.importorskip("sapwood_kernels.lora.triton_lora")
    device = torch.device("cpu")
    slots = cuda_slots.CudaLoraSlots(
        SLOTS, torch.float32, GATES.__getitem__, device, MOST, lambda to, array: to.copy_(torch.from_numpy(array))
    )
    most = {}
    for count in (1, triton_lora._PDL_ROWS, triton_lora._PDL_ROWS + 1):
        slots.begin(np.zeros(count, np.int64))
        most[count] = slots.products._rows.most
    assert list(most.values()) == [triton_lora.FEW, triton_lora.FEW, triton_lora.MANY]


COMPILED = """
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sapwood_kernels.lora import triton_lora

def show(kernel, **constants):
    kinds = dict(x="*bf16", memory="*bf16", out="*bf16", gated="*bf16", low="*fp32", order="*i64", groups="*i64")
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in kernel.arg_names}
    signature |= {name: "i64" for name in ("slot_stride",) if name in signature}
    wide = [[at] for at, name in enumerate(signature) if signature[name] != "constexpr" and name not in ("T", "G", "offset")]
    attributes = {tuple(at): [["tt.divisibility", 16]] for at in wide}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    narrow = ptx.count("ld.global.b16") + len(re.findall("cp.async.ca.*0x[24],", ptx))
    print(ptx.count("mma"), ptx.count("griddepcontrol.wait"), ptx.count("st.local"), narrow)

for rows in (triton_lora.FEW, triton_lora.MANY):
    tiles = triton_lora.tiles_for(rows, 2049, 4096)
    alike = dict(SPLITS=tiles.splits, BLOCK_M=rows, PDL=True, PRECISION="tf32")
    steps = dict(BLOCK_K=tiles.inputs, ONE_K=triton_lora._ONE // 64, STAGES=3)
    show(triton_lora._shrink_kernel, PARTS=3, BLOCK_R=64, **steps, **alike)
    for gate in (0, 1):
        ways = dict(BLOCK_N=tiles.outputs, BLOCK_R=16, ONE=rows == triton_lora.FEW, ACROSS=tiles.across)
        show(triton_lora._expand_kernel, PARTS=3 - gate, GATE=gate, **ways, **alike)
"""


@pytest.mark.slow
def test_kernels_of_16_bits_run_on_tensor_cores_and_each_waits_for_the_kernel_ahead(
    lines_of_compiler: Callable[[str], list[list[str]]],
) -> None:
    for products, waits, spilled, narrow in ([int(each) for each in line] for line in lines_of_compiler(COMPILED)):
        assert products > 0 and waits > 0 and spilled == 0
        assert narrow <= 1, "matrices are read in whole words; x of a row alone is as wide as the threads are many"
