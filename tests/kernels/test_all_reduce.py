"""Sums over ranks that write to each other's memory, in Triton's interpreter: the kernel of one rank, and of two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sapwood_kernels.reference import rms_norm

pytest.importorskip("triton", reason="Triton is not installed")
kernels = pytest.importorskip("sapwood_kernels.ranks.triton_all_reduce")

CPU = torch.device("cpu")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the memory of the ranks is the host's here")
PROGRAMS = 8
"""Programs of a call here: the interpreter takes 50 ms for each."""
MOST = PROGRAMS * 16 * 3 * 32


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PROGRAMS", PROGRAMS)


class Ranks:
    """Three ranks' regions in one process; the others' numbers are there before rank 1 comes."""

    def __init__(self) -> None:
        size = kernels.PeerAllReduce.region_bytes(MOST)
        self._memory = [torch.zeros(size + 256, dtype=torch.uint8) for _ in range(3)]
        starts = [-each.data_ptr() % 256 for each in self._memory]
        self.regions = [each[start : start + size] for each, start in zip(self._memory, starts, strict=True)]
        self.sums = kernels.PeerAllReduce([each.data_ptr() for each in self.regions], 1, MOST, CPU)
        self._calls = torch.zeros(PROGRAMS, dtype=torch.int64)

    def begin(self, programs: int) -> None:
        """Tells how many programs the next call has."""
        self._calls[:programs] += 1

    def place(self, program: int, at: int, numbers: Tensor) -> None:
        """What another rank writes to rank 1's region for a program of this call."""
        bits = sent(numbers)
        self._side(1, program, bits.dtype)[at : at + len(bits)] = bits

    def told(self, rank: int, program: int, at: int, numbers: Tensor) -> bool:
        """Whether rank 1 has written these numbers to another rank's region; which are read so."""
        bits = sent(numbers)
        there = self._side(rank, program, bits.dtype)[at : at + len(bits)]
        right = torch.equal(there, bits)
        there.zero_()
        return right

    def empty(self) -> bool:
        """Whether all that has been written is read."""
        return not any(bool(each.any()) for each in self.regions)

    def _side(self, rank: int, program: int, dtype: torch.dtype) -> Tensor:
        return self.regions[rank].view(2, PROGRAMS, -1)[self._calls[program] & 1, program].view(dtype)


def sent(numbers: Tensor) -> Tensor:
    """The bits that numbers go as: inverted, so that no number but one NaN would be zero."""
    bits = ~numbers.view({2: torch.int16, 4: torch.int32}[numbers.element_size()])
    return bits.masked_fill(bits == 0, 1)


def exact(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


# The interpreter cuts numbers off where a GPU rounds them to bfloat16.
@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("two_shot", [False, True])
def test_a_rank_sums_what_the_others_have_in_their_order(dtype: torch.dtype, two_shot: bool) -> None:
    ranks = Ranks()
    step = 16 // dtype.itemsize * 3
    most = ranks.sums.most_bytes(two_shot=two_shot)
    for call, count in enumerate((1, 37, 48, 200, 1000, most // dtype.itemsize)):
        parts = [torch.randn(count, generator=torch.Generator().manual_seed(10 * call + rank)) for rank in range(3)]
        parts = [part.to(dtype) for part in parts]
        expected, mine = exact(parts), parts[1].clone()
        programs = -(-mine.nbytes // (most // PROGRAMS))
        each = -(-count // (programs * step)) * step
        share = each // 3
        ranks.begin(programs)
        for rank in (0, 2):
            for program, numbers in enumerate(parts[rank].split(each)):
                if two_shot:  # what rank 1 is to sum, and what this rank has summed
                    ranks.place(program, rank * share, numbers[share : 2 * share])
                    summed = expected[program * each :][:each][rank * share : (rank + 1) * share]
                    ranks.place(program, (3 + rank) * share, summed)
                else:
                    ranks.place(program, rank * each, numbers)
        ranks.sums.sum(mine, two_shot=two_shot, tries=1)
        assert not ranks.sums.broken()
        assert torch.equal(mine, expected), count
        for rank in (0, 2):
            for program, numbers in enumerate(parts[1].split(each)):
                if two_shot:
                    assert ranks.told(rank, program, share, numbers[rank * share : (rank + 1) * share])
                    summed = expected[program * each :][:each][share : 2 * share]
                    assert ranks.told(rank, program, 4 * share, summed)
                else:
                    assert ranks.told(rank, program, each, numbers)
        assert ranks.empty()
    assert (ranks.sums.calls(two_shot=two_shot), ranks.sums.calls(two_shot=not two_shot)) == (6, 0)


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_numbers_of_any_bits_come_to_their_sums(dtype: torch.dtype) -> None:
    ranks = Ranks()
    signed = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    mine = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 1.0, 2.0, 3.0, 4.0], dtype=dtype)
    mine.view(signed)[4] = -1  # a NaN, whose bits inverted are zero
    expected = exact([mine] * 3)
    each = 16 // dtype.itemsize * 3
    ranks.begin(1)
    for rank in (0, 2):
        ranks.place(0, rank * each, mine)
    ranks.sums.sum(mine, two_shot=False, tries=1)
    assert not ranks.sums.broken()
    assert mine[4].isnan()
    assert torch.equal(mine.view(signed)[mine == mine], expected.view(signed)[mine == mine])


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("two_shot", [False, True])
def test_a_rank_adds_the_sum_to_a_residual_and_norms_it(dtype: torch.dtype, two_shot: bool) -> None:
    ranks = Ranks()
    width = 16 // dtype.itemsize * 3
    sizes = (1, PROGRAMS + 5, 4 * PROGRAMS + 1)
    for call, rows in enumerate(sizes):
        draw = torch.Generator().manual_seed(call)
        parts = [torch.randn(rows, width, generator=draw).to(dtype) for _ in range(3)]
        residual = torch.randn(rows, width, generator=draw).to(dtype)
        weight = torch.rand(width, generator=draw) + 0.5
        summed = exact(parts)
        expected, mine = residual + summed, parts[1].clone()
        programs = min(PROGRAMS, rows)
        count = -(-rows // programs)
        share = -(-count // 3)
        ranks.begin(programs)
        for row in range(rows):  # a program has every so manieth row
            program, nth = row % programs, row // programs
            owner = (program + nth) % 3
            for rank in (0, 2):
                if not two_shot:
                    ranks.place(program, (rank * count + nth) * width, parts[rank][row])
                elif owner == 1:
                    ranks.place(program, (rank * share + nth // 3) * width, parts[rank][row])
                elif owner == rank:
                    ranks.place(program, (3 * share + nth) * width, summed[row])
        assert ranks.sums.takes_rows(mine, residual, two_shot=two_shot)
        normed = ranks.sums.add_normed(mine, residual, weight, 1e-6, two_shot=two_shot, tries=1)
        assert not ranks.sums.broken()
        assert torch.equal(residual, expected), rows
        assert torch.equal(mine, parts[1])
        torch.testing.assert_close(normed, rms_norm(expected, weight, 1e-6))
        for row in range(rows):
            program, nth = row % programs, row // programs
            owner = (program + nth) % 3
            for rank in (0, 2):
                if not two_shot:
                    assert ranks.told(rank, program, (count + nth) * width, mine[row])
                elif owner == 1:
                    assert ranks.told(rank, program, (3 * share + nth) * width, summed[row])
                elif owner == rank:
                    assert ranks.told(rank, program, (share + nth // 3) * width, mine[row])
        assert ranks.empty()
    assert ranks.sums.calls(two_shot=two_shot, normed=True) == len(sizes)
    assert ranks.sums.calls(two_shot=two_shot) == 0
    # What comes next is a sum without a norm.
    ones = torch.ones(6, dtype=dtype)
    ranks.begin(1)
    for rank in (0, 2):
        ranks.place(0, rank * 16 // dtype.itemsize * 3, torch.ones(6, dtype=dtype))
    ranks.sums.sum(ones, two_shot=False, tries=1)
    assert ones.tolist() == [3.0] * 6


@on_cpu
@pytest.mark.parametrize("two_shot", [False, True])
def test_programs_that_have_parts_of_a_row_tell_each_other_their_squares(
    two_shot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_LEAST_BYTES", 64)
    ranks = Ranks()
    rows, width, split = 3, 40, 3  # parts of 16 numbers, of 16 and of 8
    squares = ranks.sums._squares[: 2 * PROGRAMS * split].view(2, PROGRAMS, split)
    for call in range(2):
        draw = torch.Generator().manual_seed(call)
        parts = [torch.randn(rows, width, generator=draw) for _ in range(3)]
        residual, weight = torch.randn(rows, width, generator=draw), torch.rand(width, generator=draw) + 0.5
        summed = exact(parts)
        expected = residual + summed
        ranks.begin(2 * split)
        for row in range(rows):
            for part in range(split):
                program, nth = row % 2 * split + part, row // 2
                mine = slice(16 * part, min(16 * part + 16, width))
                # The interpreter runs one program after another: what later ones tell is there before.
                told = expected[row, mine].square().sum()
                squares[nth, row % 2 * split : (row % 2 + 1) * split, part] = ~told.view(torch.int32)
                owner = (program + nth) % 3
                for rank in (0, 2):
                    if not two_shot:
                        ranks.place(program, (rank * 2 + nth) * 16, parts[rank][row, mine])
                    elif owner == 1:
                        ranks.place(program, rank * 16, parts[rank][row, mine])
                    elif owner == rank:
                        ranks.place(program, (3 + nth) * 16, summed[row, mine])
        normed = ranks.sums.add_normed(parts[1], residual, weight, 1e-6, two_shot=two_shot, tries=1)
        assert not ranks.sums.broken()
        assert torch.equal(residual, expected)
        torch.testing.assert_close(normed, rms_norm(expected, weight, 1e-6))
        squares.zero_()


@pytest.mark.parametrize("two_shot", [False, True])
def test_rows_that_are_no_vectors_or_too_many_are_not_taken(two_shot: bool) -> None:
    sums = kernels.PeerAllReduce([0] * 3, 1, MOST, CPU)
    taken = torch.zeros(2, 24)
    assert sums.takes_rows(taken, taken, two_shot=two_shot)
    for x, residual in (
        (torch.zeros(2, 23), torch.zeros(2, 23)),
        (torch.zeros(MOST // 4 + 1, 4), torch.zeros(MOST // 4 + 1, 4)),
        (taken, taken.half()),
        (taken, torch.zeros(24, 2).T),
    ):
        assert not sums.takes_rows(x, residual, two_shot=two_shot)


@on_cpu
def test_a_sum_for_which_a_rank_does_not_come_is_broken() -> None:
    ranks = Ranks()
    for _ in range(3):  # what a late rank has written to the first side does not make the third right
        ones = torch.ones(8)
        ranks.begin(1)
        ranks.sums.sum(ones, two_shot=False, tries=2)
        assert ranks.sums.broken()
        assert ones.tolist() != [3.0] * 8
        for rank in (0, 2):
            ranks.place(0, rank * 12, torch.ones(8))


PROGRAM = """
import sys, numpy as np, torch
from sapwood_kernels.reference import rms_norm
from sapwood_kernels.ranks.triton_all_reduce import PROGRAMS, PeerAllReduce
folder, rank = sys.argv[1], int(sys.argv[2])
most = PROGRAMS * 16 * 2 * 8
size = -(-PeerAllReduce.region_bytes(most) // 4096) * 4096
maps = [torch.from_numpy(np.memmap(f"{folder}/{each}", np.uint8, "r+", shape=size)) for each in range(2)]
sums = PeerAllReduce([each.data_ptr() for each in maps], rank, most, torch.device("cpu"))
made = lambda rank, turn, count: torch.randn(count, generator=torch.Generator().manual_seed(100 * turn + rank))
for turn in range(6):
    count = (5, 700, most // 4)[turn % 3]
    mine = made(rank, turn, count)
    sums.sum(mine, two_shot=turn % 2 == 1)
    assert torch.equal(mine, made(0, turn, count) + made(1, turn, count)), turn
    rows = (1, PROGRAMS + 6, 3)[turn % 3]
    mine, residual = made(rank, turn, rows * 8).view(rows, 8), made(9, turn, rows * 8).view(rows, 8)
    total = residual + (made(0, turn, rows * 8) + made(1, turn, rows * 8)).view(rows, 8)
    normed = sums.add_normed(mine, residual, torch.full((8,), 2.0), 1e-6, two_shot=turn % 2 == 1)
    assert torch.equal(residual, total), turn
    torch.testing.assert_close(normed, rms_norm(total, torch.full((8,), 2.0), 1e-6))
print(*(sums.calls(two_shot=two_shot, normed=normed) for two_shot in (False, True) for normed in (False, True)))
"""


@on_cpu
@pytest.mark.slow
def test_two_processes_sum_over_memory_that_they_share(two_ranks: Any) -> None:
    assert two_ranks(PROGRAM, 1 << 21) == [["3", "3", "3", "3"]] * 2


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sapwood_kernels.ranks import triton_all_reduce as module

kinds = dict(x="*bf16", squares="*i32", peers="*i64", calls="*i64", done="*i64", broken="*i32")
kinds.update(residual="*bf16", weight="*fp32", out="*bf16", eps="fp32")
kinds.update(count="i32", each="i32", rank="i32", most="i32", rows="i32")

def show(kernel, **constants):
    constants |= dict(AREA_BYTES=1 << 18, PROGRAMS=module.PROGRAMS, FOREVER=module.WAIT_FOREVER)
    signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
    pointers = [at for at, kind in enumerate(signature.values()) if kind.startswith("*")]
    source = ASTSource(
        kernel, signature=signature, constexprs=constants, attrs={(at,): [["tt.divisibility", 16]] for at in pointers}
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    found = [ptx.count(word) for word in ("ld.volatile.global.v4.b32", "ld.volatile", "st.global.v4.b32", "atom.", "fence")]
    print(kernel.fn.__name__, constants["SIZE"], constants["TWO"], *found)

for size in (2, 8):
    for two in (False, True):
        show(module._rank_sum_kernel, SIZE=size, TWO=two, VECTOR=8, BLOCK=2048, WIDE=8192)
        show(module._rank_normed_kernel, SIZE=size, TWO=two, N=4096, PART=2048, SPLIT=2, BLOCK=2048, PDL=True)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu_that_is_not_here(lines_of_compiler: Any) -> None:
    lines = lines_of_compiler(COMPILED)
    for kernel, size, _, *counts in lines:
        whole_looks, looks, whole_vectors, atomics, fences = map(int, counts)
        assert looks == whole_looks >= int(size), "numbers are looked for 16 bytes at a time"
        assert whole_vectors >= 2 * int(size), "numbers move 16 bytes at a time"
        assert atomics == (1 if kernel == "_rank_normed_kernel" else 0)
        assert fences == 0
