"""Selection in a large fleet: what a policy looks at, and that it finds there what it would find among all."""

import random
from collections import Counter

import pytest

from sapwood_common.errors import UnavailableError
from sapwood_router.fleet.circuit_breaker import BreakerSettings, CircuitBreaker
from sapwood_router.fleet.eligibility import Demand
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.served_model import ServedModel
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.select import choose
from sapwood_router.routing.factory import PolicyParts, make_policy, policy_names
from sapwood_router.routing.index.blocks import BlockIndex, Tier
from sapwood_router.routing.policies.base import PromptPages
from sapwood_router.routing.policy_book import Shadowed
from sapwood_router.routing.shortlist import MANY, drawn_by_prefix
from sapwood_testing.clock import Clock

PAGE = 16
ROOM = 4


class Fleet:
    """Workers of one model, and a policy as the router has it."""

    def __init__(self, workers: int, policy: str = "cache_aware", events: bool = True) -> None:
        self.clock = Clock()
        self.blocks = BlockIndex(1 << 26)
        made = [
            Worker(f"w{i}", CircuitBreaker(BreakerSettings(), self.clock), self.clock, lambda: None)
            for i in range(workers)
        ]
        self.registry = Registry(made, most_requests=lambda model: ROOM)
        self.policy = Shadowed(
            make_policy(policy, PolicyParts(1 << 26, random.Random(1), self.clock, self.blocks)), {}, lambda *_: None
        )
        for worker in made:
            self.registry.mark_up(worker, ServedModel("m", 10**6, 10**6, PAGE, 10**6, epoch=1))
            if events:
                self.blocks.reset(worker.address)

    def choose(self, tokens: list[int], session: str = "", refused_by: tuple[str, ...] = ()) -> str:
        prompt = PromptPages(tokens, session)
        demand = Demand("m", len(tokens), "prompt", refused_by=refused_by)
        worker, choice = choose(demand, prompt, self.registry, self.policy)
        assert worker.address == choice.address
        self.policy.placed(choice.address, PAGE, prompt)
        return choice.address

    def place(self, tokens: list[int], session: str = "") -> str:
        address = self.choose(tokens, session)
        worker = self.registry.find(address)
        assert worker is not None
        worker.lease(len(tokens))
        return address

    def hold(self, address: str, tokens: list[int]) -> None:
        self.blocks.store(address, Tier.GPU, PromptPages(tokens).hashes(PAGE))


def some(seed: int, length: int = 640) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(10**6) for _ in range(length)]


def test_the_worker_that_holds_most_is_found_among_a_thousand():
    fleet = Fleet(1000)
    system = some(0, 320)
    for number in range(0, 1000, 2):  # every second worker holds what all share
        fleet.hold(f"w{number}", system)
    for seed in range(1, 20):
        prompt = system + some(seed)
        fleet.hold(f"w{seed * 37}", prompt[:800])
        assert fleet.choose(prompt) == f"w{seed * 37}"


@pytest.mark.parametrize("events", [True, False])
def test_siblings_follow_each_other_before_any_event_tells_of_the_first(events):
    fleet = Fleet(1000, events=events)
    for seed in range(20):
        shared = some(seed)
        first = fleet.choose(shared + some(seed + 100, 30))
        assert fleet.choose(shared + some(seed + 200, 30)) == first


def test_nobody_is_drawn_by_a_prefix_whose_holders_are_known():
    addresses, hashes = [f"w{number}" for number in range(1000)], PromptPages(some(0, 80 * PAGE)).hashes(PAGE)
    every = drawn_by_prefix(addresses, hashes)
    assert len(every) == 5  # after 1, 4, 16 and 64 pages, and at the end
    assert drawn_by_prefix(addresses, hashes, 5) == every[1:]
    assert drawn_by_prefix(addresses, hashes, 64) == every[3:]
    assert drawn_by_prefix(addresses, hashes, 80) == every[3:4]


def test_a_conversation_keeps_its_worker_without_events():
    fleet = Fleet(1000, events=False)
    talk = some(1, 400)
    first = fleet.choose(talk)
    for turn in range(8):
        talk += some(turn + 2, 70)
        assert fleet.choose(talk) == first


def test_no_worker_gets_much_more_than_others_of_what_nobody_holds():
    fleet = Fleet(200)
    placed = Counter(fleet.place(some(seed, 64)) for seed in range(600))
    assert max(placed.values()) <= ROOM  # 3 each on average


def test_a_worker_with_room_is_found_where_hardly_any_has_some():
    fleet = Fleet(300)
    held = some(0)
    for number in range(300):
        worker = fleet.registry.find(f"w{number}")
        assert worker is not None
        for _ in range(ROOM if number != 123 else 0):
            worker.lease(10)
        if number != 123:
            fleet.hold(worker.address, held)
    assert fleet.choose(held) == "w123"


def test_those_that_refused_are_not_asked_again_and_all_refusing_is_an_error():
    fleet = Fleet(100)
    held = some(0)
    fleet.hold("w7", held)
    assert fleet.choose(held, refused_by=("w7",)) != "w7"
    everybody = tuple(f"w{number}" for number in range(100))
    assert fleet.choose(held, refused_by=everybody[:99]) == "w99"
    with pytest.raises(UnavailableError):
        fleet.choose(held, refused_by=everybody)


def test_a_session_stays_at_its_worker_though_another_holds_more():
    fleet, held = Fleet(500), some(0)
    fleet.hold("w7", held)
    demand = Demand("m", len(held), "prompt")
    worker, choice = choose(demand, PromptPages(held), fleet.registry, fleet.policy, session_at="w450")
    assert (worker.address, choice.reason) == ("w450", "session")


def test_round_robin_takes_each_of_a_large_fleet_in_turn():
    fleet = Fleet(MANY + 10, "round_robin")
    assert [fleet.choose([1]) for _ in range(2 * (MANY + 10))] == [f"w{i}" for i in range(MANY + 10)] * 2


@pytest.mark.parametrize("policy", ["consistent_hash", "prefix_hash"])
def test_the_ring_gives_the_brute_force_worker_and_the_next_on_refusal(policy):
    large, prompt = Fleet(MANY + 36, policy), some(0)
    first = large.choose(prompt, "talk")
    assert all(large.choose(prompt, "talk") == first for _ in range(5))
    second = large.choose(prompt, "talk", refused_by=(first,))
    assert second != first
    assert large.choose(prompt, "talk", refused_by=(first,)) == second


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_looks_at_few_of_a_large_fleet(name):
    fleet = Fleet(100, name)
    listed = fleet.policy.shortlist(fleet.registry.addresses("m"), PAGE, PromptPages(some(0), "talk"))
    assert listed is not None
    assert 1 <= len(listed) <= 32


def test_a_shadow_that_sees_all_has_the_policy_see_all():
    class SeesAll:
        def shortlist(self, addresses, page_size, prompt):
            return None

    fleet = Fleet(100)
    both = Shadowed(fleet.policy.live, {"all": SeesAll()}, lambda *_: None)
    assert both.shortlist(fleet.registry.addresses("m"), PAGE, PromptPages([1])) is None


def test_where_none_on_the_list_is_preferred_some_others_are_looked_at():
    fleet = Fleet(200)
    asked: list[set[str]] = []

    def narrow(workers):
        """Those that were not listed."""
        asked.append({worker.address for worker in workers})
        return [worker for worker in workers if worker.address not in asked[0]]

    demand = Demand("m", 640, "prompt")
    worker, _ = choose(demand, PromptPages(some(1)), fleet.registry, fleet.policy, narrow=narrow)
    assert worker.address in asked[1] - asked[0]
    assert len(asked) == 2 and len(asked[0]) < len(asked[1]) <= 64
    worker, _ = choose(demand, PromptPages(some(1)), fleet.registry, fleet.policy, narrow=lambda workers: [])
    assert worker.address in {each.address for each in fleet.registry.all()}  # nobody is preferred: all are alike
