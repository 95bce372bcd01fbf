"""Sums over ranks that read each other's memory, in Triton's interpreter: the kernel of one rank, and of two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sapwood_kernels.reference import rms_norm

pytest.importorskip("triton", reason="Triton is not installed")
kernels = pytest.importorskip("sapwood_kernels.triton_all_reduce")

CPU = torch.device("cpu")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the memory of the ranks is the host's here")
PROGRAMS = 8
"""Programs of a call here: the interpreter takes 50 ms for each."""
MOST = PROGRAMS * 16 * 3 * 32
SIGNALS = 256


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PROGRAMS", PROGRAMS)


class Ranks:
    """Three ranks' regions in one process; the others' parts and signals are there before rank 1 comes."""

    def __init__(self) -> None:
        size = kernels.PeerSums.region_bytes(MOST, 3)
        self._memory = [torch.zeros(size + 256, dtype=torch.uint8) for _ in range(3)]
        starts = [-each.data_ptr() % 256 for each in self._memory]
        self.regions = [each[start : start + size] for each, start in zip(self._memory, starts, strict=True)]
        self.sums = kernels.PeerSums([each.data_ptr() for each in self.regions], 1, MOST, CPU)

        self._calls = torch.zeros(3, PROGRAMS, dtype=torch.int64)

    def place(self, rank: int, part: Tensor, each: int) -> None:
        """What another rank has written in its next call: pieces of ``each`` numbers, and that it has come to the end of it."""
        self.place_pieces(rank, part.split(each))

    def place_pieces(self, rank: int, pieces: Sequence[Tensor]) -> None:
        """The same, for each program a piece."""
        slots = self.regions[rank][SIGNALS:].view(2, PROGRAMS, -1).view(pieces[0].dtype)
        signals = self.regions[1][:SIGNALS].view(torch.int64)[: PROGRAMS * 3].view(-1, 3)
        for program, piece in enumerate(pieces):
            self._calls[rank, program] += 1
            slots[self._calls[rank, program] & 1, program, : len(piece)] = piece
            signals[program, rank] = 2 * self._calls[rank, program] + 1


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
    piece = MOST // PROGRAMS
    step = 16 // dtype.itemsize * 3
    for call, count in enumerate((1, 37, 48, 200, 1000, MOST // dtype.itemsize)):
        parts = [torch.randn(count, generator=torch.Generator().manual_seed(10 * call + rank)) for rank in range(3)]
        parts = [part.to(dtype) for part in parts]
        expected, mine = exact(parts), parts[1].clone()
        programs = -(-mine.nbytes // piece)
        each = -(-count // (programs * step)) * step
        for rank in (0, 2):
            theirs = parts[rank].clone()
            if two_shot:  # its share of each piece is summed already
                for start in range(0, count, each):
                    share = slice(start + rank * each // 3, min(start + (rank + 1) * each // 3, count))
                    theirs[share] = expected[share]
            ranks.place(rank, theirs, each)
        ranks.sums.sum(mine, two_shot=two_shot, tries=1)
        assert not ranks.sums.broken()
        assert torch.equal(mine, expected), count
    assert (ranks.sums.calls(two_shot=two_shot), ranks.sums.calls(two_shot=not two_shot)) == (6, 0)


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_rank_gets_all_ranks_rows_and_the_sum_of_its_own(dtype: torch.dtype) -> None:
    ranks = Ranks()
    piece = MOST // PROGRAMS
    for call, count in enumerate((1, 37, 48, 200, MOST // dtype.itemsize // 3)):
        parts = [torch.randn(3, count, generator=torch.Generator().manual_seed(10 * call + rank)) for rank in range(3)]
        parts = [part.to(dtype) for part in parts]
        vector = 16 // dtype.itemsize
        for sums in (False, True):
            room = piece // 3 // 16 * 16 if sums else piece
            vector = vector if count % vector == 0 else 1
            programs = -(-count * dtype.itemsize // room)
            each = -(-count // (programs * vector)) * vector
            for rank in (0, 2):
                pieces = parts[rank].split(each, 1) if sums else parts[rank][:1].split(each, 1)
                # A piece has the same place of all rows, one behind the other, with room for whole ones.
                padded = [torch.nn.functional.pad(own, (0, each - own.shape[1])).reshape(-1) for own in pieces]
                ranks.place(rank, torch.cat(padded), len(padded[0]))
            if sums:
                found = ranks.sums.scatter_sum(parts[1], tries=1)
                assert torch.equal(found[0], exact([part[1] for part in parts])), count
            else:
                found = ranks.sums.gather(parts[1][0], tries=1)
                assert torch.equal(found, torch.stack([part[0] for part in parts])), count
            assert not ranks.sums.broken()
    assert (ranks.sums.calls(two_shot=False), ranks.sums.calls(two_shot=True)) == (5, 0)


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("two_shot", [False, True])
def test_a_rank_adds_the_sum_to_a_residual_and_norms_it(dtype: torch.dtype, two_shot: bool) -> None:
    ranks = Ranks()
    width = 16 // dtype.itemsize * 3
    sizes = (1, PROGRAMS + 5)
    for call, rows in enumerate(sizes):
        draw = torch.Generator().manual_seed(call)
        parts = [torch.randn(rows, width, generator=draw).to(dtype) for _ in range(3)]
        residual = torch.randn(rows, width, generator=draw).to(dtype)
        weight = torch.rand(width, generator=draw) + 0.5
        expected, mine = residual + exact(parts), parts[1].clone()
        programs = min(PROGRAMS, rows)
        for rank in (0, 2):
            theirs = parts[rank].clone()
            if two_shot:  # its rows are summed already
                own = [row for row in range(rows) if (row + row // programs) % 3 == rank]
                theirs[own] = exact(parts)[own]
            # A program has every so manieth row.
            pieces = [theirs[program::programs].reshape(-1) for program in range(programs)]
            ranks.place_pieces(rank, pieces)
        assert ranks.sums.takes_rows(mine, residual)
        normed = ranks.sums.add_normed(mine, residual, weight, 1e-6, two_shot=two_shot, tries=1)
        assert not ranks.sums.broken()
        assert torch.equal(residual, expected), rows
        assert torch.equal(mine, parts[1])
        torch.testing.assert_close(normed, rms_norm(expected, weight, 1e-6))
    assert ranks.sums.calls(two_shot=two_shot, normed=True) == len(sizes)
    assert ranks.sums.calls(two_shot=two_shot) == 0
    # What comes next is a sum without a norm.
    ones = torch.ones(6, dtype=dtype)
    for rank in (0, 2):
        ranks.place(rank, torch.ones(6, dtype=dtype), 16 // dtype.itemsize * 3)
    ranks.sums.sum(ones, two_shot=False, tries=1)
    assert ones.tolist() == [3.0] * 6


def test_rows_that_are_no_vectors_or_too_many_are_not_taken() -> None:
    sums = kernels.PeerSums([0] * 3, 1, MOST, CPU)
    taken = torch.zeros(2, 24)
    assert sums.takes_rows(taken, taken)
    for x, residual in (
        (torch.zeros(2, 23), torch.zeros(2, 23)),
        (torch.zeros(MOST // 16 + 1, 4), torch.zeros(MOST // 16 + 1, 4)),
        (taken, taken.half()),
        (taken, torch.zeros(24, 2).T),
    ):
        assert not sums.takes_rows(x, residual)


@on_cpu
def test_a_sum_for_which_a_rank_does_not_come_is_broken() -> None:
    ranks = Ranks()
    ranks.sums.sum(torch.ones(8), two_shot=False, tries=2)
    assert ranks.sums.broken()


PROGRAM = """
import sys, numpy as np, torch
from sapwood_kernels.reference import rms_norm
from sapwood_kernels.triton_all_reduce import PROGRAMS, PeerSums
folder, rank = sys.argv[1], int(sys.argv[2])
most = PROGRAMS * 16 * 2 * 8
size = -(-PeerSums.region_bytes(most, 2) // 4096) * 4096
maps = [torch.from_numpy(np.memmap(f"{folder}/{each}", np.uint8, "r+", shape=size)) for each in range(2)]
sums = PeerSums([each.data_ptr() for each in maps], rank, most, torch.device("cpu"))
made = lambda rank, turn, count: torch.randn(count, generator=torch.Generator().manual_seed(100 * turn + rank))
for turn in range(6):
    count = (5, 700, most // 4)[turn % 3]
    mine = made(rank, turn, count)
    sums.sum(mine, two_shot=turn % 2 == 1)
    assert torch.equal(mine, made(0, turn, count) + made(1, turn, count)), turn
    own = made(rank, turn, count // 2 * 2).view(2, -1)
    both = torch.stack([made(each, turn, count // 2 * 2).view(2, -1) for each in range(2)])
    assert torch.equal(sums.gather(own[0]), both[:, 0]), turn
    assert torch.equal(sums.scatter_sum(own), both.sum(0)[rank : rank + 1]), turn
    rows = (1, 70, 3)[turn % 3]
    mine, residual = made(rank, turn, rows * 8).view(rows, 8), made(9, turn, rows * 8).view(rows, 8)
    total = residual + (made(0, turn, rows * 8) + made(1, turn, rows * 8)).view(rows, 8)
    normed = sums.add_normed(mine, residual, torch.full((8,), 2.0), 1e-6, two_shot=turn % 2 == 1)
    assert torch.equal(residual, total), turn
    torch.testing.assert_close(normed, rms_norm(total, torch.full((8,), 2.0), 1e-6))
print(*(sums.calls(two_shot=two_shot, normed=normed) for two_shot in (False, True) for normed in (False, True)))
"""


@on_cpu
@pytest.mark.slow
def test_two_processes_sum_over_memory_that_they_share(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).write_bytes(bytes(1 << 20))
    commands = [[sys.executable, "-c", PROGRAM, str(tmp_path), str(rank)] for rank in range(2)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = [subprocess.Popen(each, env=environment, stdout=subprocess.PIPE, text=True) for each in commands]
    try:
        assert [each.communicate(timeout=200)[0].split() for each in started] == [["9", "3", "3", "3"]] * 2
    finally:
        for each in started:
            each.kill()
            each.wait()


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sapwood_kernels import triton_all_reduce as module

kinds = dict(x="*bf16", found="*bf16", peers="*i64", calls="*i64", done="*i64", broken="*i32")
kinds.update(residual="*bf16", weight="*fp32", out="*bf16", eps="fp32")
kinds.update(count="i32", each="i32", rank="i32", most="i32", rows="i32")

def show(kernel, **constants):
    constants |= dict(SIGNAL_BYTES=4096, PIECE_BYTES=1 << 17, PROGRAMS=64, FOREVER=module.WAIT_FOREVER)
    signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
    pointers = [at for at, kind in enumerate(signature.values()) if kind.startswith("*")]
    source = ASTSource(
        kernel, signature=signature, constexprs=constants, attrs={(at,): [["tt.divisibility", 16]] for at in pointers}
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    found = [ptx.count(word) for word in ("sys.release.exch", "sys.acquire", "v4.b32", "bar.sync")]
    print(constants["SIZE"], constants.get("TWO", False), *found)

for size in (2, 8):
    for two in (False, True):
        show(module._sum_kernel, SIZE=size, TWO=two, VECTOR=8, BLOCK=2048)
        show(module._rows_kernel, SIZE=size, SUMS=two, VECTOR=8, BLOCK=2048)
        show(module._normed_kernel, SIZE=size, TWO=two, N=8192, BLOCK=8192)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu_that_is_not_here() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for size, two, *counts in map(str.split, done.stdout.splitlines()):
        tells, looks, whole_vectors, barriers = map(int, counts)
        assert tells == int(size) * (2 if two == "True" else 1)
        assert looks >= tells
        assert whole_vectors, "numbers move 16 bytes at a time"
        assert barriers >= 2
