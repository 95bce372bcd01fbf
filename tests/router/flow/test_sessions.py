"""Sessions over gRPC and HTTP: open, continue, fork, close; pins at workers; what each tenant may have; lost workers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from sapwood.client import AsyncClient
from sapwood.errors import from_rpc_error
from sapwood.v1 import common_pb2, router_pb2
from sapwood_common.errors import (
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
    UnimplementedError,
)
from sapwood_router.flow.sessions import SessionLimits, SessionStore
from sapwood_router.store.records import Retention, Store
from sapwood_router.store.sql import SqlStore
from sapwood_router.store.sqlite import MEMORY, SqliteDriver

ANSWER = [ord("x") + 3, ord("y") + 3]


def script(cluster: Any) -> None:
    """Each worker answers ``xy`` and an end."""
    for worker in cluster.workers:
        worker.script.tokens = lambda prompt: list(ANSWER)


def pins(cluster: Any) -> dict[str, tuple[str, list[int]]]:
    """Where each session is pinned, and its tokens."""
    return {name: (worker.address, ids) for worker in cluster.workers for name, ids in worker.pins.items()}


async def state(cluster: Any, session: str) -> router_pb2.SessionState:
    return (await cluster.stub.GetSession(router_pb2.GetSessionRequest(id=session))).session


async def test_a_session_goes_on_at_the_worker_that_has_it_pinned_and_forks_and_closes(make_cluster, wait_until):
    async with make_cluster(3, policy="round_robin") as cluster:
        script(cluster)
        async with AsyncClient(f"127.0.0.1:{cluster.router.grpc_port}") as client:
            session = await client.open_session(60)
            held: list[int] = []
            for turn, text in enumerate(("ab", "cd", "ef")):
                answer = await client.generate(text, session=session).answer()
                [used] = [worker for worker in cluster.workers if worker.calls]
                asked = used.calls[turn]
                assert list(asked.request.token_ids)[: len(held)] == held
                held = [*asked.request.token_ids, *answer.token_ids]
                await wait_until(lambda held=held: pins(cluster).get(session, ("", []))[1] == held)
            found = await state(cluster, session)
            assert found.turns == 3 and found.tokens == len(held) == found.pinned_tokens and found.moves == 0
            assert 0 < found.cached_tokens < found.prompt_tokens
            assert found.worker == cluster.id_of(used)
            assert pins(cluster)[session][0] == used.address
            assert 0 < found.expires_in_seconds <= 60 == found.ttl_seconds

            fork = await client.open_session(fork_of=session)
            await wait_until(lambda: pins(cluster).get(fork, ("", []))[1] == held)
            await client.generate("gh", session=fork).answer()
            await wait_until(lambda: len(pins(cluster)[fork][1]) > len(held))
            assert pins(cluster)[fork][1][: len(held)] == held
            assert (await state(cluster, session)).tokens == len(held)

            await client.close_session(session)
            await wait_until(lambda: session not in pins(cluster))
            with pytest.raises(Exception, match="there is no session") as caught:
                await client.generate("ij", session=session).answer()
            assert type(caught.value).__name__ == "NotFoundError"
            await client.generate("ij", session=fork).answer()
            page = (await cluster.http.get("/metrics")).text
            assert "sapwood_router_sessions 1.0" in page
            assert "sapwood_router_session_cached_tokens_total 0.0" not in page


async def test_a_dead_workers_session_is_rebuilt_elsewhere_with_all_its_tokens(make_cluster, wait_until):
    async with make_cluster(2) as cluster:
        script(cluster)
        async with AsyncClient(f"127.0.0.1:{cluster.router.grpc_port}") as client:
            session = await client.open_session()
            await client.generate("ab", session=session).answer()
            await wait_until(lambda: session in pins(cluster))
            held = pins(cluster)[session][1]
            first = (await state(cluster, session)).worker
            lost, other = sorted(cluster.workers, key=lambda worker: cluster.id_of(worker) != first)
            await lost.kill()
            lost.pins.clear()
            await client.generate("cd", session=session).answer()
            assert list(other.calls[-1].request.token_ids)[: len(held)] == held
            found = await state(cluster, session)
            assert (found.worker, found.moves, found.turns) == (cluster.id_of(other), 1, 2)
            await wait_until(lambda: len(other.pins.get(session, [])) == found.tokens)


async def test_over_http_the_same_and_its_faults_have_names(cluster, wait_until):
    script(cluster)
    http = cluster.http
    opened = (await http.post("/v1/sessions", json={"ttl_seconds": 30})).json()
    assert opened["object"] == "session" and opened["ttl_seconds"] == 30 and opened["worker"] is None
    path = f"/v1/sessions/{opened['id']}"
    asked = {"prompt": "ab", "session": opened["id"]}
    first = await http.post("/v1/completions", json=asked)
    assert first.json()["choices"][0]["text"] == "xy"
    streamed = await http.post("/v1/completions", json=asked | {"stream": True})
    assert "[DONE]" in streamed.text
    shown = (await http.get(path)).json()
    assert shown["turns"] == 2
    assert shown["tokens"] == shown["prompt_tokens"] - first.json()["usage"]["prompt_tokens"] + 3
    fork = (await http.post("/v1/sessions", json={"fork_of": opened["id"]})).json()
    assert fork["tokens"] == shown["tokens"] and fork["id"] != opened["id"]
    for body, status, word in (
        (asked | {"n": 2}, 400, "one prompt and one answer"),
        (asked | {"echo": True}, 400, "echo"),
        (asked | {"suffix": "x"}, 400, "suffix"),
        (asked | {"truncate_prompt_tokens": 3}, 400, "not cut"),
        (asked | {"session": "sess-no"}, 404, "no session 'sess-no'"),
        (asked | {"session": 3}, 400, "session"),
    ):
        answer = await http.post("/v1/completions", json=body)
        assert (answer.status_code, word in answer.text) == (status, True), answer.text
    for wrong in ({"ttl_seconds": 0}, {"ttl_seconds": 1e9}, {"ttl_seconds": "x"}):
        assert (await http.post("/v1/sessions", json=wrong)).status_code == 400
    assert (await http.post("/v1/sessions", json={"fork_of": "sess-no"})).status_code == 404
    assert (await http.get(path)).json()["turns"] == 2
    # Another tenant finds nothing of it.
    for method in ("GET", "DELETE"):
        assert (await http.request(method, path, headers={"x-tenant": "other"})).status_code == 404
    assert (await http.delete(path)).json() == {"id": opened["id"], "object": "session", "deleted": True}
    assert (await http.get(path)).status_code == 404
    await wait_until(lambda: opened["id"] not in pins(cluster))


async def test_an_unknown_id_is_told_over_grpc_by_the_field_that_had_it(cluster):
    stub = cluster.stub
    for call, field in (
        (stub.GetSession(router_pb2.GetSessionRequest(id="sess-no")), "id"),
        (stub.CloseSession(router_pb2.CloseSessionRequest(id="sess-no")), "id"),
        (stub.OpenSession(router_pb2.OpenSessionRequest(fork_of="sess-no")), "fork_of"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert from_rpc_error(caught.value).field == field


async def test_failed_requests_leave_a_session_unchanged_and_one_runs_at_a_time(cluster, wait_until):
    script(cluster)
    session = (await cluster.stub.OpenSession(router_pb2.OpenSessionRequest())).session.id
    await cluster.generate("ab", session=session)
    before = (await state(cluster, session)).tokens
    gate = asyncio.Event()
    for worker in cluster.workers:
        worker.script.gate = gate
    calls = len(cluster.calls())
    call = cluster.stub.Generate(router_pb2.RouterGenerateRequest(text="cd", session=session))
    await wait_until(lambda: len(cluster.calls()) > calls)
    with pytest.raises(grpc.aio.AioRpcError, match="under way") as caught:
        await cluster.generate("ef", session=session)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    call.cancel()
    await wait_until(lambda: all(seen.outcome != "running" for seen in cluster.calls()))
    gate.set()
    for worker in cluster.workers:
        worker.script.gate = None
        worker.script.error, worker.script.fail_after = InvalidArgumentError("no"), 1
    with pytest.raises(grpc.aio.AioRpcError, match="no"):
        await cluster.generate("gh", session=session)
    for worker in cluster.workers:
        worker.script.error = worker.script.fail_after = None
    assert (await state(cluster, session)).tokens == before
    messages = router_pb2.ChatMessages(messages=[common_pb2.ChatMessage(role="user", content="hi")])
    for request in (
        router_pb2.RouterGenerateRequest(messages=messages, session=session),
        router_pb2.RouterGenerateRequest(text="x", session=session, sampling=common_pb2.SamplingParams(n=2)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            [each async for each in cluster.stub.Generate(request)]
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    await cluster.generate("ij", session=session)
    assert (await state(cluster, session)).turns == 2


class NoPins:
    """Nobody to pin at."""

    async def pin(
        self, address: str, name: str, token_ids: Any, cache_salt: str, seconds: float, lora: str = ""
    ) -> int:
        return 0

    async def unpin(self, address: str, name: str) -> None:
        return None


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def grow(store: SessionStore, session_id: str, tokens: int, tenant: str = "t") -> None:
    turn = await store.begin(tenant, session_id, None)
    await turn.commit(range(tokens), tokens - 1, 0, "m", "w", "")


class Kept:
    """Sessions in a store in memory; another router's are those of :meth:`beside`."""

    def __init__(self, sessions: int = 9, tokens: int = 100, ttl: float = 60.0, store: Store | None = None) -> None:
        self.clock, self.wall = Clock(), Clock()
        self.limits = SessionLimits(sessions, tokens, ttl)
        self.records = store or SqlStore(SqliteDriver(MEMORY), Retention(1, 1))
        self.store = self.beside()

    def beside(self) -> SessionStore:
        return SessionStore(self.limits, NoPins(), lambda *_, **__: None, self.clock, self.records, self.wall)


async def test_a_tenant_has_only_so_many_sessions_and_tokens():
    each = Kept(sessions=2)
    store = each.store
    one = (await store.open("t")).session_id
    await grow(store, one, 60)
    with pytest.raises(ResourceExhaustedError, match="60 tokens of at most 100"):
        await store.open("t", fork_of=one)
    two = (await store.open("t")).session_id
    for router in (store, each.beside()):  # all routers count all of them
        with pytest.raises(ResourceExhaustedError, match="2 sessions"):
            await router.open("t")
    await grow(store, two, 50)
    for router in (store, each.beside()):
        with pytest.raises(ResourceExhaustedError, match="110 tokens of at most 100"):
            await router.begin("t", one, None)
    await store.open("other")
    await store.close("t", two)
    turn = await store.begin("t", one, None)
    turn.release()
    with pytest.raises(InvalidArgumentError, match="of the model 'm'"):
        await store.begin("t", one, "another")
    with pytest.raises(NotFoundError):
        await store.begin("other", one, None)
    assert len(store) == 2
    await store.stop()
    with pytest.raises(UnimplementedError):
        await Kept(sessions=0).store.open("t")


async def test_a_session_ends_when_it_was_not_used_for_its_time(wait_until):
    loop = asyncio.get_running_loop()
    each = Kept()
    each.clock = loop.time
    each.wall = time.time
    store = each.beside()
    short, long = await store.open("t", 0.05), await store.open("t", 50.0)
    turn = await store.begin("t", short.session_id, None)
    expired = short.expires
    await wait_until(lambda: short.expires > expired)  # it is under way
    turn.release()
    await wait_until(lambda: short.closed)
    assert not long.closed and len(store) == 1
    await turn.commit([1, 2], 1, 0, "m", "w", "")  # an answer that comes too late is nobody's
    assert len(store) == 1
    await store.stop()


async def test_another_router_continues_a_session_and_closes_it():
    each = Kept()
    one, other = each.store, each.beside()
    opened = (await one.open("t")).session_id
    await grow(one, opened, 5)
    turn = await other.begin("t", opened, "m")
    assert list(turn.tokens) == [0, 1, 2, 3, 4] and turn.worker == "w"
    await turn.commit(range(7), 6, 4, "m", "w2", "salt")
    found = await one.get("t", opened)
    assert (list(found.tokens), found.worker, found.turns, found.moves) == (list(range(7)), "w2", 2, 1)
    assert (found.prompt_tokens, found.cached_tokens, found.cache_salt) == (4 + 6, 4, "salt")
    await grow(one, opened, 9)
    await other.close("t", opened)
    for router in (one, other):
        with pytest.raises(NotFoundError):
            await router.begin("t", opened, None)
        assert len(router) == 0
        await router.stop()


async def test_of_two_routers_that_answer_a_session_at_a_time_the_second_fails():
    each = Kept()
    one, other = each.store, each.beside()
    opened = (await one.open("t")).session_id
    first, second = await one.begin("t", opened, None), await other.begin("t", opened, None)
    await second.commit([1, 2], 1, 0, "m", "w", "")
    with pytest.raises(ResourceExhaustedError, match="another request meanwhile"):
        await first.commit([3, 4, 5], 2, 0, "m", "w", "")
    for router in (one, other):
        assert list((await router.get("t", opened)).tokens) == [1, 2]
        (await router.begin("t", opened, None)).release()  # it can go on
        await router.stop()


async def test_a_session_that_another_router_uses_does_not_end():
    each = Kept()
    one, other = each.store, each.beside()
    opened = await one.open("t", 10.0)
    each.clock.now += 9
    each.wall.now += 9
    await grow(other, opened.session_id, 3)
    each.clock.now += 2
    each.wall.now += 2
    await one._expire(opened)
    assert not opened.closed and list(opened.tokens) == [0, 1, 2]
    each.clock.now += 10
    each.wall.now += 10
    await one._expire(opened)
    assert opened.closed and len(one) == 0
    for router in (one, other):
        await router.stop()


async def test_a_request_that_runs_for_long_keeps_its_session(wait_until):
    each = Kept()
    opened = await each.store.open("t", 0.1)
    turn = await each.store.begin("t", opened.session_id, None)
    version = opened.version
    await wait_until(lambda: opened.version > version + 1)
    await turn.commit([1], 1, 0, "m", "w", "")
    assert list((await each.beside().get("t", opened.session_id)).tokens) == [1]
    await each.store.stop()


async def test_a_session_that_was_closed_during_a_request_stays_closed():
    each = Kept()
    opened = (await each.store.open("t")).session_id
    turn = await each.store.begin("t", opened, None)
    await each.beside().close("t", opened)
    await turn.commit([1], 1, 0, "m", "w", "")
    with pytest.raises(NotFoundError):
        await each.store.get("t", opened)
    await each.store.stop()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow), "redis"])
def shared_store(request, tmp_path) -> str:
    if request.param != "sqlite":
        return request.getfixturevalue(f"{request.param}_url")
    return f"sqlite:{tmp_path}/store.sqlite"


async def test_two_routers_with_one_store_continue_each_others_sessions(make_cluster, shared_store, wait_until):
    async with make_cluster(1, store=shared_store) as one, make_cluster(1, store=shared_store) as other:
        for cluster in (one, other):
            script(cluster)
        opened = (await one.http.post("/v1/sessions", json={})).json()["id"]
        held: list[int] = []
        for turn, cluster in enumerate((one, other, other, one)):
            answer = await cluster.http.post("/v1/completions", json={"prompt": "ab", "session": opened})
            assert answer.status_code == 200, answer.text
            asked = list(cluster.calls()[-1].request.token_ids)
            assert asked[: len(held)] == held
            held = [*asked, *ANSWER, 1][: answer.json()["usage"]["prompt_tokens"] + 3]
            for each in (one, other):
                shown = (await each.http.get(f"/v1/sessions/{opened}")).json()
                assert (shown["turns"], shown["tokens"]) == (turn + 1, len(held))
        assert (await state(one, opened)).moves == 2
        fork = (await other.stub.OpenSession(router_pb2.OpenSessionRequest(fork_of=opened))).session
        assert fork.tokens == len(held)
        await one.generate("cd", session=fork.id)
        assert list(one.calls()[-1].request.token_ids)[: len(held)] == held
        assert (await other.http.get(f"/v1/sessions/{opened}", headers={"x-tenant": "mallory"})).status_code == 404
        await one.stub.CloseSession(router_pb2.CloseSessionRequest(id=opened))
        assert (await other.http.get(f"/v1/sessions/{opened}")).status_code == 404
        await wait_until(lambda: opened not in pins(one) and opened not in pins(other))


async def test_sessions_outlive_the_router(make_cluster, shared_store):
    async with make_cluster(1, store=shared_store) as cluster:
        script(cluster)
        opened = (await cluster.stub.OpenSession(router_pb2.OpenSessionRequest(ttl_seconds=600))).session.id
        await cluster.generate("ab", session=opened)
        before = await state(cluster, opened)
    async with make_cluster(1, store=shared_store) as cluster:
        script(cluster)
        after = await state(cluster, opened)
        assert (after.tokens, after.turns, after.ttl_seconds) == (before.tokens, 1, 600)
        assert 0 < after.expires_in_seconds <= 600
        await cluster.generate("cd", session=opened)
        assert (await state(cluster, opened)).turns == 2


async def test_a_store_in_memory_ends_with_its_router(make_cluster):
    async with make_cluster(1, store="memory") as one, make_cluster(1, store="memory") as other:
        opened = (await one.http.post("/v1/sessions", json={})).json()["id"]
        refused = await other.http.post("/v1/completions", json={"prompt": "ab", "session": opened})
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "session")


async def test_an_answer_that_the_store_does_not_take_fails_and_the_session_is_as_before(make_cluster, tmp_path):
    async with make_cluster(1, store=f"sqlite:{tmp_path}/store.sqlite") as cluster:
        script(cluster)
        opened = (await cluster.http.post("/v1/sessions", json={})).json()["id"]
        asked = {"prompt": "ab", "session": opened}
        assert (await cluster.http.post("/v1/completions", json=asked)).status_code == 200
        store, records = cluster.router._sessions, cluster.router._sessions._store

        class Broken:
            def __getattr__(self, name: str) -> Any:
                return getattr(records, name)

            async def swap(self, record: Any) -> bool:
                raise UnavailableError("the disk is full")

        store._store = Broken()
        failed = await cluster.http.post("/v1/completions", json=asked)
        assert failed.status_code == 503 and "disk is full" in failed.text
        streamed = await cluster.http.post("/v1/completions", json=asked | {"stream": True})
        assert "disk is full" in streamed.text and "[DONE]" not in streamed.text
        store._store = records
        assert (await cluster.http.get(f"/v1/sessions/{opened}")).json()["turns"] == 1
        assert (await cluster.http.post("/v1/completions", json=asked)).status_code == 200
        await cluster.idle()
