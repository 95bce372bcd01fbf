"""What the order of waiting requests does for agents whose sessions do not all fit in the cache: in virtual time.

    python benchmarks/bench_agents.py

It runs the worker's scheduler and its prefix cache; a step takes what ``COSTS`` of ``bench_shares.py`` says of its decodes,
prompt tokens and context. Sessions of 30 turns begin with one of four system prompts; each turn adds a question or a tool's
result to all that was said, pauses lie between 0.3 and 60 s, evenly on a logarithmic scale. The cache has pages for a share of
what the sessions hold on average.

Prints one JSON object a line: the share of prompt tokens that were cached, and the first token's time in seconds.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from typing import NamedTuple

import numpy as np
from bench_shares import COSTS, percentile

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.records.step import ModelOutput


class Turn(NamedTuple):
    """A session's next request."""

    at: float
    session: int
    turn: int
    prompt: list[int]


def run(arguments: argparse.Namespace, settings: dict[str, object]) -> dict[str, object]:
    """One run of the trace under some settings of the scheduler."""
    device, draw = COSTS["H200 8B"], random.Random(1)
    system, question, answer = 512, arguments.question, 16
    held = 4 * system + arguments.sessions * arguments.turns * (question + answer) / 2
    now = 0.0
    config = SchedulerConfig(
        page_size=16,
        num_pages=int(held * arguments.share / 16),
        context_length=system + arguments.turns * (question + answer) + 64,
        max_running=device.max_running,
        max_step_tokens=device.max_step_tokens,
        step_seconds=0.25,
        **settings,  # type: ignore[arg-type]
    )
    scheduler = Scheduler(config, clock=lambda: now)
    some = lambda count: [draw.randrange(100_000) for _ in range(count)]  # noqa: E731
    systems = [some(system) for _ in range(4)]
    coming = [
        Turn(draw.random() * 60, session, 1, systems[draw.randrange(4)] + some(question))
        for session in range(arguments.sessions)
    ]
    heapq.heapify(coming)
    under_way: dict[int, Turn] = {}
    said: dict[int, list[int]] = {}
    waits: list[float] = []
    serial = cached = asked = 0
    while scheduler.has_work or coming:
        if not scheduler.has_work:
            now = max(now, coming[0].at)
        while coming and coming[0].at <= now:
            turn = heapq.heappop(coming)
            under_way[serial], said[serial] = turn, []
            sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
            tenant = f"t{turn.session % arguments.tenants}"
            scheduler.add(Request(serial, str(serial), turn.prompt, sampling, tenant=tenant))
            asked += len(turn.prompt)
            serial += 1
        step = scheduler.schedule()
        if not len(step.rows):
            now += 1e-3
            continue
        now += device.seconds(step)
        for output in scheduler.update(ModelOutput(step.number, [[7] * count for count in step.samples.tolist()])):
            turn = under_way[output.serial]
            if output.token_ids and not said[output.serial]:
                waits.append(now - turn.at)
            said[output.serial] += output.token_ids
            if output.finish_reason is None:
                continue
            cached += output.cached_tokens
            if turn.turn < arguments.turns:
                prompt = turn.prompt + said[output.serial] + some(question)
                pause = 0.3 * 200 ** draw.random()
                heapq.heappush(coming, Turn(now + pause, turn.session, turn.turn + 1, prompt))
            del under_way[output.serial], said[output.serial]
    return {
        "hit": round(cached / asked, 3),
        **{f"first_p{int(100 * share)}": round(percentile(waits, share), 2) for share in (0.5, 0.9, 0.99)},
        "mean": round(float(np.mean(waits)), 2),
        "seconds": round(now),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--question", type=int, default=640, help="tokens of a turn")
    parser.add_argument("--share", type=float, default=1 / 3, help="of what the sessions hold, in the cache")
    parser.add_argument("--tenants", type=int, default=1)
    parser.add_argument("--settings", nargs="+", default=["policy=fcfs", "policy=lpm"], help="of the scheduler")
    arguments = parser.parse_args()
    for each in arguments.settings:
        settings: dict[str, object] = dict(pair.split("=") for pair in each.split(","))
        print(json.dumps({"settings": each, **run(arguments, settings)}), flush=True)


if __name__ == "__main__":
    main()
