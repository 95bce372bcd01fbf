"""The loop of the scheduler process, over a channel in memory."""

from __future__ import annotations

import json
import random
from array import array
from collections import deque
from itertools import chain, islice
from pathlib import Path

import msgspec
import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.fake_runner import FakeRunner, FakeStep, continuation
from sapwood_worker.core.event_loop import MOST_FAILURES, EventLoop, Operations
from sapwood_worker.core.observers import CrashDump, Watchdog
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.ipc.liveness import ProgressView
from sapwood_worker.ipc.messages import (
    Abort,
    Answered,
    Flush,
    FromScheduler,
    Refused,
    Shutdown,
    StartProfile,
    Step,
    Submit,
    ToScheduler,
    encode,
    from_scheduler_decoder,
    to_scheduler_decoder,
)
from sapwood_worker.records.kv_events import KvEvent
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.output import RequestOutput, TokenLogprobs
from sapwood_worker.records.step import Step as PlannedStep

VOCAB = 50
POISON = 49
INFO = ModelInfo(
    architecture="fake",
    dtype="none",
    context_length=64,
    vocab_size=VOCAB,
    eos_token_ids=(),
    page_size=4,
    num_pages=32,
)
INFO_64 = msgspec.structs.replace(INFO, num_pages=64)


class ListChannel:
    """Hands out one list of messages a call, then Shutdown; keeps what is sent. All goes through the wire format."""

    def __init__(self, *deliveries: list[ToScheduler]) -> None:
        self._deliveries = deque(deliveries)
        self.sent: list[FromScheduler] = []
        self.waits: list[bool] = []

    def receive(self, *, wait: bool) -> list[ToScheduler]:
        self.waits.append(wait)
        if self._deliveries:
            return [to_scheduler_decoder.decode(encode(message)) for message in self._deliveries.popleft()]
        return [Shutdown()] if wait else []

    def send(self, message: FromScheduler) -> None:
        self.sent.append(from_scheduler_decoder.decode(encode(message)))

    def tokens(self, serial: int) -> list[int]:
        steps = [message for message in self.sent if isinstance(message, Step)]
        return [
            token for step in steps for output in step.outputs if output.serial == serial for token in output.token_ids
        ]

    def outputs(self, serial: int) -> list[tuple[list[int], str | None, int, list[TokenLogprobs]]]:
        """What does not depend on timing."""
        steps = [message for message in self.sent if isinstance(message, Step)]
        return [
            (output.token_ids, output.finish_reason, output.completion_tokens, output.logprobs)
            for step in steps
            for output in step.outputs
            if output.serial == serial
        ]

    def ends(self) -> dict[int, str]:
        steps = [message for message in self.sent if isinstance(message, Step)]
        return {
            out.serial: out.finish_reason for step in steps for out in step.outputs if out.finish_reason is not None
        }


class Watched(ListChannel):
    """Notes for how long the loop has been at its step when it looks at its messages."""

    def __init__(self, view: ProgressView, *deliveries: list[ToScheduler]) -> None:
        super().__init__(*deliveries)
        self._view = view
        self.seconds: list[float] = []

    def receive(self, *, wait: bool) -> list[ToScheduler]:
        self.seconds.append(self._view.seconds())
        return super().receive(wait=wait)


class Probe:
    """A profiler, a runner and a cache tier that note whether the watchdog would see them hang."""

    def __init__(self, view: ProgressView) -> None:
        self._view = view
        self.seen: dict[str, bool] = {}

    def note(self, what: str) -> None:
        self.seen[what] = self._view.seconds() > 0

    def start(self, folder: str) -> None:
        self.note("operation")

    def stop(self) -> str:
        return ""


def submit(serial: int, prompt: list[int], max_tokens: int = 5) -> Submit:
    return Submit(serial, f"r{serial}", array("I", prompt).tobytes(), SamplingParams(max_tokens=max_tokens))


def run(
    *deliveries: list[ToScheduler],
    runner: FakeRunner | None = None,
    overlap: bool = False,
    dump: CrashDump | None = None,
    **settings: int,
) -> ListChannel:
    scheduler = Scheduler(SchedulerConfig(**({"page_size": 4, "num_pages": 32, "context_length": 64} | settings)))  # type: ignore[arg-type]
    channel = ListChannel(*deliveries)
    EventLoop(
        scheduler,
        runner or FakeRunner(INFO, poison=POISON),
        channel,
        observers=[] if dump is None else [dump],
        overlap=overlap,
    ).run()
    return channel


def expected(prompt: list[int], count: int) -> list[int]:
    return list(islice(continuation(prompt, SamplingParams(), VOCAB), count))


def test_all_outputs_of_a_step_travel_in_one_message() -> None:
    channel = run([submit(serial, [serial]) for serial in range(8)])
    steps = [message for message in channel.sent if isinstance(message, Step) and message.outputs]
    assert [len(step.outputs) for step in steps] == [8] * 5
    for serial in range(8):
        assert channel.tokens(serial) == expected([serial], 5)
    assert steps[0].load.running_requests == 8
    assert steps[-1].load.running_requests == 0


def test_the_loop_waits_for_messages_only_when_there_is_no_work() -> None:
    channel = run([submit(0, [1], max_tokens=3)])
    assert channel.waits == [True, False, False, True]


def test_the_load_is_reported_at_the_start_and_when_it_changes() -> None:
    channel = run([Abort(5)], [Abort(6)])
    assert [type(message) for message in channel.sent] == [Step]


def test_an_abort_between_two_steps_ends_the_request_without_further_output() -> None:
    channel = run([submit(0, [1], 50), submit(1, [2], 10)], [], [Abort(0)])
    assert channel.tokens(0) == expected([1], 2)
    assert channel.tokens(1) == expected([2], 10)
    assert channel.ends() == {1: "length"}


def test_a_failed_step_ends_its_requests_and_the_next_ones_are_served() -> None:
    channel = run(
        [submit(0, [1], 50)],
        [submit(1, [POISON, 1])],
        [submit(2, [3])],
    )
    assert channel.ends() == {0: "error", 1: "error", 2: "length"}
    assert channel.tokens(2) == expected([3], 5)


def test_what_never_works_again_ends_the_process() -> None:
    class Broken(FakeRunner):
        def launch(self, step: PlannedStep) -> FakeStep:
            raise RuntimeError("device lost")

    deliveries: list[list[ToScheduler]] = [[submit(serial, [serial])] for serial in range(MOST_FAILURES)]
    with pytest.raises(RuntimeError, match="steps in a row failed"):
        run(*deliveries, runner=Broken(INFO))


def test_a_failed_step_leaves_a_dump_that_names_its_requests(tmp_path: Path) -> None:
    dump = CrashDump(tmp_path, INFO)
    run([submit(0, [1], 50)], [submit(1, [POISON, 1])], dump=dump)
    (file,) = tmp_path.iterdir()
    found = json.loads(file.read_text())
    assert len(found["requests"]) == 2
    assert found["steps"][-1]["rows"] == [0, 1]


def test_what_is_refused_is_answered_and_harms_nobody() -> None:
    channel = run([submit(0, [1]), submit(1, [1] * 64), submit(2, [2])], max_waiting=1)
    refusals = {message.serial: message for message in channel.sent if isinstance(message, Refused)}
    assert refusals[1].kind == "InvalidArgumentError"
    assert refusals[1].field == "token_ids"
    assert refusals[2].kind == "ResourceExhaustedError"
    assert refusals[2].retry_after is not None
    assert channel.tokens(0) == expected([1], 5)


def test_flushing_frees_what_finished_requests_left_behind() -> None:
    channel = run([submit(0, list(range(10)), 2)], [], [], [Flush(7)])
    assert [message for message in channel.sent if isinstance(message, Answered)] == [Answered(7, 3)]
    last = channel.sent[-1]
    assert isinstance(last, Step)
    assert last.load.used_pages == 0


def traffic(chance: random.Random) -> list[list[ToScheduler]]:
    """Deliveries of requests, some with a common prefix, and of aborts."""
    shared = [chance.randrange(POISON) for _ in range(12)]
    deliveries: list[list[ToScheduler]] = []
    serials: list[int] = []
    for _ in range(chance.randint(1, 30)):
        messages: list[ToScheduler] = []
        for _ in range(chance.choice([0, 0, 1, 1, 4])):
            prompt = shared[: chance.randint(0, 12)] + [chance.randrange(POISON) for _ in range(chance.randint(1, 9))]
            sampling = SamplingParams(
                seed=len(serials), max_tokens=chance.choice([1, 2, 10, 60]), stop_token_ids=(7, 8), logprobs=1
            )
            serial = len(serials)
            messages.append(Submit(serial, f"r{serial}", array("I", prompt).tobytes(), sampling))
            serials.append(serial)
        if serials and chance.random() < 0.15:
            messages.append(Abort(chance.choice(serials)))
        deliveries.append(messages)
    return deliveries


@pytest.mark.parametrize("part", range(5))
def test_the_overlapped_loop_gives_what_the_normal_loop_gives(part: int) -> None:
    for seed in range(part * 20, part * 20 + 20):
        chance = random.Random(seed)
        deliveries = traffic(chance)
        settings = {"max_running": chance.choice([1, 4, 16]), "num_pages": chance.choice([16, 20, 64])}
        settings["max_step_tokens"] = chance.choice([1, 16, 512])
        overlapped = FakeRunner(INFO_64, chance=random.Random(seed))
        one = run(*deliveries, runner=FakeRunner(INFO_64), **settings)
        other = run(*deliveries, runner=overlapped, overlap=True, **settings)
        aborted = {message.serial for each in deliveries for message in each if isinstance(message, Abort)}
        submitted = [message for each in deliveries for message in each if isinstance(message, Submit)]
        for serial in (message.serial for message in submitted):
            if serial in aborted:  # how far it came depends on when
                length = min(len(one.tokens(serial)), len(other.tokens(serial)))
                assert one.tokens(serial)[:length] == other.tokens(serial)[:length]
            else:
                assert one.outputs(serial) == other.outputs(serial), f"seed {seed}"


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_with_overlap_a_step_is_launched_before_the_last_result_is_taken(micro_batches: int) -> None:
    events: list[str] = []

    class Watched(FakeRunner):
        def launch(self, step: PlannedStep) -> FakeStep:
            events.append(f"launch {step.number}")
            launched = super().launch(step)
            run = launched._run
            launched._run = lambda last: (events.append(f"take {step.number}"), run(last))[1]  # type: ignore[func-returns-value]
            return launched

    # One request is too few to share: it is in each step, of which two are in flight, whatever the pipeline's depth.
    run(
        [submit(0, [1], max_tokens=5)],
        runner=Watched(INFO),
        overlap=True,
        micro_batches=micro_batches,
        micro_batches_from=2,
        chained=True,
    )
    taken = [f"take {step}" for step in range(5)]
    launched = [f"launch {step}" for step in range(5)]
    assert events == [*launched[:2], *chain(*zip(taken[:3], launched[2:], strict=True)), *taken[3:]]


def test_with_overlap_a_failed_step_fails_its_follower_and_later_ones_are_served() -> None:
    channel = run([submit(0, [1], 50)], [submit(1, [POISON, 1])], [submit(2, [3])], [], [submit(3, [4])], overlap=True)
    assert channel.ends() == {0: "error", 1: "error", 2: "error", 3: "length"}
    assert channel.tokens(3) == expected([4], 5)


def test_the_watchdog_sees_whatever_gets_stuck_but_not_the_wait_for_messages(tmp_path: Path) -> None:
    view = ProgressView(tmp_path / "progress")
    progress = Watchdog(tmp_path / "progress", timeout=300.0)
    probe = Probe(view)

    class PlanNoted(Scheduler):
        def expire(self) -> list[RequestOutput]:
            probe.note("plan")
            return super().expire()

        def take_kv_events(self) -> list[KvEvent]:
            if self.has_work:
                probe.note("report")
            return super().take_kv_events()

    class LaunchNoted(FakeRunner):
        def launch(self, step: PlannedStep) -> FakeStep:
            probe.note("model")
            return super().launch(step)

    scheduler = PlanNoted(SchedulerConfig(page_size=4, num_pages=32, context_length=64))
    channel = Watched(view, [StartProfile(0, "")], [submit(1, [1])])
    EventLoop(
        scheduler,
        LaunchNoted(INFO),
        channel,
        operations=Operations(scheduler, probe),
        observers=[progress],
        overlap=False,
    ).run()
    progress.idle()
    assert probe.seen == dict.fromkeys(("operation", "plan", "report", "model"), True)
    assert set(channel.seconds) == {0.0}
