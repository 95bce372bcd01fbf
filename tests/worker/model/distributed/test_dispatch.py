"""Rows that ranks send to the ranks of their experts only, over memory that threads share: tried first, then used."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from sapwood_kernels.experts.payload import RowShape, from_float8, to_float8
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.worker.thread_ranks import ThreadGroup, run_ranks
from sapwood_worker.model.distributed import dispatch
from sapwood_worker.model.distributed.data_parallel import DataParallelRows
from sapwood_worker.model.distributed.dispatch import SharedRows

WIDTH, CHOSEN, EXPERTS = 152, 3, 12
OPS = device_ops("cpu")


def shape(dtype: torch.dtype = torch.float32, float8: bool = False) -> RowShape:
    return RowShape(WIDTH, CHOSEN, EXPERTS, dtype, float8)


def of_rank(rank: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's rows, their experts and weights."""
    draw = torch.Generator().manual_seed(rank)
    ids = torch.rand(count, EXPERTS, generator=draw).topk(CHOSEN).indices
    return torch.randn(count, WIDTH, generator=draw).to(dtype), ids, torch.rand(count, CHOSEN, generator=draw)


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(3, 0, 5), (4, 4, 4), (0, 9, 2)])
def test_rows_get_what_the_experts_of_all_ranks_make_of_them(
    counts: tuple[int, ...], dtype: torch.dtype, float8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_MOST_ROWS", 8)  # nine go to all ranks
    size = len(counts)
    gathered, each = max(counts) > 8, EXPERTS // size

    def work(group: ThreadGroup) -> tuple[Tensor, Tensor, int]:
        rows = DataParallelRows(group, OPS)
        exchange = dispatch.choose_exchange(group, rows, shape(dtype, float8), OPS)
        assert exchange is not None
        rows.begin(counts)
        x, ids, weights = of_rank(group.rank, counts[group.rank], dtype)
        x, ids, weights = (
            torch.cat((part, part.new_zeros(2, part.shape[1]))) for part in (x, ids, weights)
        )  # they pad
        got = torch.zeros(EXPERTS, dtype=torch.int64)

        def experts(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            factors = torch.where(ids // each == group.rank, weights * (1 + ids), 0.0).sum(1, keepdim=True)
            return torch.where(factors > 0, x.float() * factors, 0.0).to(dtype)

        found = exchange(x, ids, weights, experts, lambda ids, first: ids // each, got)
        exchange.told = exchange.moved.tolist()
        seen.append(int(rows.seen))
        return found, got, exchange.exchanged_bytes(int(got.sum()))

    sent = counted = 0
    seen: list[int] = []
    found = run_ranks(size, work)
    for rank, count in enumerate(counts):
        x, ids, weights = of_rank(rank, count, dtype)
        arrived = from_float8(*to_float8(x), dtype) if float8 and not gathered else x
        parts = [
            (arrived.float() * torch.where(ids // each == other, weights * (1 + ids), 0.0).sum(1, keepdim=True)).to(
                dtype
            )
            for other in range(size)
        ]
        expected = torch.stack([part.float() for part in parts]).sum(0).to(dtype)
        assert len(found[rank][0]) == count + 2
        if not gathered:
            assert torch.equal(found[rank][0][:count], expected)
        torch.testing.assert_close(found[rank][0][:count], expected)
        sent += sum(int((ids // each == other).any(1).sum()) for other in range(size) if other != rank)
        counted = counted + torch.bincount(ids.flatten(), minlength=EXPERTS)
    assert all(torch.equal(got, counted) for _, got, _ in found)
    row, back = shape(dtype, float8).row_bytes, WIDTH * dtype.itemsize
    expected_bytes = 2 * (size - 1) * sum(counts) * back if gathered else sent * (row + back)
    assert {exchanged for _, _, exchanged in found} == {expected_bytes}
    assert seen[0] != 0 and seen == seen[:1] * size, "all ranks have a digest of the same"
    assert row == (WIDTH + 2 if float8 else back)


def test_what_is_wrong_on_one_rank_is_used_on_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    combine = SharedRows.combine

    def wrong(self: Any, part: Tensor, holders: Tensor, rows: int) -> Tensor:
        return combine(self, part, holders, rows) + (self._rank == 1)

    monkeypatch.setattr(SharedRows, "combine", wrong)
    with caplog.at_level(logging.WARNING):
        found = run_ranks(
            2,
            lambda group: dispatch.choose_exchange(group, DataParallelRows(group, OPS), shape(), OPS),
        )
    assert found == [None, None]
    assert (
        "--expert-parallel dispatch: it is not used, rows go to all ranks: rank 1: the sums of 1 rows of 152 numbers"
        in caplog.text
    )


def test_ranks_that_share_no_memory_send_rows_to_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "load_library", lambda: None)
    found = run_ranks(2, lambda group: dispatch.choose_exchange(group, DataParallelRows(group, OPS), shape(), OPS))
    assert found == [None, None]
    assert "ranks do not share memory here" in caplog.text
