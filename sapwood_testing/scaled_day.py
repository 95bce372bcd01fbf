"""A day's traffic against a fleet that a scaler makes larger and smaller, second by second, under a virtual clock.

Requests come by chance, more by day than by night and in bursts, and each takes a place of a worker for some seconds. One that
finds no place waits, and its first token is late. A worker takes a while to start; one that is to go gets nothing new and leaves
when its last request ends. The oracle knows all of it before, and has in each minute just the workers for that minute's peak.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_DAY = 86_400


@dataclass
class Fleet:
    """How workers are.

    Attributes:
        places: Requests that a worker runs at a time within the objective.
        start: Seconds that it takes to start.
        seconds: That a request takes on average.
        late: Seconds to the first token that are still in time.
    """

    places: int = 32
    start: int = 60
    seconds: float = 12.0
    late: float = 1.0


@dataclass
class Figures:
    """What came of it.

    Attributes:
        in_time: Share of the first tokens that were.
        worker_seconds, oracle_seconds: Of all workers together, and of the oracle's.
        most, least: Workers that there were.
    """

    in_time: float = 0.0
    worker_seconds: float = 0.0
    oracle_seconds: float = 0.0
    most: int = 0
    least: int = 1 << 30
    workers: list[int] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Workers over the oracle's."""
        return self.worker_seconds / self.oracle_seconds


def day_rate(second: int, peak: float, rng_bursts: list[tuple[int, int, float]]) -> float:
    """Requests a second: a curve from a fifth of the peak at four in the morning to the peak, and bursts."""
    phase = 2 * math.pi * (second % _DAY - 4 * 3600) / _DAY
    rate = peak * (0.6 - 0.4 * math.cos(phase))
    return rate * (1 + sum(more for begin, end, more in rng_bursts if begin <= second < end))


def run_days(
    look: Callable[[float, float, int, float | None], int],
    fleet: Fleet,
    *,
    days: int = 2,
    peak: float = 60.0,
    seed: int = 0,
    interval: int = 15,
) -> Figures:
    """Runs some days; the figures are the last one's.

    Args:
        look: The plan: gets time, requests, workers, and the share that was in time; says how many workers there should be.
        fleet: The workers.
        days: How many.
        peak: Most requests a second, on average.
        seed: Of chance.
        interval: Seconds between two looks.
    """
    rng = random.Random(seed)
    bursts = [
        (begin, begin + rng.randrange(600, 2400), rng.uniform(0.1, 0.3))
        for begin in (rng.randrange(days * _DAY) for _ in range(4 * days))
    ]
    starting: deque[int] = deque()
    running: list[float] = []
    """When each request in a place ends."""
    waiting: deque[float] = deque()
    ready = wanted = math.ceil(day_rate(0, peak, bursts) * fleet.seconds / fleet.places) + 1
    figures, counted, late, since, late_since = Figures(), 0, 0, 0, 0
    alone: list[float] = []
    """The same if every request had a place at once, for the oracle."""
    peak_alone = 0
    for second in range(days * _DAY):
        last = second >= (days - 1) * _DAY
        while starting and starting[0] <= second:
            starting.popleft()
            ready += 1
        for ends in (running, alone):
            while ends and ends[0] <= second:
                heapq.heappop(ends)
        rate = day_rate(second, peak, bursts)
        coming = max(0, round(rng.gauss(rate, math.sqrt(rate))))
        for _ in range(coming):
            takes = rng.expovariate(1 / fleet.seconds)
            heapq.heappush(alone, second + takes)
            waiting.append(second)
        while waiting and len(running) < ready * fleet.places:
            came = waiting.popleft()
            heapq.heappush(running, second + rng.expovariate(1 / fleet.seconds))
            was_late = second - came > fleet.late
            since, late_since = since + 1, late_since + was_late
            if last:
                counted, late = counted + 1, late + was_late
        peak_alone = max(peak_alone, len(alone))
        drained = math.ceil(len(running) / fleet.places)
        if second % interval == 0:
            in_time = 1 - late_since / since if since else None
            wanted = look(float(second), float(len(running) + len(waiting)), ready, in_time)
            since = late_since = 0
            more = wanted - ready - len(starting)
            if more > 0:
                starting.extend([second + fleet.start] * more)
            elif more < 0:
                while starting and more < 0:
                    starting.pop()
                    more += 1
                ready += more
        if last:
            here = max(ready, drained) + len(starting)
            figures.worker_seconds += here
            figures.most, figures.least = max(figures.most, here), min(figures.least, here)
            if second % 60 == 59:
                figures.oracle_seconds += 60 * max(1, math.ceil(peak_alone / fleet.places))
                figures.workers.append(here)
        if second % 60 == 59:
            peak_alone = len(alone)
    figures.in_time = 1 - late / max(1, counted)
    return figures
