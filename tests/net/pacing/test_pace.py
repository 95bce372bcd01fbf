"""Long work lets others continue after each so much of it, and short work never."""

from __future__ import annotations

from sapwood_net.pacing.pace import Pace


async def test_others_go_on_after_so_much() -> None:
    breaths = []

    async def breathe() -> None:
        breaths.append(done)

    pace, done = Pace(breathe, 10), 0
    for count in (4, 5, 1, 9, 1, 30, 5):
        done += count
        await pace.did(count)
    assert breaths == [10, 20, 50]
