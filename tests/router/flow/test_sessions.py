"""Sessions over gRPC and HTTP: open, continue, fork, close; pins at workers; what each tenant may have; lost workers."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from sapwood.client import AsyncClient
from sapwood.errors import from_rpc_error
from sapwood.v1 import common_pb2, router_pb2
from sapwood_common.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError, UnimplementedError
from sapwood_router.flow.sessions import SessionLimits, SessionStore

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


def grow(store: SessionStore, session_id: str, tokens: int, tenant: str = "t") -> None:
    turn = store.begin(tenant, session_id, None)
    turn.commit(range(tokens), tokens - 1, 0, "m", "w", "")


async def test_a_tenant_has_only_so_many_sessions_and_tokens():
    store = SessionStore(SessionLimits(2, 100, 60.0), NoPins(), lambda *_, **__: None, Clock())
    one = store.open("t").session_id
    grow(store, one, 60)
    with pytest.raises(ResourceExhaustedError, match="60 tokens of at most 100"):
        store.open("t", fork_of=one)
    two = store.open("t").session_id
    with pytest.raises(ResourceExhaustedError, match="2 sessions"):
        store.open("t")
    grow(store, two, 50)
    with pytest.raises(ResourceExhaustedError, match="110 tokens of at most 100"):
        store.begin("t", one, None)
    store.open("other")
    store.close("t", two)
    turn = store.begin("t", one, None)
    with pytest.raises(InvalidArgumentError, match="of the model 'm'"):
        turn.release()
        store.begin("t", one, "another")
    with pytest.raises(NotFoundError):
        store.begin("other", one, None)
    assert len(store) == 2
    await store.stop()
    with pytest.raises(UnimplementedError):
        SessionStore(SessionLimits(0, 100, 60.0), NoPins(), lambda *_, **__: None, Clock()).open("t")


async def test_a_session_ends_when_it_was_not_used_for_its_time(wait_until):
    loop = asyncio.get_running_loop()
    store = SessionStore(SessionLimits(9, 100, 60.0), NoPins(), lambda *_, **__: None, loop.time)
    short, long = store.open("t", 0.05), store.open("t", 50.0)
    turn = store.begin("t", short.session_id, None)
    expired = short.expires
    await wait_until(lambda: short.expires > expired)  # it is under way
    turn.release()
    await wait_until(lambda: short.closed)
    assert not long.closed and len(store) == 1
    turn.commit([1, 2], 1, 0, "m", "w", "")  # an answer that comes too late is nobody's
    assert len(store) == 1
    await store.stop()
