"""Steps of made-up requests, which tell from how many requests on it pays that the stages of a pipeline compute several steps
at once (lanes), and whether the tokens of such steps are right. For devices that compute while their host goes on."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator

import msgspec
import numpy as np
import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.pools.device_pool import DevicePool
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.records.step import Entry, IntArray, LaunchedStep, Step

logger = logging.getLogger(__name__)

_KEYS = 1024
"""Tokens of each request, if the pool holds as many: what is read of them is what lanes spare."""
_ROUNDS = 10
"""Tokens that each request gets in a trial."""
_TRIES = 2
_GAIN = 0.97
"""Part of the time of one lane that several have to take at most."""


def try_lanes(runner: ModelRunner, pool: DevicePool, parallel: Parallel, *, always: bool = False) -> None:
    """Sets in the runner's ``info`` how many lanes there are and from how many requests on; called by all ranks together.

    Args:
        runner: Runs this rank's part of the model, with as many lanes as there are stages.
        pool: Its keys and values, which are overwritten.
        parallel: The groups.
        always: Whether they are used even where that does not pay.
    """
    info, stages = runner.info, parallel.pp.size
    if info.lanes == 1:
        return
    for pages in pool.pages.values():
        pages.view(torch.uint8).zero_()
    first = DecodeTrial(runner, min(2 * stages, info.max_running))
    apart = first.tokens(stages, apart=True)  # connects the stages, for which NCCL may wait until a device is at rest
    wrong = max(parallel.exchange(int(first.tokens(stages) != apart), int))
    if wrong:
        logger.warning("pipeline: one step at a time: several at once gave other tokens on a rank")
        runner.info = msgspec.structs.replace(info, lanes=1)
        return
    chosen, said = 0, []
    size = info.max_running
    while size >= stages:
        trial = DecodeTrial(runner, size)
        one, several = (min(trial.seconds(shares) for _ in range(_TRIES)) for shares in (1, stages))
        # All ranks go by the slowest one's seconds, so that they choose alike.
        one, several = map(max, zip(*parallel.exchange((one, several), tuple[float, float]), strict=True))
        said.append(f"{size} requests: {1e3 * one:.2f} ms, {1e3 * several:.2f} ms")
        if several > _GAIN * one and not always:
            break
        chosen, size = size, size // 2
    told = f"{stages} at once from {chosen} requests on" if chosen else "one at a time: more at once take as long"
    logger.info("pipeline: steps of decodes: %s (a token of each by one, and by %d: %s)", told, stages, "; ".join(said))
    lanes = {"lanes_from": chosen} if chosen else {"lanes": 1}
    runner.info = msgspec.structs.replace(info, **lanes)


class DecodeTrial:
    """Decodes of made-up requests, each a token after another, which all ranks launch alike.

    Args:
        runner: Launches them.
        count: How many requests.
    """

    def __init__(self, runner: ModelRunner, count: int) -> None:
        info, self._runner = runner.info, runner
        room = min(info.num_pages, *(each.num_pages for each in info.windows), info.num_pages)
        each = min(max(1, room // count), -(-_KEYS // info.page_size), info.context_length // info.page_size)
        self._rows = np.arange(count)
        table = (self._rows[:, None] * each + np.arange(each)) % room
        self._pages = np.tile(table.astype(np.int32), (1, 1 + len(info.windows)))
        self._start = max(0, each * info.page_size - _ROUNDS)
        self._rounds = min(_ROUNDS, each * info.page_size)

    def seconds(self, shares: int) -> float:
        """Seconds for a token of each request, in so many shares."""
        began = time.perf_counter()
        self.tokens(shares)
        return (time.perf_counter() - began) / self._rounds

    def tokens(self, shares: int, *, apart: bool = False) -> list[list[int]]:
        """The tokens of each step.

        Args:
            shares: Into how many steps each round goes.
            apart: Whether each step ends before the next is launched.
        """
        launched: deque[LaunchedStep] = deque()
        found: list[list[int]] = []

        def take(keep: int) -> None:
            while len(launched) > keep:
                found.append([token for tokens in launched.popleft().result().token_ids for token in tokens])

        for step in self._steps(shares):
            launched.append(self._runner.launch(step))
            take(0 if apart else shares)
        take(0)
        return found

    def _steps(self, shares: int) -> Iterator[Step]:
        parts = np.array_split(self._rows, shares)
        greedy = SamplingParams(temperature=0.0)
        for at in range(self._rounds):
            for part in parts:
                one = np.ones(len(part), np.int64)
                tokens: IntArray = part % 97 if at == 0 else -one
                step = Step(0, part, one * (self._start + at), one, one, tokens)
                step.pages = self._pages[part]
                step.entries = tuple(Entry(int(row), 0, greedy, 1) for row in part) if at == 0 else ()
                yield step
