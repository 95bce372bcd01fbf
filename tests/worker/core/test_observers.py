"""What observers of the scheduler's loop see."""

from __future__ import annotations

import logging
import re

import pytest

from sapwood_testing.worker.fake_runner import FakeRunner
from sapwood_worker.core.event_loop import EventLoop
from sapwood_worker.core.observers import AllReduceWatch, StageLog, StepClock
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.ipc.messages import StagedChannel, Step, staged_receive, staged_send
from sapwood_worker.records.load import Load
from tests.worker.core.test_event_loop import INFO, ListChannel, submit


def scheduler() -> Scheduler:
    return Scheduler(SchedulerConfig(page_size=4, num_pages=32, context_length=64))


def test_stages_of_a_step_are_logged_by_an_observer_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    EventLoop(scheduler(), FakeRunner(INFO), ListChannel([submit(0, [1], 2)]), overlap=False).run()
    assert "handoff stage" not in caplog.text, "nobody has asked"
    channel = StagedChannel(ListChannel([submit(0, [1], 2)]))
    EventLoop(scheduler(), FakeRunner(INFO), channel, observers=[StageLog()], overlap=False).run()
    found = re.findall(r"handoff stage (.+) at [0-9.]+$", caplog.text, re.MULTILINE)
    assert found == ["step planned", "step launched", "first token", "tokens sent", "tokens sent"]


def test_the_front_s_lines_name_tokens_and_requests_of_a_transfer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    passed: list[object] = []
    send, receive = staged_send(passed.append), staged_receive(passed.append)
    plain, handing_off = submit(0, [1]), submit(1, [1])
    handing_off = type(plain)(**{name: getattr(plain, name) for name in plain.__struct_fields__} | {"hands_off": True})
    send(plain)
    assert "handoff stage" not in caplog.text
    send(handing_off)
    receive(Step([], Load()))
    assert passed == [plain, handing_off, Step([], Load())]
    assert re.findall(r"handoff stage (.+) at", caplog.text) == ["request passed on"]


def test_times_of_steps_wait_for_a_message_that_is_sent() -> None:
    channel = ListChannel([submit(0, [1], 3)])
    EventLoop(scheduler(), FakeRunner(INFO), channel, observers=[StepClock()], overlap=False).run()
    times = [time for message in channel.sent if isinstance(message, Step) for time in message.times]
    assert [(time.prefill_tokens, time.decode_tokens, time.started) for time in times] == [
        (1, 0, [0]),
        (0, 1, []),
        (0, 1, []),
    ]


def test_counts_of_all_reduces_are_reported_once_a_second_and_when_work_ends() -> None:
    now, counts = [100.0], {"ring": 1}
    watch = AllReduceWatch(lambda: dict(counts), lambda: now[0])

    def seen(*, idle: bool) -> dict[str, int] | None:
        message = Step([], Load())
        assert watch.report(message, idle=idle) == (message.sums is not None)
        return message.sums

    assert seen(idle=False) == {"ring": 1}
    counts["ring"] = 2
    now[0] += 0.5
    assert seen(idle=False) is None
    assert seen(idle=True) == {"ring": 2}
    assert seen(idle=True) is None, "nothing new"
