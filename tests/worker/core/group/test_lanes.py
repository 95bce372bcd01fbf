"""Stages of a pipeline compute at once, each for other requests."""

from __future__ import annotations

import threading
from array import array
from typing import Any

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_testing.worker.ranks.group_of_threads import run_group
from sapwood_testing.worker.split_models import SHAPE
from sapwood_worker.core.event_loop import EventLoop
from sapwood_worker.ipc.messages import FromScheduler, Shutdown, Submit, ToScheduler
from sapwood_worker.ipc.messages import Step as Outputs
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.records.step import Step

COUNT = 5


class Channel:
    """All requests at once, then the end. ``tokens`` are the answers."""

    def __init__(self) -> None:
        self._messages: list[ToScheduler] = [
            Submit(
                serial,
                f"r{serial}",
                array("I", range(3 + serial, 20 + serial)).tobytes(),
                SamplingParams(seed=serial, max_tokens=16, ignore_eos=True),
            )
            for serial in range(COUNT)
        ]
        self.tokens: list[list[int]] = [[] for _ in range(COUNT)]

    def receive(self, *, wait: bool) -> list[ToScheduler]:
        messages, self._messages = self._messages, []
        return messages or ([Shutdown()] if wait else [])

    def send(self, message: FromScheduler) -> None:
        for output in message.outputs if isinstance(message, Outputs) else ():
            self.tokens[output.serial] += output.token_ids


def answers(runner: Any) -> list[list[int]]:
    """What the loop of the scheduler process answers."""
    scheduler, channel = scheduler_for(runner.info, max_running=COUNT, max_step_tokens=COUNT * 17), Channel()
    EventLoop(scheduler, runner, channel).run()
    return channel.tokens


def test_while_a_stage_decodes_a_step_those_before_it_compute_the_next(
    tiny_model: Any, make_runner: Any, monkeypatch: Any
) -> None:
    """The last stage waits in each decode until the first one is in the last of those that there are micro-batches for."""
    stages = 2
    begun = [threading.Event() for _ in range(40 * stages)]
    forward = ModelRunner._forward
    rows: list[int] = []

    def watched(runner: ModelRunner, step: Step) -> Any:
        last = runner._model.own.stop == runner._model.config.num_layers
        if runner._model.own.start == 0:
            begun[step.number].set()
        elif last and 1 <= step.number < 12 * stages:
            beside = step.number + stages - 1
            assert begun[beside].wait(timeout=30), f"step {beside} has not begun while {step.number} is computed"
            rows.append(len(step.rows))
        return forward(runner, step)

    path = tiny_model("llama", num_hidden_layers=4, **SHAPE).path
    options: dict[str, Any] = {"num_pages": 40, "max_running": COUNT, "page_size": 16}
    alone = answers(make_runner(path, **options))
    monkeypatch.setattr(ModelRunner, "_forward", watched)
    assert run_group(1, path, answers, stages=stages, **options) == alone
    assert [len(tokens) for tokens in alone] == [16] * COUNT
    assert len(rows) == 12 * stages - 1
    assert set(rows) == {COUNT // stages, -(-COUNT // stages)}
