"""Which layers each stage of a pipeline has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def split_layers(costs: Sequence[int], stages: int) -> list[range]:
    """Neighbouring layers for each stage, at least one, so that the dearest stage is as cheap as it can be. O(layers^2 * stages).

    Args:
        costs: What each layer costs; at least as many as stages.
        stages: How many stages there are.
    """
    before = [0, *accumulate(costs)]
    count = len(costs)
    # For the first n layers: what the dearest stage costs, and where the last one begins.
    best: list[tuple[int, int]] = [(before[n], 0) for n in range(count + 1)]
    starts: list[list[int]] = []
    for stage in range(1, stages):
        best = [
            min((max(best[start][0], before[n] - before[start]), start) for start in range(stage, n))
            if n > stage
            else best[n]
            for n in range(count + 1)
        ]
        starts.append([start for _, start in best])
    ends = [count]
    for each in reversed(starts):
        ends.append(each[ends[-1]])
    return [range(start, end) for start, end in pairwise([0, *reversed(ends)])]
