"""Sessions stay where they were answered last, unless that worker is crowded or gone."""

from __future__ import annotations

import random

from sapwood_router.routing.policies import session_affinity
from sapwood_router.routing.policies.base import PromptPages
from sapwood_router.routing.policies.session_affinity import SessionAffinity
from sapwood_router.routing.worker_view import WorkerView


def views(**requests: int) -> list[WorkerView]:
    return [WorkerView(address, requests=count) for address, count in requests.items()]


def ask(policy: SessionAffinity, session: str, workers: list[WorkerView]) -> tuple[str, str]:
    prompt = PromptPages([1, 2, 3], session)
    choice = policy.choose(workers, prompt)
    policy.placed(choice.address, 16, prompt)
    return choice.address, choice.reason


def test_a_session_begins_where_there_is_least_to_do_and_stays() -> None:
    policy = SessionAffinity()
    assert ask(policy, "s", views(a=3, b=1, c=2)) == ("b", "session_begun")
    assert ask(policy, "s", views(a=0, b=9, c=0)) == ("b", "session")
    assert ask(policy, "t", views(a=0, b=9, c=1)) == ("a", "session_begun")
    assert ask(policy, "", views(a=1, b=0, c=1)) == ("b", "no_session")


def test_a_session_moves_from_a_worker_that_is_crowded_or_gone_and_stays_there() -> None:
    policy = SessionAffinity()
    ask(policy, "s", views(a=0, b=1, c=1))
    assert ask(policy, "s", views(a=60, b=1, c=2)) == ("b", "session_moved")
    assert ask(policy, "s", views(a=0, b=1, c=2)) == ("b", "session")
    assert ask(policy, "s", views(a=0, c=2)) == ("a", "session_moved")


def test_the_sessions_that_were_used_least_lately_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(session_affinity, "_MOST_SESSIONS", 2)
    policy = SessionAffinity()
    for session in ("s", "t", "s", "u"):
        ask(policy, session, views(a=0, b=1))
    assert ask(policy, "s", views(a=1, b=0)) == ("a", "session")
    assert ask(policy, "t", views(a=1, b=0)) == ("b", "session_begun")


def test_in_a_large_fleet_the_sessions_own_worker_is_looked_at() -> None:
    policy = SessionAffinity(random.Random(1))
    addresses = [f"w{number}" for number in range(1000)]
    prompt = PromptPages([1], "s")
    policy.placed("w777", 16, prompt)
    assert "w777" in policy.shortlist(addresses, 16, prompt)
    assert "w777" not in policy.shortlist(addresses[:777], 16, prompt)


async def test_turns_of_a_session_go_to_one_worker(make_cluster) -> None:
    async with make_cluster(3, policy="session_affinity") as cluster:
        workers: dict[str, set[str]] = {"one": set(), "two": set()}
        for session, seen in workers.items():
            for turn in range(4):
                body = {"prompt": f"{session} {turn}", "max_tokens": 4, "prompt_cache_key": session}
                seen.add((await cluster.http.post("/v1/completions", json=body)).headers["x-sapwood-worker"])
                await cluster.idle()
        assert [len(seen) for seen in workers.values()] == [1, 1]
        assert len(cluster.calls()) == 8
