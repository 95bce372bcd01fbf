"""Spreads work evenly over ranks that wait for each other in every layer: chooses the rank of a new request, and how many tokens
of prompts each rank computes in a step.

Work is counted in tokens to compute. Every rank waits for the slowest, so the longest of their steps is what counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_worker.core.scheduler.load_meter import Demand

CONTEXT_TOKENS = 512
"""Attending to about so many cached tokens takes as long as computing one token (70B shapes and DeepSeek-V3's on an H200)."""
_STEPS = 128
"""Steps for which a request is expected to run: work that recurs in each step counts so many times."""
_UNEVEN = 1.05
"""How much longer than the mean the longest of the ranks' steps may be before prompts are held back."""


def decode_work(demand: Demand) -> float:
    """The work of a rank's running requests in a step in which all of them decode."""
    return demand.rows + demand.context / CONTEXT_TOKENS


def choose_rank(
    demands: Sequence[Demand], waiting: Sequence[int], queued: Sequence[int], missing: Sequence[int]
) -> int:
    """The rank that has least to do once it has a new request; of equals the first.

    Args:
        demands: What each rank could compute in the next step.
        waiting: Requests in each rank's queue.
        queued: Tokens of prompts that each rank has not computed.
        missing: The new request's tokens that each rank does not have in its cache.
    """

    def work(rank: int) -> float:
        steady = decode_work(demands[rank]) + waiting[rank] + queued[rank] / CONTEXT_TOKENS
        return queued[rank] + missing[rank] + _STEPS * steady

    return min(range(len(demands)), key=work)


def prompt_tokens(demands: Sequence[Demand], most: int) -> list[int]:
    """How many tokens of prompts each rank computes in the next step, so that the ranks' steps take about equally long.

    While one rank computes a prompt and the others only decode, all of their requests wait for it. So the prompt is held back for
    about as many steps as there are requests that would wait, in the hope that other ranks get prompts too. Ranks with nothing
    to do do not count. O(ranks).

    Args:
        demands: What each could.
        most: Tokens of a rank's step at most.
    """
    if not any(demand.prompts for demand in demands):
        return [0] * len(demands)
    busy = [demand for demand in demands if demand.rows or demand.prompts]
    decodes = [decode_work(demand) for demand in busy]
    low = max(decodes, default=0.0)
    high = low + most

    def added(demand: Demand, decode: float, level: float) -> float:
        return max(0.0, min(demand.prompts, level - decode, most - demand.rows))

    def is_even(level: float) -> bool:
        times = [decode + added(demand, decode, level) for demand, decode in zip(busy, decodes, strict=True)]
        return max(times) * len(times) <= _UNEVEN * sum(times)

    # The longest step over the mean only grows with the level: what ranks compute is a concave function of it.
    while high - low > 1.0:
        level = (low + high) / 2
        low, high = (level, high) if is_even(level) else (low, level)
    patience = max(1, sum(demand.rows for demand in demands))
    found = []
    for demand in demands:
        least = min(-(-demand.prompts // patience), most - demand.rows)
        found.append(int(max(added(demand, decode_work(demand), high), least)))
    return found
