"""Long work in steps: at once, or in pieces that have turns."""

from __future__ import annotations

import pytest

from sapwood_net.pacing.heavy_work import PIECE, HeavyWork
from sapwood_net.pacing.steps import Steps, all_at_once, in_turns


class Clock:
    """Seconds that pass where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def count_to(most: int, clock: Clock, each: float, fails: bool = False) -> Steps[int]:
    for _ in range(most):
        clock.now += each
        yield
    if fails:
        raise KeyError(most)
    return most


def test_without_turns_it_is_done_in_one_piece() -> None:
    assert all_at_once(count_to(5, Clock(), 1.0)) == 5
    with pytest.raises(KeyError):
        all_at_once(count_to(5, Clock(), 1.0, fails=True))


@pytest.mark.parametrize(("each", "pieces"), [(PIECE / 4.5, 3), (1.1 * PIECE, 10), (0.0, 1)])
async def test_pieces_are_as_long_as_their_steps_come_to(each: float, pieces: int) -> None:
    clock = Clock()
    heavy = HeavyWork(clock, rest=0.0)

    stint = heavy.stint("a")
    took: list[float] = []
    take = heavy.turn

    async def turn(*args: object, **more: bool) -> None:
        await take(*args, **more)
        took.append(clock.now)

    heavy.turn = turn  # type: ignore[method-assign]
    assert await in_turns(count_to(10, clock, each), stint) == 10
    assert len(took) == pieces + (each > PIECE)  # its end comes after the last step


async def test_without_a_stint_nobody_waits() -> None:
    coroutine = in_turns(count_to(3, Clock(), 1.0), None)
    with pytest.raises(StopIteration) as end:
        coroutine.send(None)
    assert end.value.value == 3
