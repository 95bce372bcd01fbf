"""What stages queue on their devices, and that it comes to its end: a model of streams whose exchanges wait for each other.

The real link and the real order of deferred steps tell what is queued where. In the model a send waits for its receiver, which
NCCL's may do; the last stage's broadcast waits for all stages; and the host launches a step when it has the tokens of the last
one that it waits for. Times are the model's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps, SideQueue
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.pipeline import StageLink
from sapwood_worker.model.runner.model_runner import DeferredSteps
from sapwood_worker.records.step import CompletedStep, DeferredStep, LaunchedStep, ModelOutput, Step

LAYERS, TAIL, SENT, HOST = 1.0, 0.05, 0.01, 0.4
"""Times of a stage's layers, of what follows the last stage, of an exchange, and of the host from a step's tokens to the launch
of the next."""
STEPS = 40


@dataclass
class Queued:
    """Something on a queue: ``layers``, ``tail``, ``send``, ``receive``, ``spread``, or ``after`` so many on the main queue.

    Attributes:
        kind: Which of these.
        number: The step's; of ``after`` how many.
        taken: Steps whose tokens the host has had when it queued this.
        done: When it is over; None: it is not.
    """

    kind: str
    number: int
    taken: int
    done: float | None = None


class Stage(Group):
    """A stage's device as a group's rank: notes what is queued, by queue.

    Args:
        rank: Which.
        size: Of how many.
        side: Whether sends have a queue of their own.
    """

    def __init__(self, rank: int, size: int, *, side: bool) -> None:
        self.rank, self.size = rank, size
        self.main: list[Queued] = []
        self.side: list[Queued] = []
        self.taken = self.number = 0
        self._now = self.main
        ops = DeviceOps(torch.device("cpu"))
        ops.side_queue = lambda: Side(self) if side else SideQueue()  # type: ignore[method-assign]
        self.link = StageLink(self, 1, torch.float32, ops)
        self.deferred = None if self.link.last else DeferredSteps(size - 1 - rank)

    def put(self, kind: str, number: int) -> None:
        self._now.append(Queued(kind, number, self.taken))

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.side.append(Queued("after", len(self.main), self.taken))
        self._now = self.side
        yield
        self._now = self.main

    def send(self, x: Tensor, target: int) -> None:
        assert target == self.rank + 1
        self.put("send", self.number)

    def receive(self, x: Tensor, source: int) -> Tensor:
        assert source == self.rank - 1
        self.put("receive", self.number)
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        assert source == self.size - 1
        self.put("spread", int(x[0]))
        return x

    def launch(self, step: Step) -> LaunchedStep:
        """As a runner does."""
        if self.deferred is not None:
            self.deferred.make_way(step)
        self.number = step.number
        if not self.link.first:
            self.link.receive(1)
        self.put("layers", step.number)
        if not self.link.last:
            self.link.send(self.link.empty(1))

        def finish() -> LaunchedStep:
            self.link.spread(self.link.empty(1).fill_(step.number))
            self.put("tail", step.number)
            return CompletedStep(ModelOutput(step.number, []))

        return finish() if self.deferred is None else self.deferred.add(step, finish)


class Side(SideQueue):
    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def behind(self, used: Tensor):  # type: ignore[no-untyped-def]
        return self._stage.beside()


def queued(size: int, shares: int, depth: int, *, side: bool = True) -> list[Stage]:
    """What stages queue for decodes of as many shares of the requests, of which so many are in flight."""
    stages = [Stage(rank, size, side=side) for rank in range(size)]
    one = np.ones(1, np.int64)
    flying: list[list[LaunchedStep]] = []
    for number in range(STEPS):
        step = Step(number, one * (number % shares), one, one, one, -one)
        flying.append([stage.launch(step) for stage in stages])
        if len(flying) == depth:
            for stage, launched in zip(stages, flying.pop(0), strict=True):
                if isinstance(launched, DeferredStep):
                    launched.finish()
                stage.taken += 1
    for rest in flying:
        for launched in rest:
            if isinstance(launched, DeferredStep):
                launched.finish()
    return stages


def run(stages: list[Stage]) -> float:
    """When all that is queued is over; infinity if it never is."""
    queues = {(stage.rank, side): stage.side if side else stage.main for stage in stages for side in (False, True)}
    at = dict.fromkeys(queues, 0)
    told = [0.0]  # when the host has had the tokens of so many steps

    def head(rank: int, side: bool, kind: str, number: int) -> Queued | None:
        """What is next on a queue, if it is this."""
        rest = queues[rank, side][at[rank, side] :]
        return rest[0] if rest and (rest[0].kind, rest[0].number) == (kind, number) else None

    def ready(place: tuple[int, bool], item: Queued) -> float | None:
        """When all before it is over, and the host has queued it."""
        before = queues[place][at[place] - 1].done if at[place] else 0.0
        return None if before is None or item.taken >= len(told) else max(before, told[item.taken])

    def together(places: list[tuple[int, bool]], kinds: list[str], number: int) -> bool:
        found = [head(*place, kind, number) for place, kind in zip(places, kinds, strict=True)]
        items = [each for each in found if each is not None]
        times = [ready(place, each) for place, each in zip(places, found, strict=True) if each is not None]
        if len(items) < len(places) or None in times:
            return False
        for place, item in zip(places, items, strict=True):
            item.done = max(time for time in times if time is not None) + SENT
            at[place] += 1
        return True

    def advance(place: tuple[int, bool]) -> bool:
        rank, _side = place
        if at[place] == len(queues[place]):
            return False
        item = queues[place][at[place]]
        if item.kind == "receive":
            sender = (rank - 1, bool(queues[rank - 1, True]))
            return together([sender, place], ["send", "receive"], item.number)
        if item.kind == "spread":
            return together([(each.rank, False) for each in stages], ["spread"] * len(stages), item.number)
        if item.kind == "send":
            return False  # with its receive
        start = ready(place, item)
        if item.kind == "after" and start is not None:
            before = queues[rank, False][item.number - 1].done
            start = None if before is None else max(start, before)
        if start is None:
            return False
        item.done = start + {"layers": LAYERS, "tail": TAIL, "after": 0.0}[item.kind]
        at[place] += 1
        tails = [[each.done for each in queues[rank, False] if each.kind == "tail"] for rank in range(len(stages))]
        ends = [each[len(told) - 1] if len(each) >= len(told) else None for each in tails]
        if None not in ends:
            told.append(max(end for end in ends if end is not None) + HOST)
        return True

    while any(advance(place) for place in queues):
        pass
    if any(at[place] < len(queue) for place, queue in queues.items()):
        return float("inf")
    return max(item.done or 0.0 for queue in queues.values() for item in queue)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_stages_never_wait_in_a_circle_with_any_number_of_steps_in_flight(size: int) -> None:
    for shares in range(1, size + 1):
        for depth in range(1, size + 3):
            assert run(queued(size, shares, depth)) < float("inf"), (shares, depth)


def test_a_send_without_its_own_queue_would_block_what_its_receiver_waits_for() -> None:
    assert run(queued(2, 2, 2, side=False)) == float("inf")


@pytest.mark.parametrize("size", [2, 3])
def test_with_one_step_more_than_stages_no_stage_waits_for_the_host(size: int) -> None:
    """A step takes as long as a stage's part of it; one after another they take as long as all stages' parts."""
    busy = STEPS * (LAYERS + TAIL + 3 * SENT) + size * (LAYERS + TAIL + HOST)
    assert run(queued(size, size, size + 1)) < busy
    assert run(queued(size, size, size)) > busy + STEPS * HOST / (size + 1)
    assert run(queued(size, 1, 2)) > STEPS * size * LAYERS
