"""Rows that ranks read from each other's memory, in Triton's interpreter: the kernel of one rank, and of two processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
kernels = pytest.importorskip("sapwood_kernels.ranks.triton_row_exchange")

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
        size = kernels.RowExchange.region_bytes(MOST, 3)
        self._memory = [torch.zeros(size + 256, dtype=torch.uint8) for _ in range(3)]
        starts = [-each.data_ptr() % 256 for each in self._memory]
        self.regions = [each[start : start + size] for each, start in zip(self._memory, starts, strict=True)]
        self.rows = kernels.RowExchange([each.data_ptr() for each in self.regions], 1, MOST, CPU)

        self._calls = torch.zeros(3, PROGRAMS, dtype=torch.int64)

    def place(self, rank: int, pieces: Sequence[Tensor]) -> None:
        """What another rank has written in its next call, for each program a piece, and that it has come to the end of it."""
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
                ranks.place(rank, padded)
            if sums:
                found = ranks.rows.scatter_sum(parts[1], tries=1)
                assert torch.equal(found[0], exact([part[1] for part in parts])), count
            else:
                found = ranks.rows.gather(parts[1][0], tries=1)
                assert torch.equal(found, torch.stack([part[0] for part in parts])), count
            assert not ranks.rows.broken()
    assert ranks.rows.calls() == 5


@on_cpu
def test_an_exchange_for_which_a_rank_does_not_come_is_broken() -> None:
    ranks = Ranks()
    ranks.rows.gather(torch.ones(8), tries=2)
    assert ranks.rows.broken()


PROGRAM = """
import sys, numpy as np, torch
from sapwood_kernels.ranks.triton_row_exchange import PROGRAMS, RowExchange
folder, rank = sys.argv[1], int(sys.argv[2])
most = PROGRAMS * 16 * 2 * 8
size = -(-RowExchange.region_bytes(most, 2) // 4096) * 4096
maps = [torch.from_numpy(np.memmap(f"{folder}/{each}", np.uint8, "r+", shape=size)) for each in range(2)]
rows = RowExchange([each.data_ptr() for each in maps], rank, most, torch.device("cpu"))
for turn in range(6):
    count = (4, 700, most // 4)[turn % 3]
    draw = torch.Generator().manual_seed(turn)
    both = torch.randn(2, 2, count // 2, generator=draw)
    assert torch.equal(rows.gather(both[rank, 0]), both[:, 0]), turn
    assert torch.equal(rows.scatter_sum(both[rank]), both.sum(0)[rank : rank + 1]), turn
    ids = torch.tensor([-1, 7, rank])  # rows may have any bits
    assert rows.gather(ids).tolist() == [[-1, 7, 0], [-1, 7, 1]]
print(rows.calls())
"""


@on_cpu
@pytest.mark.slow
def test_two_processes_exchange_rows_over_memory_that_they_share(two_ranks: Any) -> None:
    assert two_ranks(PROGRAM, 1 << 20) == [["6"]] * 2


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sapwood_kernels.ranks import triton_row_exchange as module

kinds = dict(x="*bf16", found="*bf16", peers="*i64", calls="*i64", done="*i64", broken="*i32")
kinds.update(count="i32", each="i32", rank="i32", most="i32")
for size in (2, 8):
    for sums in (False, True):
        constants = dict(SIZE=size, SUMS=sums, VECTOR=8, BLOCK=2048)
        constants |= dict(SIGNAL_BYTES=4096, PIECE_BYTES=1 << 17, PROGRAMS=64, FOREVER=module.WAIT_FOREVER)
        kernel = module._row_exchange_kernel
        signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
        pointers = [at for at, kind in enumerate(signature.values()) if kind.startswith("*")]
        source = ASTSource(
            kernel, signature=signature, constexprs=constants, attrs={(at,): [["tt.divisibility", 16]] for at in pointers}
        )
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
        print(*(ptx.count(word) for word in ("sys.release.exch", "sys.acquire", "v4.b32", "bar.sync")))
"""


@pytest.mark.slow
def test_the_kernel_compiles_for_a_gpu_that_is_not_here(lines_of_compiler: Any) -> None:
    lines = lines_of_compiler(COMPILED)
    for counts in lines:
        tells, looks, whole_vectors, barriers = map(int, counts)
        assert (tells, looks) == (1, 1), "all ranks at a time, a lane for each"
        assert whole_vectors, "numbers move 16 bytes at a time"
        assert barriers >= 2
