"""Policies that hash: who shares a worker, how even shares are, what moves when workers come and go, and the worst case."""

import random
from collections import Counter

from sapwood_router.routing.policies.base import PromptPages
from sapwood_router.routing.policies.consistent_hash import ConsistentHash
from sapwood_router.routing.policies.prefix_hash import PrefixHash
from sapwood_router.routing.worker_view import WorkerView

RNG = random.Random(5)


def views(*requests: int) -> list[WorkerView]:
    return [WorkerView(f"w{number}", requests=count) for number, count in enumerate(requests)]


def some(length: int) -> list[int]:
    return [RNG.randrange(30_000) for _ in range(length)]


def of_session(name: str) -> PromptPages:
    return PromptPages(some(20), name)


def test_a_session_keeps_its_worker_whatever_it_asks_and_whatever_the_load() -> None:
    policy = ConsistentHash()
    for name in ("a", "b", "c"):
        chosen = {policy.choose(views(*(RNG.randrange(9) for _ in range(4))), of_session(name)) for _ in range(20)}
        assert len(chosen) == 1
        assert chosen.pop().reason == "session"


def test_sessions_spread_over_workers_and_few_move_when_one_goes() -> None:
    policy = ConsistentHash()
    names = [f"session-{number}" for number in range(4000)]
    before = {name: policy.choose(views(0, 0, 0, 0, 0), of_session(name)).address for name in names}
    counts = Counter(before.values())
    assert all(550 < counts[f"w{number}"] < 1050 for number in range(5))
    after = {name: policy.choose(views(0, 0, 0, 0), of_session(name)).address for name in names}
    assert all(after[name] == before[name] for name in names if before[name] != "w4")
    moved = Counter(after[name] for name in names if before[name] == "w4")
    assert len(moved) == 4  # they spread over all that are left


def test_a_request_without_a_session_goes_to_the_least_loaded() -> None:
    choice = ConsistentHash().choose(views(3, 1, 2), of_session(""))
    assert (choice.address, choice.reason) == ("w1", "no_session")


def test_prompts_with_the_same_beginning_share_a_worker_and_routers_agree() -> None:
    beginning = some(256)
    choices = {PrefixHash().choose(views(1, 1, 1, 1), PromptPages(beginning + some(50))).address for _ in range(20)}
    assert len(choices) == 1


def test_beginnings_spread_over_workers() -> None:
    policy = PrefixHash()
    counts = Counter(policy.choose(views(0, 0, 0, 0), PromptPages(some(300))).address for _ in range(4000))
    assert all(700 < counts[f"w{number}"] < 1300 for number in range(4))


def test_one_hot_beginning_never_gives_a_worker_more_than_the_bound() -> None:
    policy, loads, prompt = PrefixHash(), [0] * 8, PromptPages(some(300))
    reasons = Counter()
    for _ in range(800):
        choice = policy.choose(views(*loads), prompt)
        loads[int(choice.address[1:])] += 1
        reasons[choice.reason] += 1
    assert max(loads) <= 1.25 * 800 / 8 + 1
    assert reasons["prefix"] >= 100
    assert reasons["prefix_overflow"] > 0


def test_an_even_load_keeps_every_beginning_at_its_own_worker() -> None:
    policy = PrefixHash()
    assert {policy.choose(views(4, 4, 4, 4), PromptPages(some(300))).reason for _ in range(100)} == {"prefix"}


async def test_the_session_header_reaches_the_policy_on_both_edges(make_cluster) -> None:
    async with make_cluster(3, policy="consistent_hash") as cluster:
        for number in range(12):
            await cluster.generate(f"text {number}", metadata=(("x-session-id", "mine"),))
            body = {"prompt": f"text {number}"}
            await cluster.http.post("/v1/completions", json=body, headers={"x-session-id": "mine"})
        assert sorted(len(worker.calls) for worker in cluster.workers) == [0, 0, 24]


async def test_openais_fields_name_the_session_where_no_header_does(make_cluster) -> None:
    asked = [{"prompt_cache_key": "mine"}, {"user": "mine"}, {"prompt_cache_key": "mine", "user": "other"}]
    async with make_cluster(3, policy="consistent_hash") as cluster:
        for number in range(9):
            chat = {"messages": [{"role": "user", "content": f"text {number}"}], **asked[number % 3]}
            for path, body in (("chat/completions", chat), ("completions", {"prompt": "a", **asked[number % 3]})):
                assert (await cluster.http.post(f"/v1/{path}", json=body)).status_code == 200
            body = {"prompt": "a", "user": f"other {number}"}
            await cluster.http.post("/v1/completions", json=body, headers={"x-session-id": "mine"})
        assert sorted(len(worker.calls) for worker in cluster.workers) == [0, 0, 27]
        answer = await cluster.http.post("/v1/completions", json={"prompt": "a", "user": 5})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "user")
