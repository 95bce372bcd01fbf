import itertools
import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import InvalidArgumentError, ResourceExhaustedError
from sapwood_testing.worker.fake_runner import FakeRunner, continuation
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import IllegalTransitionError, Request, RequestState
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.core.scheduler.waiting import WaitingQueue
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.output import RequestOutput

VOCAB = 50


def expected_tokens(prompt: list[int], sampling: SamplingParams, limit: int) -> list[int]:
    """What a request must get, computed without scheduler, pages or batches."""
    tokens: list[int] = []
    for token in continuation(prompt, sampling, VOCAB):
        tokens.append(token)
        if token in sampling.stop_token_ids or len(tokens) >= sampling.max_tokens or len(prompt) + len(tokens) >= limit:
            break
    return tokens


class Driver:
    """Runs a scheduler over a FakeRunner and checks it after every step."""

    def __init__(self, **settings: object) -> None:
        self.config = SchedulerConfig(**({"page_size": 4, "num_pages": 64, "context_length": 128} | settings))  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.config)
        self.runner = FakeRunner(
            ModelInfo(
                architecture="fake",
                dtype="none",
                context_length=self.config.context_length,
                vocab_size=VOCAB,
                eos_token_ids=(),
                page_size=self.config.page_size,
                num_pages=self.config.num_pages,
            )
        )
        self.limit = min(self.config.context_length, self.config.num_pages * self.config.page_size)
        self.expected: dict[str, list[int]] = {}
        self.received: dict[str, list[int]] = {}
        self.finished: dict[str, RequestOutput] = {}
        self.batches: list[list[str]] = []
        self.names: list[str] = []

    def add(self, name: str, prompt: list[int], namespace: bytes = b"", **sampling: object) -> None:
        params = SamplingParams(**({"seed": len(self.names)} | sampling))  # type: ignore[arg-type]
        self.names.append(name)
        self.scheduler.add(Request(len(self.names) - 1, name, prompt, params, namespace))
        self.expected[name] = expected_tokens(prompt, params, self.limit)
        self.received[name] = []

    def abort(self, name: str) -> bool:
        return self.scheduler.abort(self.names.index(name))

    def step(self) -> list[RequestOutput]:
        planned = self.scheduler.schedule()
        assert len(planned.rows), "there is work, but the step is empty"
        self.batches.append(self.scheduler.in_flight())
        assert len(planned.token_ids) <= max(self.config.max_step_tokens, len(planned.rows) + 1)
        outputs = self.scheduler.update(self.runner.execute(planned))
        for output in outputs:
            name = self.names[output.serial]
            self.received[name] += output.token_ids
            assert name not in self.finished, "a request ended twice or got tokens after its end"
            if output.finish_reason is not None:
                self.finished[name] = output
        self.scheduler.check()
        return outputs

    def run(self, limit: int = 5_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")


def test_one_request_gets_the_tokens_of_its_own_text() -> None:
    driver = Driver()
    driver.add("a", [1, 2, 3], max_tokens=10)
    driver.run()
    assert driver.received["a"] == driver.expected["a"]
    assert driver.finished["a"].finish_reason == "length"
    assert driver.finished["a"].completion_tokens == 10


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_mix_of_arrivals_and_aborts_gives_right_tokens_and_leaks_nothing(
    data: st.DataObject,
) -> None:
    page_size = data.draw(st.sampled_from([1, 2, 4, 16]))
    driver = Driver(
        page_size=page_size,
        num_pages=data.draw(st.integers(2, 24)) if page_size > 2 else data.draw(st.integers(12, 60)),
        context_length=data.draw(st.integers(8, 64)),
        max_running=data.draw(st.integers(1, 6)),
        max_step_tokens=data.draw(st.integers(1, 24)),
        policy=data.draw(st.sampled_from(["fcfs", "lpm"])),
        eviction=data.draw(st.sampled_from(["lru", "lfu", "fifo", "slru"])),
        prefix_cache=data.draw(st.booleans()),
    )
    randomness = random.Random(data.draw(st.integers(0, 2**32)))
    aborted: set[str] = set()
    for number in range(data.draw(st.integers(1, 14))):
        shared = [1, 2, 3, 4, 5, 6, 7, 8][: randomness.randint(0, 8)]
        prompt = [*shared, *(randomness.randrange(VOCAB) for _ in range(randomness.randint(1, 6)))][: driver.limit - 1]
        driver.add(
            f"r{number}",
            prompt,
            namespace=randomness.choice([b"", b"", b"t"]),
            max_tokens=randomness.randint(1, 20),
            stop_token_ids=tuple(randomness.sample(range(VOCAB), 2)),
        )
        for _ in range(randomness.randint(0, 4)):
            if driver.scheduler.has_work:
                driver.step()
        if randomness.random() < 0.25:
            victim = f"r{randomness.randint(0, number)}"
            if driver.abort(victim):
                aborted.add(victim)
                driver.scheduler.check()
        if randomness.random() < 0.1:
            driver.scheduler.flush_cache()
            driver.scheduler.check()
    driver.run()
    for name, expected in driver.expected.items():
        if name in aborted:
            assert expected[: len(driver.received[name])] == driver.received[name]
            assert name not in driver.finished
        else:
            assert driver.received[name] == expected
            assert name in driver.finished
    assert driver.scheduler.load().running_requests == driver.scheduler.load().waiting_requests == 0
    driver.scheduler.flush_cache()
    assert driver.scheduler.load().used_pages == 0


def test_requests_share_batches_and_a_new_one_joins_as_soon_as_one_leaves() -> None:
    driver = Driver(max_running=2)
    driver.add("short", [1], max_tokens=2)
    driver.add("long", [2], max_tokens=6)
    driver.add("next", [3], max_tokens=2)
    driver.run()
    assert driver.batches[:3] == [["short", "long"], ["short", "long"], ["long", "next"]]


def test_a_long_prompt_is_cut_into_chunks_and_others_decode_beside_it() -> None:
    driver = Driver(max_step_tokens=8)
    driver.add("running", [1], max_tokens=12)
    driver.step()
    driver.add("long", list(range(30)), max_tokens=1)
    driver.run()
    together = [batch for batch in driver.batches if set(batch) == {"running", "long"}]
    assert len(together) == 5  # 30 tokens, 7 a step with one decode
    assert driver.received["long"] == driver.expected["long"]


def test_a_prompt_whose_tokens_are_scored_takes_more_and_smaller_steps() -> None:
    """Each such token costs nearly as much as one that is sampled."""
    driver = Driver(max_step_tokens=9)
    driver.add("running", [1], max_tokens=40)
    driver.step()
    driver.add("scored", list(range(30)), max_tokens=1, prompt_logprobs=0)
    driver.run()
    together = [batch for batch in driver.batches if set(batch) == {"running", "scored"}]
    assert len(together) == 30  # a token a step
    assert driver.received["scored"] == driver.expected["scored"]


def test_who_comes_behind_a_prompt_whose_tokens_are_scored_begins_beside_it() -> None:
    driver = Driver(max_step_tokens=16)
    driver.add("scored", list(range(30)), max_tokens=1, prompt_logprobs=0)
    driver.step()
    driver.add("other", list(range(7)), max_tokens=1)
    driver.run()
    assert driver.batches.index(["scored", "other"]) == 1
    assert list(driver.finished) == ["other", "scored"]
    assert driver.received == driver.expected


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    driver = Driver()
    prompt = list(range(20))
    driver.add("first", prompt, max_tokens=1)
    driver.run()
    driver.add("second", prompt, max_tokens=1)
    driver.run()
    assert driver.finished["first"].cached_tokens == 0
    assert driver.finished["second"].cached_tokens == 19  # one token is left to compute
    assert driver.received["second"] == driver.expected["second"]


def test_a_sibling_hits_the_prompt_of_a_request_that_still_runs() -> None:
    driver = Driver()
    driver.add("first", list(range(20)), max_tokens=50)
    driver.step()
    driver.add("sibling", [*range(18), 49], max_tokens=1)
    driver.run()
    assert driver.finished["sibling"].cached_tokens == 18
    assert driver.received["sibling"] == driver.expected["sibling"]
    assert driver.received["first"] == driver.expected["first"]


def test_of_requests_with_one_cold_prefix_one_computes_and_the_others_hit() -> None:
    driver = Driver(num_pages=256, max_step_tokens=32)
    prefix = [number % VOCAB for number in range(96)]
    for number in range(4):
        driver.add(f"r{number}", [*prefix, number], max_tokens=3)
    driver.run()
    assert driver.batches[:3] == [["r0"]] * 3  # 97 tokens, 32 a step
    assert driver.batches[3] == ["r0", "r1", "r2", "r3"]
    assert [driver.finished[f"r{number}"].cached_tokens for number in range(4)] == [0, 96, 96, 96]
    assert driver.received == driver.expected


def test_nobody_waits_for_a_short_prefix_or_one_of_another_namespace() -> None:
    driver = Driver(num_pages=256)
    driver.add("a", [*range(20), 1], max_tokens=1)
    driver.add("b", [*range(20), 2], max_tokens=1)
    driver.add("c", list(range(40)), max_tokens=1)
    driver.add("d", list(range(40)), b"tenant", max_tokens=1)
    driver.run()
    assert driver.batches == [["a", "b", "c", "d"]]


def test_the_next_turn_of_a_conversation_hits_the_answer_too() -> None:
    driver = Driver()
    driver.add("turn-1", list(range(8)), max_tokens=8)
    driver.run()
    driver.add("turn-2", [*range(8), *driver.received["turn-1"], 5, 5], max_tokens=1)
    driver.run()
    assert driver.finished["turn-2"].cached_tokens == 15  # those of turn 1 that have KV


def test_namespaces_share_nothing() -> None:
    driver = Driver()
    for name in (b"a", b"b"):
        driver.add(name.decode(), list(range(20)), namespace=name, max_tokens=1)
        driver.run()
    assert driver.finished["b"].cached_tokens == 0


def test_without_the_prefix_cache_nothing_is_kept() -> None:
    driver = Driver(prefix_cache=False)
    for name in ("a", "b"):
        driver.add(name, list(range(20)), max_tokens=1)
        driver.run()
    assert driver.finished["b"].cached_tokens == 0
    assert driver.scheduler.load().used_pages == 0


def test_when_pages_run_out_the_youngest_waits_and_no_token_is_lost() -> None:
    driver = Driver(num_pages=8, page_size=2, context_length=16)
    driver.add("old", [1, 2], max_tokens=13)
    driver.add("young", [3, 4], max_tokens=13)
    driver.run()
    assert driver.received == driver.expected
    order = list(driver.finished)
    assert order == ["old", "young"]
    assert any(batch == ["old"] for batch in driver.batches[1:]), "nothing was ever retracted: the test is too weak"


def test_an_abort_frees_the_pages_at_once_and_others_go_on() -> None:
    driver = Driver(prefix_cache=False)
    driver.add("a", [1, 2, 3], max_tokens=50)
    driver.add("b", [4, 5, 6], max_tokens=5)
    driver.step()
    used = driver.scheduler.load().used_pages
    assert driver.abort("a")
    assert driver.scheduler.load().used_pages < used
    assert not driver.abort("a")
    driver.run()
    assert driver.received["b"] == driver.expected["b"]


def test_an_abort_during_a_step_takes_effect_with_its_end() -> None:
    driver = Driver(prefix_cache=False)
    driver.add("a", [1, 2, 3], max_tokens=50)
    planned = driver.scheduler.schedule()
    assert driver.abort("a")
    assert driver.scheduler.update(driver.runner.execute(planned)) == []
    assert not driver.scheduler.has_work
    driver.scheduler.check()
    assert driver.scheduler.load().used_pages == 0


def test_a_failed_step_ends_its_requests_and_keeps_none_of_its_pages() -> None:
    driver = Driver()
    driver.add("a", list(range(20)), max_tokens=5)
    driver.scheduler.schedule()
    outputs = driver.scheduler.fail_step("out of memory")
    assert [(output.serial, output.finish_reason, output.error) for output in outputs] == [
        (0, "error", "out of memory")
    ]
    driver.scheduler.check()
    assert driver.scheduler.load().used_pages == 0
    driver.add("b", list(range(20)), max_tokens=2)
    driver.run()
    assert driver.finished["b"].cached_tokens == 0


def test_what_can_never_run_is_refused_at_once() -> None:
    driver = Driver(num_pages=4, page_size=4, context_length=128, max_waiting=2)
    with pytest.raises(InvalidArgumentError, match="context of 16 tokens") as caught:
        driver.add("big", [1] * 16)
    assert caught.value.field == "token_ids"
    with pytest.raises(InvalidArgumentError, match="empty"):
        driver.add("nothing", [])
    driver.add("a", [1])
    driver.add("b", [1])
    with pytest.raises(ResourceExhaustedError) as full:
        driver.add("c", [1])
    assert full.value.retry_after is not None
    assert not driver.abort("c")


def test_a_tenant_that_fills_the_queue_keeps_no_other_out_of_it() -> None:
    queue, serials = WaitingQueue(32), itertools.count()

    def request(tenant: str) -> Request:
        return Request(next(serials), "r", [1], SamplingParams(), b"", tenant=tenant)

    flood = [request("alice") for _ in range(32)]
    for each in flood:
        queue.add(each)
    with pytest.raises(ResourceExhaustedError):
        queue.add(request("alice"))
    for tenant in ("bob", "carol"):
        for _ in range(2):
            queue.add(request(tenant))
        with pytest.raises(ResourceExhaustedError):  # it has its part of what is beyond
            queue.add(request(tenant))
    for number in range(28):
        queue.add(request(f"tenant {number}"))
    with pytest.raises(ResourceExhaustedError):
        queue.add(request("one more"))
    for each in flood:
        queue.remove(each, each.remaining)
    assert queue.num_of("alice") == 0 and len(queue) == 32
    queue.put_back(flood[0])
    assert queue.num_of("alice") == 0, "it was let in before"


def test_an_end_token_ends_a_request_unless_told_to_ignore_it() -> None:
    prompt = [1, 2, 3]
    first = next(continuation(prompt, SamplingParams(seed=3), VOCAB))
    driver = Driver(eos_token_ids=frozenset({first}))
    driver.add("stops", prompt, max_tokens=5, seed=3)
    driver.add("goes on", prompt, max_tokens=5, seed=3, ignore_eos=True)
    driver.run()
    assert driver.received["stops"] == [first]
    assert driver.finished["stops"].finish_reason == "stop"
    assert driver.received["goes on"] == driver.expected["goes on"]


def test_output_ends_with_the_context() -> None:
    driver = Driver(context_length=12)
    driver.add("a", list(range(8)), max_tokens=100)
    driver.run()
    assert len(driver.received["a"]) == 4
    assert driver.finished["a"].finish_reason == "length"


def test_an_illegal_transition_raises() -> None:
    request = Request(0, "a", array("I", [1]), SamplingParams())
    request.become(RequestState.FINISHED)
    with pytest.raises(IllegalTransitionError, match="a: finished -> running"):
        request.become(RequestState.RUNNING)


def test_the_load_counts_the_tokens_that_run_and_that_wait() -> None:
    driver = Driver(max_step_tokens=8, max_running=1)
    driver.add("runs", [1] * 20, max_tokens=3)
    driver.add("waits", [2] * 5, max_tokens=3)
    found = []
    for _ in range(4):
        driver.step()
        load = driver.scheduler.load()
        found.append((load.running_tokens, load.queued_tokens))
    assert found == [(8, 12 + 5), (16, 4 + 5), (20, 5), (21, 5)]
