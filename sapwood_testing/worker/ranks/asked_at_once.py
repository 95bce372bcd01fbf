"""Everything that can be asked at once, asked of a runner through a real scheduler."""

from __future__ import annotations

import random
from array import array
from collections import deque
from typing import Any

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_testing.worker.ranks.all_asked import ASKED, VOCAB, Answer, build_grammar
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.model.grammar.backend import TokenMasks
from sapwood_worker.records.output import Pooling
from sapwood_worker.records.step import LaunchedStep


def answers(runner: Any) -> list[Answer]:
    """Everything that can be asked at once, with a retraction of all in the middle; as many steps at once as there are stages."""
    scheduler = scheduler_for(runner.info, masks=TokenMasks(VOCAB), max_running=9, max_step_tokens=64)
    chance = random.Random(5)
    for serial, each in enumerate(ASKED):
        asked = dict(each)
        grammar = build_grammar(asked.pop("grammar")) if "grammar" in asked else None
        prompt = [chance.randrange(3, VOCAB) for _ in range(chance.randrange(2, 40))]
        params = SamplingParams(**{"seed": serial, "max_tokens": 16, **asked})
        scheduler.add(Request(serial, f"r{serial}", array("I", prompt), params, grammar=grammar))
    poolings: tuple[Pooling, ...] = ("mean", "last")
    for serial, pooling in enumerate(poolings, len(ASKED)):
        prompt = [chance.randrange(3, VOCAB) for _ in range(70)]
        scheduler.add(Request(serial, f"r{serial}", array("I", prompt), SamplingParams(), pooling=pooling))
    found = [Answer() for _ in range(len(ASKED) + 2)]
    launched: deque[LaunchedStep] = deque()
    steps = most = 0

    def take(keep: int) -> None:
        while len(launched) > keep:
            for output in scheduler.update(launched.popleft().result()):
                found[output.serial].take(output)

    while scheduler.has_work:
        while launched and not scheduler.plans_ahead:
            take(len(launched) - 1)
        planned = scheduler.schedule()
        if planned:
            launched.append(runner.launch(planned))
            most = max(most, len(launched))
        take(scheduler.depth - 1 if planned else max(0, len(launched) - 1))
        steps += 1
        if steps == 9:
            take(0)
            scheduler.pause(retract=True)
            scheduler.resume()
    assert most == scheduler.depth
    return found
