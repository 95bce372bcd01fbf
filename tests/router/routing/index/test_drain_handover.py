"""A worker that drains hands the placements of its hot prefixes on."""

from collections import Counter

from sapwood.v1 import router_pb2
from sapwood_router.routing.index.blocks import BlockIndex, Tier
from sapwood_router.routing.index.prefixes import HANDED_SECONDS, MOST_CHAINS, MOST_PAGES, HotPrefixes, PrefixIndex
from sapwood_router.routing.policies.base import PromptPages
from sapwood_router.routing.policies.cache_aware import CacheAware
from sapwood_router.routing.worker_view import WorkerView
from sapwood_testing.clock import Clock


def conversations(count: int, turns: int = 3) -> list[list[PromptPages]]:
    """Each with pages of its own, and longer at each turn."""
    return [
        [PromptPages(range(1000 * number, 1000 * number + 64 * turn)) for turn in range(1, turns + 1)]
        for number in range(1, count + 1)
    ]


def views(*names: str) -> list[WorkerView]:
    return [WorkerView(name) for name in names]


def make(clock: Clock) -> tuple[CacheAware, BlockIndex]:
    blocks = BlockIndex(1 << 24)
    return CacheAware(PrefixIndex(1 << 24, clock), blocks, HotPrefixes(clock)), blocks


def test_turns_of_one_conversation_go_to_one_heir_and_conversations_are_spread() -> None:
    policy, _ = make(Clock(100.0))
    talks = conversations(12)
    for turns in talks:
        for turn in turns:
            policy.placed("w0", 16, turn)
    policy.drained("w0", ["w1", "w2", "w3"])
    heirs = Counter()
    for turns in talks:
        choices = [policy.choose(views("w1", "w2", "w3"), turn) for turn in turns]
        assert {choice.reason for choice in choices} == {"cache_handed"}
        assert {choice.cached_tokens for choice in choices} == {0}  # it is to be computed there
        heirs[choices[-1].address] += 1
    assert set(heirs) == {"w1", "w2", "w3"}
    assert max(heirs.values()) <= 5  # 1.25 times an equal share


def test_a_copy_that_is_there_counts_more_than_what_was_handed_on() -> None:
    policy, blocks = make(Clock(100.0))
    ((turn,),) = conversations(1, turns=1)
    blocks.reset("w1")
    blocks.reset("w2", [(Tier.GPU, turn.hashes(16))])
    policy.placed("w0", 16, turn)
    policy.drained("w0", ["w1"])
    choice = policy.choose(views("w1", "w2"), turn)
    assert (choice.address, choice.reason) == ("w2", "cache_hit")


def test_what_was_handed_on_is_forgotten_after_its_time_and_when_the_heir_restarts() -> None:
    clock = Clock(100.0)
    policy, _ = make(clock)
    ((turn,),) = conversations(1, turns=1)
    for forget in ("time", "restart"):
        policy.placed("w0", 16, turn)
        policy.drained("w0", ["w1"])
        assert policy.choose(views("w1", "w2"), turn).reason == "cache_handed"
        if forget == "time":
            clock.now += HANDED_SECONDS + 1
        else:
            policy.reset("w1", 100)
        assert policy.choose(views("w1", "w2"), turn).reason == "cache_miss"


def test_memory_is_bounded_and_the_latest_are_kept() -> None:
    hot = HotPrefixes(Clock(100.0))
    for number in range(10 * MOST_CHAINS):
        hot.asked("w0", [f"{number}-{page}".encode() for page in range(2 * MOST_PAGES)])
    hot.asked("w0", [])
    hot.hand_over("w0", ["w1"])
    last = 10 * MOST_CHAINS - 1
    pages = [f"{last}-{page}".encode() for page in range(2 * MOST_PAGES)]
    assert hot.handed("w1", pages) == MOST_PAGES
    assert hot.handed("w1", [f"{last - MOST_CHAINS}-0".encode()]) == 0
    hot.hand_over("w0", ["w2"])
    assert hot.handed("w2", pages) == 0


async def test_a_router_hands_on_when_an_operator_drains_and_when_the_worker_says_so(make_cluster, wait_until) -> None:
    async with make_cluster(3) as cluster:
        text = "a prompt that is long enough for several pages " * 4

        async def route() -> router_pb2.ExplainRouteResponse:
            asked = router_pb2.ExplainRouteRequest(request=router_pb2.RouterGenerateRequest(text=text))
            return await cluster.stub.ExplainRoute(asked)

        await cluster.generate(text)
        first = (await route()).chosen
        await cluster.stub.DrainWorker(router_pb2.DrainWorkerRequest(address=first))
        handed = await route()
        assert handed.reason == "cache_handed"
        await cluster.generate(text)
        second = await route()
        assert (second.chosen, second.reason) == (handed.chosen, "cache_hit")
        holder = next(worker for worker in cluster.workers if worker.address == handed.chosen)
        holder.draining = True
        seen = {worker.address: worker for worker in cluster.router.registry.all()}
        await wait_until(lambda: not seen[holder.address].available)
        third = await route()
        assert third.reason == "cache_handed"
        assert third.chosen not in (first, handed.chosen)
