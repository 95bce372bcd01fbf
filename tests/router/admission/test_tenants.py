"""Tenants: what one has cached is hidden from others, and each has its allowance and its share."""

import asyncio
import re

import grpc
import pytest

from sapwood.v1 import router_pb2
from sapwood_common.contract.page_hash import cache_namespace, hash_pages
from sapwood_common.errors import InvalidArgumentError
from sapwood_common.tenants.api_keys import hash_key, make_key
from sapwood_common.tenants.tenant import Tenant, TenantSettings
from sapwood_router.request.caller import caller_of
from sapwood_router.routing.policies.base import PromptPages

PROMPT = "the same long prompt of two tenants, several pages of it; " * 3
KEYS = {name: make_key() for name in ("alice", "bob")}


def bearer(name: str) -> tuple:
    return (("authorization", f"Bearer {KEYS[name]}"),)


@pytest.fixture
def key_file(tmp_path):
    def write(**limits: str):
        path = tmp_path / "keys"
        path.write_text("".join(f"{name} {hash_key(key)} {limits.get(name, '')}\n" for name, key in KEYS.items()))
        return path

    return write


async def test_a_prompt_that_one_tenant_has_cached_is_new_for_another_to_router_and_worker(
    make_cluster, key_file
) -> None:
    async with make_cluster(2, api_keys=key_file()) as cluster:
        cached = {}
        for name in ("alice", "alice", "bob", "bob"):
            responses = await cluster.generate(PROMPT, metadata=bearer(name))
            cached.setdefault(name, []).append(responses[-1].usage.cached_tokens)
        assert cached["alice"] == cached["bob"] == [0, cached["alice"][1]]
        assert cached["alice"][1] > 0
        salts = {(call.request.tenant, call.request.cache_salt) for call in cluster.calls()}
        assert {tenant for tenant, _ in salts} == {"alice", "bob"}
        assert len(salts) == len({salt for _, salt in salts} - {""}) == 2

        shown = (await cluster.http.get("/metrics")).text
        chosen = dict(re.findall(r'sapwood_router_selections_total\{reason="(\w+)"\} (\S+)', shown))
        assert {reason: float(count) for reason, count in chosen.items()} == {"cache_miss": 2, "cache_hit": 2}
        response = await cluster.http.post(
            "/v1/completions",
            json={"prompt": PROMPT, "max_tokens": 1},
            headers={"authorization": f"Bearer {KEYS['alice']}", "x-tenant": "bob"},
        )
        assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == cached["alice"][1]


async def test_an_embedding_says_to_the_worker_whom_it_is_for_as_a_generation_does(make_cluster, key_file) -> None:
    async with make_cluster(1, api_keys=key_file(alice="priority=7")) as cluster:
        for name in KEYS:
            metadata = (*bearer(name), ("x-priority", "7" if name == "alice" else "-2"))
            await cluster.generate("abc", metadata=metadata)
            await cluster.stub.Embed(
                router_pb2.RouterEmbedRequest(input=[router_pb2.EmbedInput(text="abc")]), metadata=metadata
            )
            answer = await cluster.http.post("/v1/embeddings", json={"input": "abc"}, headers=dict(metadata))
            assert answer.status_code == 200
        (worker,) = cluster.workers
        generated = [(call.request.tenant, call.request.cache_salt, call.request.priority) for call in worker.calls]
        embedded = [
            (call.request.tenant, call.request.cache_salt, call.request.priority) for call in worker.embed_calls
        ]
        assert embedded == [generated[0]] * 2 + [generated[1]] * 2
        assert [(tenant, bool(salt), priority) for tenant, salt, priority in generated] == [
            ("alice", True, 7),
            ("bob", True, -2),
        ]


async def test_without_keys_the_tenants_that_a_gateway_names_are_kept_apart(cluster) -> None:
    first = [(await cluster.generate(PROMPT, metadata=(("x-tenant", name),)))[-1] for name in ("a", "b")]
    again = (await cluster.generate(PROMPT, metadata=(("x-tenant", "b"),)))[-1]
    nobody = (await cluster.generate(PROMPT))[-1]
    assert [item.usage.cached_tokens for item in (*first, nobody)] == [0, 0, 0]
    assert again.usage.cached_tokens > 0
    body = {"prompt": PROMPT, "max_tokens": 1, "cache_salt": "b"}
    salted = [(await cluster.http.post("/v1/completions", json=body)).json()["usage"] for _ in range(2)]
    assert [usage["prompt_tokens_details"]["cached_tokens"] > 0 for usage in salted] == [False, True]


def test_router_and_worker_hash_a_tenants_pages_alike() -> None:
    salt = caller_of({"x-tenant": "a"}.get, None).cache_salt
    tokens = list(range(100))
    prompt = PromptPages(tokens[:40], "", salt)
    assert prompt.hashes(16) == hash_pages(tokens[:40], 16, salt=cache_namespace(salt))
    assert prompt.extended(tokens[40:], 16) == hash_pages(tokens, 16, salt=cache_namespace(salt))
    assert PromptPages(tokens[:5], "", salt).extended(tokens[5:], 16) == prompt.extended(tokens[40:], 16)
    assert not set(prompt.hashes(16)) & set(PromptPages(tokens).hashes(16))


async def test_a_tenant_beyond_its_tokens_is_refused_with_a_delay_and_others_are_not(
    make_cluster, key_file, expect_error
) -> None:
    async with make_cluster(1, api_keys=key_file(alice="tokens=60")) as cluster:
        await cluster.generate(PROMPT, metadata=bearer("alice"))
        await expect_error(cluster.generate("x", metadata=bearer("alice")), grpc.StatusCode.RESOURCE_EXHAUSTED)
        headers = {"authorization": f"Bearer {KEYS['alice']}"}
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/embeddings", {"input": "x"})):
            response = await cluster.http.post(path, json=body, headers=headers)
            assert (response.status_code, int(response.headers["retry-after"]) > 1) == (429, True)
        await cluster.generate(PROMPT, metadata=bearer("bob"))


async def test_a_request_with_several_prompts_is_let_in_or_refused_as_a_whole(make_cluster, key_file) -> None:
    async with make_cluster(1, api_keys=key_file(alice="tokens=60")) as cluster:
        headers = {"authorization": f"Bearer {KEYS['alice']}"}
        body = {"prompt": [PROMPT] * 3, "n": 2, "max_tokens": 2}  # each prompt alone is more than there is at once
        for status in (200, 429):
            response = await cluster.http.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == status, response.text


@pytest.mark.parametrize(
    ("path", "asked"),
    [("completions", {"prompt": PROMPT}), ("chat/completions", {"messages": [{"role": "user", "content": PROMPT}]})],
)
async def test_a_prompt_is_charged_once_however_many_continuations_it_has(make_cluster, key_file, path, asked) -> None:
    async with make_cluster(1, api_keys=key_file(alice="tokens=60")) as cluster:  # one a second, ten at once
        headers = {"authorization": f"Bearer {KEYS['alice']}"}
        body = {"model": "fake", "n": 6, "max_tokens": 1, **asked}
        first, refused = [await cluster.http.post(f"/v1/{path}", json=body, headers=headers) for _ in range(2)]
        tokens = first.json()["usage"]["prompt_tokens"]
        assert refused.status_code == 429
        assert tokens / 2 < int(refused.headers["retry-after"]) < 2 * tokens


@pytest.mark.parametrize(
    ("most", "asked", "found"),
    [(0, None, 0), (0, "-5", -5), (0, "1", None), (7, "7", 7), (-3, None, -3), (-3, "0", None)],
)
def test_nobody_goes_ahead_of_other_tenants_by_his_own_word(most: int, asked: str | None, found: int | None) -> None:
    account = Tenant(TenantSettings("key", priority=most), lambda: 0.0)
    if found is not None:
        assert caller_of({"x-priority": asked}.get, account).priority == found
        return
    with pytest.raises(InvalidArgumentError) as caught:
        caller_of({"x-priority": asked}.get, account)
    assert caught.value.field == "x-priority"


async def test_tenants_are_counted_and_their_number_is_bounded(cluster) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    names = [f"tenant-{number}" for number in range(80)]
    await asyncio.gather(*(cluster.generate("abc", metadata=(("x-tenant", name),)) for name in names))
    text = (await cluster.http.get("/metrics")).text
    found = {
        sample.labels["tenant"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "sapwood_router_tenant_requests_total"
    }
    assert len(found) == 65
    assert sum(found.values()) == 80
    assert found["other"] == 16


@pytest.mark.parametrize("names", [("alice", "bob"), ("alice", "alice")])
async def test_a_call_with_two_keys_is_refused(make_cluster, key_file, names) -> None:
    async with make_cluster(1, api_keys=key_file()) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.generate("a", metadata=bearer(names[0]) + bearer(names[1]))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "more than once" in caught.value.details()
