"""Which layers a stage has, and how steps are cut for several."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sapwood_testing.worker.thread_ranks import run_grid
from sapwood_worker.model.distributed.parallel import split_layers
from sapwood_worker.model.distributed.pipeline import MicroBatches, measured
from sapwood_worker.records.step import Step


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 4))
def test_the_dearest_stage_is_as_cheap_as_it_can_be(costs: list[int], stages: int) -> None:
    stages = min(stages, len(costs))
    found = split_layers(costs, stages)
    assert [layer for each in found for layer in each] == list(range(len(costs)))
    assert all(found)

    def dearest(bounds: tuple[int, ...]) -> int:
        return max(sum(costs[start:end]) for start, end in pairwise((0, *bounds, len(costs))))

    best = min(map(dearest, combinations(range(1, len(costs)), stages - 1)))
    assert max(sum(costs[layer] for layer in each) for each in found) == best


def test_equal_layers_are_spread_evenly() -> None:
    assert split_layers([7] * 26, 2) == [range(13), range(13, 26)]
    assert sorted(map(len, split_layers([7] * 80, 3))) == [26, 27, 27]


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40)), min_size=1, max_size=7), st.integers(0, 40))
def test_the_pieces_of_a_step_are_its_tokens_in_order(shapes: list[tuple[int, int]], each: int) -> None:
    counts, starts = np.array(shapes, np.int64).T
    total = int(counts.sum())
    rows = np.arange(len(shapes)) + 3
    pages = np.arange(4 * len(shapes), dtype=np.int32).reshape(-1, 4)
    step = Step(5, rows, starts, counts, np.ones_like(counts), np.arange(total), pages)
    cuts = MicroBatches(2, 1.0, each)
    pieces = cuts.of(step)
    assert len(pieces) == cuts.count(total)
    where = [
        (int(row), int(start) + i, tuple(names))
        for piece in pieces
        for row, start, count, names in zip(piece.rows, piece.starts, piece.counts, piece.pages.tolist(), strict=True)
        for i in range(count)
    ]
    assert where == [
        (row, start + i, tuple(names))
        for row, start, count, names in zip(
            rows.tolist(), starts.tolist(), counts.tolist(), pages.tolist(), strict=True
        )
        for i in range(count)
    ]
    assert np.concatenate([piece.token_ids for piece in pieces]).tolist() == list(range(total))
    assert len(pieces) == 1 or max(len(piece.token_ids) for piece in pieces) - total // len(pieces) <= 1


def test_more_is_cut_the_more_its_tokens_cost_against_the_rest() -> None:
    assert MicroBatches(2, 1.0, 0.0).count(8192) == 1
    assert MicroBatches(2, 0.010, 20e-6).count(8192) == 4
    assert MicroBatches(4, 0.010, 20e-6).count(8192) == 7
    assert MicroBatches(2, 0.010, 20e-6).count(64) == 1
    assert MicroBatches(2, 1e-9, 1.0).count(40) == 2


def test_all_ranks_cut_alike_whatever_each_has_measured() -> None:
    asked: list[int] = []

    def work(rank: int, parallel: object) -> list[int]:
        cuts = measured(parallel, asked.append, 128)
        return [cuts.count(tokens) for tokens in range(16, 2000, 100)]

    found = run_grid(2, 2, work)
    assert all(each == found[0] for each in found)
    assert set(asked) == {16, 128}
