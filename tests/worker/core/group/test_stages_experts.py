"""What the experts of all stages of a pipeline have got, as rank 0 tells it."""

from __future__ import annotations

import threading
from array import array
from itertools import count
from multiprocessing import Pipe
from typing import Any

import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.fake_runner import FakeRunner
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_testing.worker.ranks.group_of_threads import run_group
from sapwood_testing.worker.split_models import SHAPE
from sapwood_worker.core.event_loop import EventLoop
from sapwood_worker.core.expert_balancing import ExpertWatch
from sapwood_worker.core.group.follower import COLLECT, COUNT_EXPERTS, READY, RankReport, follow
from sapwood_worker.ipc.messages import FromScheduler, Shutdown, Submit, ToScheduler
from sapwood_worker.ipc.messages import Step as Outputs
from sapwood_worker.records.expert_load import ExpertLoad
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.step import LaunchedStep, ModelOutput, Step
from sapwood_worker.records.step_wire import encode

INFO = ModelInfo(
    architecture="fake", dtype="none", context_length=64, vocab_size=9, eos_token_ids=(), page_size=4, num_pages=8
)
OPTIONS: dict[str, Any] = {"num_pages": 40, "max_running": 5, "page_size": 16}


class Channel:
    """Five requests at once, then one more, then the end. ``loads`` are what was told of experts."""

    def __init__(self) -> None:
        requests = [
            Submit(
                serial,
                f"r{serial}",
                array("I", range(3 + serial, 20 + serial)).tobytes(),
                SamplingParams(seed=serial, max_tokens=16, ignore_eos=True),
            )
            for serial in range(6)
        ]
        self._coming: list[list[ToScheduler]] = [[*requests[:5]], [requests[5]], [Shutdown()]]
        self.loads: list[ExpertLoad] = []

    def receive(self, *, wait: bool) -> list[ToScheduler]:
        return self._coming.pop(0) if wait else []

    def send(self, message: FromScheduler) -> None:
        if isinstance(message, Outputs) and message.experts is not None:
            self.loads.append(message.experts)


def loads(runner: Any) -> list[ExpertLoad]:
    """What the loop of the scheduler process tells, which looks in every other turn; the last is told at its end."""
    scheduler, channel = scheduler_for(runner.info, max_running=5, max_step_tokens=5 * 17), Channel()
    seconds = count()
    EventLoop(scheduler, runner, channel, observers=[ExpertWatch(runner.experts, lambda: float(next(seconds)))]).run()
    return channel.loads


@pytest.mark.parametrize(("size", "stages"), [(1, 2), (1, 3), pytest.param(2, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("micro_batches", ["auto", "off"])
def test_the_experts_of_all_stages_are_counted_while_they_compute_and_when_they_have(
    tiny_model: Any, make_runner: Any, size: int, stages: int, micro_batches: str
) -> None:
    path = tiny_model("deepseek-v3", num_hidden_layers=6, **SHAPE).path
    expected = loads(make_runner(path, **OPTIONS))
    found = run_group(size, path, loads, stages=stages, micro_batches=micro_batches, **OPTIONS)
    assert sum(expected[-1].tokens) > 0
    assert found[-1] == expected[-1]
    totals = [sum(load.tokens) for load in found]
    assert totals == sorted(totals) and len({*totals}) > 10, "also while there was work"


def test_a_first_stage_without_experts_tells_of_the_others(tiny_model: Any, make_runner: Any) -> None:
    def counts(runner: Any) -> tuple[list[list[int]], list[list[int]]]:
        loads(runner)
        return runner.experts()(), runner._runner.experts()()

    path = tiny_model("deepseek-v3", num_hidden_layers=6, first_k_dense_replace=4, **SHAPE).path
    runner = make_runner(path, **OPTIONS)
    loads(runner)
    found, own = run_group(1, path, counts, stages=2, **OPTIONS)
    assert own == []
    assert found == runner.experts()()
    assert len(found) == 2 and all(map(sum, found))


def test_a_rank_waits_for_expert_counts_of_the_steps_that_are_over() -> None:
    """Else its device would have nothing to do until the next step is launched."""
    seen: list[str] = []

    class Device(FakeRunner):
        def __init__(self) -> None:
            super().__init__(INFO)
            self.asynchronous = True
            self.experts = self.ask

        def ask(self) -> Any:
            seen.append("asked")
            return self.counts

        def counts(self) -> list[list[int]]:
            seen.append("read")
            return [[3, 4]]

        def launch(self, step: Step) -> LaunchedStep:
            return Launched(step.number)

    class Launched:
        def __init__(self, number: int) -> None:
            self._number = number

        def result(self) -> ModelOutput:
            seen.append(f"step {self._number}")
            return ModelOutput(self._number, [])

        def check(self) -> None:
            pass

    here, there = Pipe()
    follower = threading.Thread(target=follow, args=(Device(), there))
    follower.start()
    try:
        assert here.recv_bytes() == READY
        for message in (encode(Step(0)), encode(Step(1)), COUNT_EXPERTS, encode(Step(2)), *(COLLECT,) * 3):
            here.send_bytes(message)
        reports = [RankReport.from_bytes(here.recv_bytes()) for _ in range(4)]
    finally:
        here.close()
        follower.join()
    assert seen == ["asked", "step 0", "step 1", "read", "step 2"]
    assert [report.experts for report in reports] == [None, None, [[3, 4]], None]
