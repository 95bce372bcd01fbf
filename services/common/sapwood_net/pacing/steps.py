"""Long work as a generator: each ``yield`` is a place at which others may continue. It returns the work's result."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from sapwood_net.pacing.heavy_work import Stint

ResultT = TypeVar("ResultT")
Steps = Generator[None, None, ResultT]


def all_at_once(steps: Steps[ResultT]) -> ResultT:
    """Does the work in one piece; raises the work's errors."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: ResultT = end.value
            return result


async def in_turns(steps: Steps[ResultT], stint: Stint | None) -> ResultT:
    """Does the work in pieces that have turns; in one if there is no stint. Raises what the work does."""
    if stint is None:
        return all_at_once(steps)
    while True:
        if stint.over:
            await stint.turn()
        try:
            next(steps)
        except StopIteration as end:
            result: ResultT = end.value
            return result
