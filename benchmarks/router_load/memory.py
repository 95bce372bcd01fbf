"""Resident memory after 20 000 different prompts of 8 KB."""

from __future__ import annotations

import asyncio
import random
import string
from pathlib import Path

import uvloop
from report import Figure, Goal
from router_load.engines import OURS, Times, Workers, resident_mb, running
from router_load.load import http_load, http_request

_PROMPTS, _CHARACTERS, _MOST_MB = 20_000, 8192, 150.0


def measure(engines: list[str], folder: Path, scale: float) -> tuple[list[Figure], list[Goal]]:
    """One router after another; all with cache_aware."""
    figures: list[Figure] = []
    goals: list[Goal] = []
    count = int(_PROMPTS * scale)
    letters = "".join(random.Random(1).choices(string.ascii_letters, k=4 * _CHARACTERS))

    def make(number: int) -> bytes:
        at = number * 7919 % (3 * _CHARACTERS)
        return http_request({"prompt": f"{number:08d}" + letters[at : at + _CHARACTERS - 8], "max_tokens": 1})

    for engine in engines:
        with Workers(Times(), folder) as workers, running(engine, workers, folder) as router:
            before = resident_mb(router.process.pid)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                result = runner.run(http_load(router.http_port, make, 1, False, concurrency=16, count=count))
            assert result.failed == 0, f"{engine}: {result.statuses}"
            router.rest()
            after = resident_mb(router.process.pid)
        figures.append(Figure("memory at the start", before, "MB", engine))
        figures.append(Figure(f"memory after {count} prompts of 8 KB", after, "MB", engine))
        if engine == OURS:
            goals.append(Goal("MB after the prompts", after, most=_MOST_MB))
    return figures, goals
