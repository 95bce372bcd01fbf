"""Rows that go to the ranks of their experts and back, in Triton's interpreter, and compiled for a GPU that is not here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sapwood_kernels.experts.payload import RowShape, from_float8, to_float8

pytest.importorskip("triton", reason="Triton is not installed")
kernels = pytest.importorskip("sapwood_kernels.experts.triton_dispatch")

CPU = torch.device("cpu")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the memory of the ranks is the host's here")
MOST = 5
EXPERTS = 6


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PROGRAMS", 2)  # the interpreter takes long for each


class Ranks:
    """Ranks' regions in one process, which all have two experts each."""

    def __init__(self, shape: RowShape, size: int = 3) -> None:
        self.shape, self.size = shape, size
        count = kernels.PeerRows.region_bytes(shape, MOST, size)
        self._memory = [torch.zeros(count + 256, dtype=torch.uint8) for _ in range(size)]
        addresses = [each.data_ptr() + -each.data_ptr() % 256 for each in self._memory]
        self.rows = [kernels.PeerRows(addresses, rank, shape, MOST, CPU) for rank in range(size)]
        self.counts = [torch.zeros(shape.experts, dtype=torch.int64) for _ in range(size)]

    def all(self, call: str, arguments: list[tuple[object, ...]]) -> list[object]:
        """What a call gives on each rank. First each sends and sees others late, then each looks again at what has come."""
        before = [
            (rows._calls.clone(), rows.moved.clone(), counts.clone())
            for rows, counts in zip(self.rows, self.counts, strict=True)
        ]
        for rows, each in zip(self.rows, arguments, strict=True):
            getattr(rows, call)(*each, tries=1)
        for rows, counts, (calls, moved, counted) in zip(self.rows, self.counts, before, strict=True):
            rows._calls.copy_(calls)
            rows.moved.copy_(moved)
            counts.copy_(counted)
            rows._broken.zero_()
        found = [getattr(rows, call)(*each, tries=1) for rows, each in zip(self.rows, arguments, strict=True)]
        assert not any(rows.broken() for rows in self.rows)
        return found


def drawn(count: int, chance: torch.Generator) -> Tensor:
    """Rows [count, 150] that no rounding takes to the next power of two, which the interpreter does wrongly, as it does ties."""
    factor = torch.rand(count, 150, generator=chance) * 0.9 + 1
    power = torch.randint(-8, 4, (count, 150), generator=chance)
    return factor * 2.0**power * (torch.randint(0, 2, (count, 150), generator=chance) * 2 - 1)


@on_cpu
@pytest.mark.parametrize(
    ("dtype", "float8"), [pytest.param(torch.float16, False, marks=pytest.mark.slow), (torch.float32, True)]
)
def test_rows_go_to_the_ranks_of_their_experts_and_their_sums_come_back(dtype: torch.dtype, float8: bool) -> None:
    shape = RowShape(150, 2, EXPERTS, dtype, float8)
    ranks, chance = Ranks(shape), torch.Generator().manual_seed(3)
    counted, moved, seen = torch.zeros(EXPERTS, dtype=torch.int64), 0, 0
    for own in ((3, 1, 0), (5, 4, 5)):
        most = max(own)
        x = [drawn(count, chance).to(dtype) for count in own]
        ids = [torch.rand(count, EXPERTS, generator=chance).topk(2).indices for count in own]
        if own[0] == 5:
            ids[1][2:] = EXPERTS  # as a row that pads a captured step
        weights = [torch.rand(count, 2, generator=chance) for count in own]
        holders = [each // 2 for each in ids]
        sent = ranks.all(
            "dispatch",
            [(*each, most, ranks.counts[rank]) for rank, each in enumerate(zip(x, ids, weights, holders, strict=True))],
        )
        arrived = [from_float8(*to_float8(each), dtype) if float8 else each for each in x]
        parts = []
        for rank, (rows, all_ids, all_weights) in enumerate(sent):
            parts.append(torch.full_like(rows, torch.nan))
            for source, count in enumerate(own):
                for row in range(most):
                    at = source * most + row
                    if row >= count:
                        assert all_ids[at].tolist() == [EXPERTS] * 2
                        continue
                    assert torch.equal(all_ids[at], ids[source][row].int())
                    assert torch.equal(all_weights[at], weights[source][row])
                    if rank in holders[source][row]:
                        assert torch.equal(rows[at], arrived[source][row])
                        parts[rank][at] = (rank + 1) * rows[at]
        back = ranks.all("combine", [(part, each, most) for part, each in zip(parts, holders, strict=True)])
        for rank, found in enumerate(back):
            expected = torch.zeros(own[rank], 150)
            for other in range(3):
                here = (holders[rank] == other).any(1)
                expected[here] += ((other + 1) * arrived[rank][here]).float()
            assert torch.equal(found, expected.to(dtype))
        counted += torch.bincount(torch.cat(ids).flatten(), minlength=EXPERTS + 1)[:EXPERTS]
        moved += sum(
            int((each == other).any(1).sum())
            for rank, each in enumerate(holders)
            for other in range(3)
            if other != rank
        )
        seen += sum(int((each < EXPERTS).any(1).sum()) for each in ids)
    assert all(torch.equal(each, counted) for each in ranks.counts)
    assert [each.moved.tolist() for each in ranks.rows] == [[moved, seen]] * 3


@on_cpu
def test_a_rank_that_does_not_come_is_given_up() -> None:
    shape = RowShape(8, 1, EXPERTS, torch.float32)
    ranks = Ranks(shape)
    one, none = torch.ones(1, 8), torch.zeros(1, 1, dtype=torch.int64)
    ranks.rows[0].dispatch(one, none, torch.ones(1, 1), none, 1, ranks.counts[0], tries=2)
    assert ranks.rows[0].broken()


def test_float8_keeps_four_significant_bits_and_scales_by_powers_of_two() -> None:
    x = torch.randn(50, 300, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.linspace(-30, 30, 50)[:, None]
    x[3, 128:256] = 0
    codes, exponents = to_float8(x)
    back = from_float8(codes, exponents, torch.float32)
    largest = torch.nn.functional.pad(x, (0, 84)).view(50, 3, 128).abs().amax(-1).repeat_interleave(128, 1)[:, :300]
    normal = x.abs() >= largest * 2.0**-14
    assert normal.float().mean() > 0.9
    assert torch.all((back - x).abs()[normal] <= x.abs()[normal] * 2.0**-4)
    assert torch.all((back - x).abs()[~normal] <= largest[~normal] * 2.0**-17)
    assert torch.equal(back[3, 128:256], torch.zeros(128))


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sapwood_kernels.experts import triton_dispatch as module

kinds = dict(x="*bf16", ids="*i32", weights="*fp32", holders="*i32", found="*bf16", found_ids="*i32", found_weights="*fp32")
kinds |= dict(counts="*i64", moved="*i64", peers="*i64", calls="*i64", broken="*i32", part="*bf16", out="*bf16")
kinds |= dict(own="i32", rows="i32", rank="i32", most="i32")
for size in (2, 8):
    for float8 in (False, True):
        for kernel in (module._dispatch_kernel, module._combine_kernel):
            constants = dict(
                EXPERTS=256, WIDTH=7168, SIZE=size, CHOSEN=8, FLOAT8=float8, HEADS_AT=4096, ROWS_AT=1 << 20, SUMS_AT=1 << 26,
                HEAD=20, ROW_BYTES=7232 if float8 else 14336, SUM_BYTES=14336, ROWS=512, BLOCK=8192, PLACES=8, GROUP=128,
                FOREVER=module.WAIT_FOREVER,
            )
            signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
            pointers = [at for at, kind in enumerate(signature.values()) if kind.startswith("*")]
            source = ASTSource(
                kernel, signature=signature, constexprs={name: constants[name] for name in kernel.arg_names if name in constants},
                attrs={(at,): [["tt.divisibility", 16]] for at in pointers},
            )
            ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16}).asm["ptx"]
            print(*(ptx.count(word) for word in ("sys.release.exch", "sys.acquire", "v4.b32", "bar.sync")))
"""


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu_that_is_not_here(lines_of_compiler: Any) -> None:
    lines = lines_of_compiler(COMPILED)
    assert len(lines) == 8
    for counts in lines:
        tells, looks, whole_vectors, barriers = map(int, counts)
        assert tells == looks == 1  # all ranks at a time, a lane for each
        assert whole_vectors, "numbers move 16 bytes at a time"
        assert barriers >= 2
