"""What was added lately is counted to a tenth of the window."""

from __future__ import annotations

import random

from sapwood_net.pacing.sliding_count import SlidingCount
from sapwood_testing.clock import Clock


def test_the_count_is_of_this_part_of_the_window_and_the_nine_before() -> None:
    rng, clock = random.Random(1), Clock(7.3)
    count, added = SlidingCount(10.0, clock), []
    for _ in range(3000):
        if rng.random() < 0.6:
            amount = rng.choice((1.0, 3.0, 0.0))
            count.add(amount)
            added.append((int(clock.now), amount))
        else:
            assert count.total() == sum(amount for part, amount in added if part > int(clock.now) - 10)
        clock.now += rng.choice((0.0, 0.01, 0.4, 1.0, 6.0, 25.0)) * rng.random()
        if rng.random() < 0.01:
            count.clear()
            added.clear()
