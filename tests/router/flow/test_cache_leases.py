"""Prompts that are kept between turns: which, where, for how long, and what answers say of them."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import httpx2
import pytest

from sapwood_common.tenants.api_keys import hash_key, make_key
from sapwood_router.flow.cache_leases import CacheLeases, LeaseLimits
from sapwood_router.request.cache_hint import NO_HINT, CacheHint
from sapwood_router.request.caller import Caller
from sapwood_testing.router.worker_process import WorkerProcess

LONG = "x" * 64


class Pinned:
    """Takes note of pins."""

    def __init__(self) -> None:
        self.pins: dict[tuple[str, str], tuple[list[int], float]] = {}

    async def pin(self, address, name, token_ids, cache_salt, seconds, lora="") -> int:
        self.pins[address, name] = (list(token_ids), seconds)
        return len(token_ids)

    async def unpin(self, address, name) -> None:
        del self.pins[address, name]


class Asked:
    """What a lease reads of a request."""

    def __init__(self, prompt: list[int], answer: list[int], **given: Any) -> None:
        self.token_ids, self.output_ids = prompt, answer
        self.model, self.lora, self.worker, self.cached_tokens, self.hint = "m", "", "w", 0, CacheHint(60.0)
        self.caller = Caller(given.pop("tenant", ""), cache_salt=given.pop("salt", ""))
        for name, value in given.items():
            setattr(self, name, value)


class Kept:
    def __init__(self, tokens: int = 100, seconds: float = 1000.0) -> None:
        self.pinned, self.now = Pinned(), 0.0
        self.leases = CacheLeases(LeaseLimits(tokens, seconds), self.pinned, lambda worker: 4, lambda: self.now)

    async def take(self, prompt: list[int], answer: list[int] = [9], **given: Any) -> None:  # noqa: B006
        self.leases.take(Asked(prompt, answer, **given))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def kept(self) -> list[tuple[str, list[int]]]:
        return sorted((address, tokens) for (address, _), (tokens, _) in self.pinned.pins.items())


async def test_of_a_conversation_the_latest_turn_is_kept_alone() -> None:
    each = Kept()
    await each.take([1, 2, 3])
    await each.take([1, 2, 3, 9, 4, 5])
    await each.take([7, 8])
    assert each.kept() == [("w", [1, 2, 3, 9, 4, 5, 9]), ("w", [7, 8, 9])]
    await each.take([1, 2, 3, 9, 4, 5, 9, 6], worker="other")
    assert each.kept() == [("other", [1, 2, 3, 9, 4, 5, 9, 6, 9]), ("w", [7, 8, 9])]


async def test_a_conversation_that_is_over_is_let_go_and_others_are_not() -> None:
    each = Kept()
    await each.take([1, 2, 3])
    await each.take([7, 8])
    await each.take([1, 2, 3, 9, 4], hint=CacheHint(demote=True))
    assert each.kept() == [("w", [7, 8, 9])]
    await each.take([5, 6], hint=CacheHint(demote=True))
    assert each.kept() == [("w", [7, 8, 9])] and each.leases.held("") == 3


async def test_prompts_of_other_salts_adapters_and_tenants_are_kept_apart() -> None:
    each = Kept()
    await each.take([1, 2], salt="a")
    await each.take([1, 2, 3], salt="b")
    await each.take([1, 2, 3, 4], lora="l")
    await each.take([1, 2, 3, 4, 5], tenant="t")
    assert len(each.kept()) == 4
    assert (each.leases.held(""), each.leases.held("t")) == (3 + 4 + 5, 6)


async def test_what_is_worth_least_goes_first() -> None:
    each = Kept(tokens=100)
    await each.take([1] * 49)
    each.now = 50.0
    await each.take([2] * 29)
    each.now = 51.0
    await each.take([3] * 39)  # the first has 50 tokens unused for 51 s, the second 30 for a second
    assert [tokens[0] for _, tokens in each.kept()] == [2, 3]
    await each.take([4] * 200)
    assert [tokens[0] for _, tokens in each.kept()] == [], "what does not fit is not kept, nor what it went on from"


async def test_a_time_is_cut_to_the_longest_and_ends() -> None:
    each = Kept(tokens=20, seconds=30.0)
    await each.take([1, 2, 3], hint=CacheHint(86400.0))
    assert [seconds for _, seconds in each.pinned.pins.values()] == [30.0]
    each.now = 31.0
    assert each.leases.held("") == 0
    await each.take([5] * 19)
    assert each.leases.held("") == 20


def test_whole_pages_that_were_not_cached_count_as_written() -> None:
    each = Kept(tokens=100)
    assert each.leases.writes(Asked([1] * 11, [], cached_tokens=4)) == 4
    assert each.leases.writes(Asked([1] * 11, [], cached_tokens=4, hint=NO_HINT)) == 0
    assert each.leases.writes(Asked([1] * 101, [])) == 0


async def kept_at(cluster) -> list[str]:
    await cluster.idle()
    await asyncio.gather(*cluster.router._leases._tasks)
    return ["".join(map(chr, pin)) for worker in cluster.workers for pin in worker.pins.values()]


async def test_openais_fields_keep_a_prompt_and_usage_counts_its_tokens(make_cluster) -> None:
    async with make_cluster(1) as cluster:
        client, chat = cluster.openai, {"model": "fake", "messages": [{"role": "user", "content": LONG}]}
        plain = await client.chat.completions.create(**chat)
        assert await kept_at(cluster) == [] and "cache_write_tokens" not in plain.usage.prompt_tokens_details.to_dict()
        for number, field in enumerate(({"prompt_cache_key": "agent"}, {"prompt_cache_retention": "24h"}), 1):
            chat["messages"] = [{"role": "user", "content": f"{number}{LONG}"}]
            told = await client.chat.completions.create(**chat, **field)
            assert len(await kept_at(cluster)) == number
            written = told.usage.prompt_tokens_details.to_dict()["cache_write_tokens"]
            assert 0 < written <= told.usage.prompt_tokens
        answer = await client.responses.create(model="fake", input=f"r{LONG}", prompt_cache_retention="24h")
        assert answer.usage.input_tokens_details.cache_write_tokens > 0
        more = await client.completions.create(model="fake", prompt=f"c{LONG}", extra_body={"prompt_cache_key": "k"})
        assert more.usage.prompt_tokens_details.to_dict()["cache_write_tokens"] > 0
        other = await cluster.http.post("/v1/chat/completions", json={**chat, "prompt_cache_retention": "7d"})
        assert other.status_code == 200, "a hint is never wrong"


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_marks_keep_a_prompt_and_usage_counts_its_tokens(make_cluster, stream) -> None:
    async with make_cluster(1) as cluster:
        http = httpx2.AsyncClient(timeout=120, trust_env=False)
        client = anthropic.AsyncAnthropic(base_url=cluster.url, api_key="none", max_retries=0, http_client=http)
        asked: dict[str, Any] = {"model": "fake", "max_tokens": 9}
        mark = {"type": "ephemeral", "ttl": "1h"}
        marked = [{"type": "text", "text": LONG, "cache_control": mark}]
        for number, (system, top) in enumerate(((marked, {}), (f"other {LONG}", {"cache_control": mark})), 1):
            asked |= {"system": system, "messages": [{"role": "user", "content": "hi"}], **top}
            if stream:
                async with client.messages.stream(**asked) as events:
                    told = await events.get_final_message()
            else:
                told = await client.messages.create(**asked)
            usage = told.usage
            assert usage.cache_creation_input_tokens > 0
            assert usage.cache_creation.ephemeral_1h_input_tokens == usage.cache_creation_input_tokens
            total = usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
            asked.pop("cache_control", None)
            counted = await client.messages.count_tokens(model="fake", system=system, messages=asked["messages"])
            assert total == counted.input_tokens
            assert len(await kept_at(cluster)) == number
        wrong = await cluster.http.post(
            "/v1/messages", json={**asked, "cache_control": {"type": "ephemeral", "ttl": "2h"}}
        )
        assert wrong.status_code == 400
        await client.close()


async def test_each_tenant_has_its_own_budget(make_cluster, tmp_path) -> None:
    keys = {name: make_key() for name in ("alice", "bob")}
    path = tmp_path / "keys"
    path.write_text("".join(f"{name} {hash_key(key)}\n" for name, key in keys.items()))
    async with make_cluster(1, api_keys=path, max_sessions="leases=200") as cluster:
        for name, key in keys.items():
            client = cluster.openai.with_options(api_key=key)
            for number in range(5):
                await client.completions.create(
                    model="fake", prompt=f"{number}{LONG}", max_tokens=4, extra_body={"prompt_cache_key": name}
                )
        await kept_at(cluster)
        assert {name: cluster.router._leases.held(name) <= 200 for name in keys} == {"alice": True, "bob": True}
        assert all(cluster.router._leases.held(name) > 0 for name in keys)


async def test_a_kept_prompt_outlasts_a_flood_in_a_real_cache(make_cluster, tmp_path) -> None:
    worker = WorkerProcess(flags=("--num-pages", "80"))
    await worker.start()
    named = tmp_path / "workers"
    named.write_text(f"{worker.address}\n")
    try:
        async with make_cluster(0, workers_file=named) as cluster:

            async def ask(text: str, **more: Any) -> int:
                answer = await cluster.http.post("/v1/completions", json={"prompt": text, "max_tokens": 2, **more})
                return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

            for more, hits in (({}, False), ({"prompt_cache_key": "agent"}, True)):
                text = f"{len(more)}" + "y" * 300
                await ask(text, **more)
                await asyncio.gather(*cluster.router._leases._tasks)
                for number in range(20):
                    await ask(f"{number:03}" + "z" * 300)
                assert (await ask(text) > 200) == hits
    finally:
        await worker.kill()
