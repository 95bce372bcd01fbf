"""Adapters' slots against brute force: random traffic, every invariant after each step, and the bound on a wait."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_common.contract.page_hash import cache_namespace
from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.fake_runner import FakeRunner, FakeStep, continuation, fake_digest, fake_lora
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.lora_slots import MOST_STEPS, PATIENCE, SlotPool
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.records.lora import Lora, LoraLoad
from sapwood_worker.records.model_info import ModelInfo

VOCAB = 50


class Traffic:
    """A scheduler and the fake runner, whose tokens tell which adapter computed each position."""

    def __init__(
        self,
        folder: pytest.TempPathFactory,
        *,
        slots: int,
        adapters: int,
        max_running: int = 8,
        starved_after: int = 60,
        pages: int = 200,
        seed: int = 0,
        ahead: bool = False,
    ) -> None:
        self.info = ModelInfo(
            architecture="fake",
            dtype="none",
            context_length=400,
            vocab_size=VOCAB,
            eos_token_ids=(),
            page_size=4,
            num_pages=pages,
            lora_slots=slots,
            max_lora_rank=64,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                page_size=4,
                num_pages=pages,
                context_length=400,
                max_running=max_running,
                starved_after=starved_after,
                lora_slots=slots,
            )
        )
        self.ahead = ahead
        self.chance = random.Random(seed)
        self.runner = FakeRunner(self.info, chance=random.Random(seed) if ahead else None)
        self.digests = {0: b""}
        root = folder.mktemp("adapters")
        for number in range(1, adapters + 1):
            path = fake_lora(root / str(number), f"weights {number}")
            self.runner.read_lora(Lora(number, f"a{number}", str(path)))
            self.digests[number] = fake_digest(path)
        self.launched: deque[FakeStep] = deque()
        self.expected: dict[int, tuple[Request, Iterator[int]]] = {}
        self.started: dict[int, int] = {}
        self.came: dict[int, int] = {}
        self.ended: list[int] = []
        self.now = 0
        self.serial = 0

    def add(self, lora: int, tenant: str = "", tokens: int = 5, prompt: list[int] | None = None) -> Request:
        prompt = prompt or [self.chance.randrange(VOCAB) for _ in range(self.chance.randint(1, 20))]
        sampling = SamplingParams(seed=self.chance.getrandbits(32), max_tokens=tokens)
        digest = self.digests[lora]
        namespace = cache_namespace("", digest.hex())
        serial, self.serial = self.serial, self.serial + 1
        request = Request(serial, f"r{serial}", prompt, sampling, namespace, tenant=tenant, lora=lora)
        self.scheduler.add(request)
        self.expected[serial] = request, continuation(prompt, sampling, VOCAB, digest)
        self.came[serial] = self.now
        return request

    def step(self) -> None:
        while self.launched and not self.scheduler.plans_ahead:
            self._take(len(self.launched) - 1)
        planned = self.scheduler.schedule()
        if planned:
            self.launched.append(self.runner.launch(planned))
        self._take(1 if planned and self.ahead else 0)
        if self.now % 4 == 0:
            self.scheduler.check()
        for serial, (request, _) in self.expected.items():
            if request.slot >= 0:
                self.started.setdefault(serial, self.now)
        self.now += 1

    def _take(self, keep: int) -> None:
        while len(self.launched) > keep:
            for output in self.scheduler.update(self.launched.popleft().result()):
                _, tokens = self.expected[output.serial]
                for token in output.token_ids:
                    assert token == next(tokens), f"request {output.serial} got a token of another adapter"
                if output.finish_reason is not None:
                    del self.expected[output.serial]
                    self.started.setdefault(output.serial, self.now)
                    self.ended.append(output.serial)

    def finish(self, most: int = 20_000) -> None:
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("requests never end")


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_requests_of_many_adapters_get_their_own_tokens_and_all_end(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    chance = random.Random(seed)
    slots, adapters = chance.randint(1, 4), chance.randint(1, 9)
    traffic = Traffic(
        tmp_path_factory,
        slots=slots,
        adapters=adapters,
        max_running=chance.choice([1, 3, 8]),
        starved_after=chance.choice([10, 60]),
        pages=chance.choice([100, 110, 300]),
        seed=seed,
        ahead=chance.random() < 0.5,
    )
    rate = chance.choice([0.1, 0.5, 0.9])
    for _ in range(120):
        while chance.random() < rate:
            traffic.add(chance.randint(0, adapters), chance.choice("abc"), chance.choice([1, 5, 60]))
            if chance.random() < 0.3:
                break
        if chance.random() < 0.05 and traffic.expected:
            serial = chance.choice([*traffic.expected])
            traffic.scheduler.abort(serial)
            del traffic.expected[serial]
        if chance.random() < 0.02:
            traffic._take(0)
            traffic.scheduler.pause(retract=True)
            traffic.scheduler.schedule()
            traffic.scheduler.resume()
        traffic.step()
    traffic.finish()
    for number in range(1, adapters + 1):
        assert traffic.scheduler.lora_requests(number) == 0
        traffic.scheduler.forget_lora(number)
        traffic.runner.drop_lora(number)
    traffic.scheduler.check()
    loads = traffic.scheduler.load().loras
    assert loads is not None and loads.slots == (0,) * slots and loads.unused == slots
    assert traffic.runner.loras == set()


def test_a_request_whose_adapter_has_no_slot_does_not_hold_up_those_behind_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    traffic = Traffic(tmp_path_factory, slots=1, adapters=2)
    traffic.add(1, tokens=100)
    traffic.step()
    waiting = traffic.add(2)
    behind = [traffic.add(0), traffic.add(1)]
    traffic.step()
    assert waiting.slot < 0
    assert all(each.slot >= 0 for each in behind)


def test_a_hot_adapter_gives_its_slot_up_to_one_that_waits_within_the_bound(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    traffic = Traffic(tmp_path_factory, slots=1, adapters=2, starved_after=10_000)
    traffic.add(1, "hot", tokens=380, prompt=[1, 2])
    traffic.step()
    waiting = traffic.add(2, "cold")
    for _ in range(PATIENCE + MOST_STEPS + 4):
        if traffic.now % 5 == 0:
            traffic.add(1, "hot", tokens=8)
        traffic.step()
    assert traffic.started[waiting.serial] - traffic.came[waiting.serial] <= PATIENCE + MOST_STEPS + 2
    assert traffic.scheduler.num_preemptions >= 1
    traffic.finish()


def test_adapters_of_one_tenant_do_not_take_the_slots_of_a_tenant_with_fewer(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    traffic = Traffic(tmp_path_factory, slots=4, adapters=12, max_running=16)
    small = [traffic.add(1, "small", tokens=350, prompt=[1]), traffic.add(2, "small", tokens=350, prompt=[2])]
    traffic.step()
    for number in range(3, 13):
        traffic.add(number, "large", tokens=60, prompt=[number])
    for _ in range(300):
        traffic.step()
        assert all(each.slot >= 0 and not each.retractions for each in small)
    traffic.finish()


def test_each_of_more_tenants_than_slots_gets_a_slot_in_turn(tmp_path_factory: pytest.TempPathFactory) -> None:
    tenants = 6
    traffic = Traffic(tmp_path_factory, slots=2, adapters=tenants, max_running=16, pages=800)
    first = [traffic.add(number, f"t{number}", tokens=300, prompt=[number]) for number in range(1, tenants + 1)]
    bound = PATIENCE + -(-tenants // 2) * (MOST_STEPS + 2)
    for _ in range(bound):
        traffic.step()
    assert all(traffic.started[each.serial] - traffic.came[each.serial] <= bound for each in first)
    traffic.finish()


def test_an_adapter_stays_in_its_slot_until_another_needs_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    traffic = Traffic(tmp_path_factory, slots=2, adapters=3)
    for number in (1, 2, 1, 2, 1):
        traffic.add(number)
        traffic.finish()
    loads = traffic.scheduler.load().loras
    assert loads is not None and loads.loads == 2 and set(loads.slots) == {1, 2}
    traffic.add(3)
    traffic.finish()
    loads = traffic.scheduler.load().loras
    assert loads is not None and loads.loads == 3 and set(loads.slots) == {1, 3}, "2 was unused for longest"


def test_loads_of_a_failed_step_are_repeated_unless_another_adapter_has_the_slot() -> None:
    pool = SlotPool(2)
    pool.release(pool.take(1, "a"), "a")
    slot = pool.take(2, "a")
    loads = pool.take_loads()
    assert {each.number for each in loads} == {1, 2}
    pool.release(slot, "a")
    pool.take(3, "a")
    pool.failed(loads)
    assert set(pool.take_loads()) == {LoraLoad(slot, 2), LoraLoad(1 - slot, 3)}
