"""Hints about the cache over every API: what is kept, let go and computed before it is asked for. No answer changes."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from sapwood.v1 import router_pb2
from sapwood_common.errors import InvalidArgumentError
from sapwood_common.status import from_rpc_error
from sapwood_router.request.cache_hint import NO_HINT, CacheHint, cache_hint_of

PROMPT = "abcdefgh" * 4


def test_our_own_field_wins_over_those_of_openais_clients() -> None:
    key = {"prompt_cache_key": "k"}
    assert cache_hint_of(None, {}) is NO_HINT
    assert cache_hint_of(None, key).keep_seconds == 300
    assert cache_hint_of(None, {"prompt_cache_retention": "24h"}).keep_seconds == 86400
    assert cache_hint_of(CacheHint(7.0), key) == CacheHint(7.0)
    assert cache_hint_of(CacheHint(demote=True), key) == CacheHint(demote=True)
    assert cache_hint_of(CacheHint(prefetch=True), key) == CacheHint(300.0, prefetch=True)
    assert cache_hint_of(CacheHint(), {}, 5.0) == CacheHint(5.0)


@pytest.mark.parametrize(
    "hint",
    [
        {"keep_seconds": -1},
        {"keep_seconds": 1e12},
        {"keep_seconds": "long"},
        {"pin": True},
        {"demote": 1},
        {"demote": True, "keep_seconds": 5},
        {"demote": True, "prefetch": True},
        "keep",
        [],
    ],
)
async def test_a_hint_that_makes_no_sense_is_refused_by_its_name(hint: Any, cluster: Any) -> None:
    for api, body in BODIES.items():
        answer = await cluster.http.post(f"/v1/{api}", json=body | {"cache_hint": hint})
        assert answer.status_code == 400 and "cache_hint" in answer.text


def pinned(cluster: Any) -> list[list[int]]:
    return sorted(ids for worker in cluster.workers for ids in worker.pins.values())


BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": PROMPT, "max_tokens": 4},
    "chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "model": "fake"},
    "messages": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "model": "fake"},
    "responses": {"input": PROMPT, "max_output_tokens": 16, "model": "fake"},
}


@pytest.mark.parametrize("api", BODIES)
async def test_over_http_a_prompt_is_kept_and_let_go_and_the_answer_is_the_same(
    api: str, make_cluster: Any, wait_until: Any
) -> None:
    async with make_cluster(1) as cluster:

        async def ask(hint: dict[str, Any] | None) -> Any:
            body = BODIES[api] | ({} if hint is None else {"cache_hint": hint})
            answer = await cluster.http.post(f"/v1/{api}", json=body)
            assert answer.status_code == 200, answer.text
            assert "x-sapwood-ignored" not in answer.headers
            found = answer.json()
            return found.get("choices") or found.get("content") or found["output"][0]["content"]

        plain = await ask(None)
        assert pinned(cluster) == []
        assert await ask({"keep_seconds": 60}) == plain
        await wait_until(lambda: len(pinned(cluster)) == 1)
        assert await ask({"demote": True}) == plain
        await wait_until(lambda: not pinned(cluster))
        refused = await cluster.http.post(f"/v1/{api}", json=BODIES[api] | {"cache_hint": {"pin": True}})
        assert refused.status_code == 400 and "cache_hint" in refused.text


@pytest.mark.parametrize("api", ["completions", "chat/completions", "messages"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefetch_computes_the_prompt_where_it_will_be_asked_for_and_answers_nothing(
    api: str, stream: bool, make_cluster: Any
) -> None:
    async with make_cluster(3) as cluster:
        long = PROMPT * 60
        asked = {"prompt": long} if api == "completions" else {"messages": [{"role": "user", "content": long}]}
        body = BODIES[api] | asked
        path = f"/v1/{api}"
        answer = await cluster.http.post(path, json=body | {"cache_hint": {"prefetch": True}, "stream": stream})
        assert answer.status_code == 200, answer.text
        assert '"abc' not in answer.text, "ids are random"
        if not stream:
            usage = answer.json()["usage"]
            assert usage.get("completion_tokens", usage.get("output_tokens")) == 0
        [used] = [worker for worker in cluster.workers if worker.calls]
        [call] = used.calls
        assert call.request.sampling.max_tokens == 1
        await cluster.http.post(path, json=body)
        assert [len(worker.calls) for worker in cluster.workers if worker is not used] == [0, 0]
        assert list(used.calls[1].request.token_ids) == list(call.request.token_ids)
        await cluster.idle()


async def test_over_grpc_the_same(make_cluster: Any, wait_until: Any) -> None:
    async with make_cluster(1) as cluster:

        async def ask(**hint: Any) -> str:
            request = router_pb2.RouterGenerateRequest(text=PROMPT)
            request.sampling.max_tokens = 4
            if hint:
                request.cache_hint.CopyFrom(router_pb2.CacheHint(**hint))
            return "".join([each.text async for each in cluster.stub.Generate(request)])

        plain = await ask()
        assert await ask(keep_seconds=60) == plain
        await wait_until(lambda: len(pinned(cluster)) == 1)
        assert await ask(demote=True) == plain
        await wait_until(lambda: not pinned(cluster))
        assert await ask(prefetch=True, keep_seconds=60) == ""
        await wait_until(lambda: len(pinned(cluster)) == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(keep_seconds=-1)
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidArgumentError) and error.field == "cache_hint.keep_seconds"


async def test_a_session_does_not_grow_by_a_prefetch(make_cluster: Any) -> None:
    async with make_cluster(1) as cluster:
        session = (await cluster.stub.OpenSession(router_pb2.OpenSessionRequest())).session.id
        request = router_pb2.RouterGenerateRequest(text=PROMPT, session=session)
        request.cache_hint.prefetch = True
        assert [each.text async for each in cluster.stub.Generate(request)] == [""]
        found = (await cluster.stub.GetSession(router_pb2.GetSessionRequest(id=session))).session
        assert (found.tokens, found.turns) == (0, 0)
        await cluster.generate("ab", session=session)
        assert (await cluster.stub.GetSession(router_pb2.GetSessionRequest(id=session))).session.turns == 1


async def test_a_hint_is_cut_to_what_a_tenant_may_keep(make_cluster: Any, wait_until: Any) -> None:
    async with make_cluster(1, max_sessions="leases=8") as cluster:
        answer = await cluster.http.post(
            "/v1/completions", json=BODIES["completions"] | {"cache_hint": {"keep_seconds": 60}}
        )
        assert answer.status_code == 200
        await cluster.idle()
        assert pinned(cluster) == []
