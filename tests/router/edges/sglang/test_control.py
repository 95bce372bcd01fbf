"""SGLang's and vLLM's calls that look at the server or steer it, and text-embeddings-inference's shapes."""

import asyncio
import json

import grpc
import pytest

from sapwood.v1 import router_pb2
from sapwood_common.errors import UnavailableError
from sapwood_common.status import from_rpc_error
from sapwood_testing.router.fake_tokenizer import encode

GENERATE, CHAT = "/generate", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
BODIES = {
    GENERATE: {"text": "hello", "rid": "mine"},
    CHAT: {"messages": HI, "request_id": "mine"},
    "/v1/responses": {"input": "hello", "request_id": "mine"},
    "/v1/messages": {"messages": HI, "max_tokens": 99, "request_id": "mine"},
}


@pytest.fixture
async def cluster(make_cluster):
    async with make_cluster(workers=1) as running:
        yield running


def hold(cluster, after: int = 3) -> asyncio.Event:
    gate = asyncio.Event()
    for worker in cluster.workers:
        worker.script.gate, worker.script.gate_after = gate, after
    return gate


async def running(cluster, wait_until, count: int = 1) -> None:
    await wait_until(lambda: len(cluster.calls()) == count and all(call.sent_tokens == 3 for call in cluster.calls()))
    await asyncio.sleep(0.05)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_request_is_aborted_by_its_id_and_tells_what_there_was(cluster, wait_until, path, stream) -> None:
    hold(cluster)
    asked = asyncio.ensure_future(cluster.http.post(path, json={**BODIES[path], "stream": stream}))
    await running(cluster, wait_until)
    assert (await cluster.http.get("/load")).json() == {"server_load": 1}
    answer = await cluster.http.post("/abort_request", json={"rid": "other"})
    assert answer.json() == {"success": True, "aborted": 0}
    answer = await cluster.http.post("/abort_request", json={"rid": "mine"})
    assert answer.json() == {"success": True, "aborted": 1}
    answer = await asked
    assert answer.status_code == 200, answer.text
    text = answer.text
    if path == GENERATE:
        last = json.loads([line for line in text.split("\n\n") if "{" in line][-1].removeprefix("data: "))
        assert (last["meta_info"]["finish_reason"]["type"], last["text"]) == ("abort", "hel")
        assert last["output_ids"] == encode("hel")[1:]
    elif path == CHAT:
        assert '"finish_reason":"abort"' in text
    await wait_until(lambda: cluster.calls()[0].outcome == "cancelled")
    await cluster.idle()
    assert (await cluster.http.get("/load")).json() == {"server_load": 0}


async def test_a_tenant_aborts_only_his_own(cluster, wait_until) -> None:
    hold(cluster)
    asked = asyncio.ensure_future(cluster.http.post(GENERATE, json=BODIES[GENERATE], headers={"x-tenant": "alice"}))
    await running(cluster, wait_until)
    for tenant, count in (("bob", 0), ("", 0), ("alice", 1)):
        answer = await cluster.http.post("/abort_request", json={"rid": "mine"}, headers={"x-tenant": tenant})
        assert answer.json()["aborted"] == count
    assert (await asked).json()["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_pause_aborts_what_runs_and_holds_back_what_comes(cluster, wait_until) -> None:
    gate = hold(cluster)
    first = asyncio.ensure_future(cluster.http.post(GENERATE, json={"text": "hello"}))
    await running(cluster, wait_until)
    assert (await cluster.http.post("/pause_generation", json={})).json()["aborted"] == 1
    assert (await first).json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await cluster.http.get("/server_info")).json()["status"] == "paused"
    gate.set()
    second = asyncio.ensure_future(cluster.http.post(GENERATE, json={"text": "hello"}))
    late = await cluster.http.post(GENERATE, json={"text": "hello"}, headers={"x-request-timeout": "0.1"})
    assert late.status_code == 504
    assert len(cluster.calls()) == 1
    assert not second.done()
    await cluster.http.post("/continue_generation", json={})
    assert (await second).json()["text"] == "hello"
    answer = await cluster.http.post("/pause_generation", json={"mode": "asleep"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "mode")
    assert (await cluster.http.post(GENERATE, json={"text": "hello"})).status_code == 200


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_pause_has_workers_stand_still_and_ends_no_request(cluster, wait_until, mode) -> None:
    gate = hold(cluster)
    first = asyncio.ensure_future(cluster.http.post(GENERATE, json={"text": "hello"}))
    await running(cluster, wait_until)
    assert (await cluster.http.post("/pause_generation", json={"mode": mode})).json()["aborted"] == 0
    assert [worker.paused for worker in cluster.workers] == [mode]
    second = asyncio.ensure_future(cluster.http.post(GENERATE, json={"text": "hello"}))
    await wait_until(lambda: cluster.router.status().running >= 1)
    assert len(cluster.calls()) == 1
    await cluster.http.post("/continue_generation", json={})
    assert [worker.paused for worker in cluster.workers] == [None]
    gate.set()
    assert [(await answer).json()["text"] for answer in (first, second)] == ["hello", "hello"]


async def test_operators_pause_resume_and_abort_over_grpc(cluster, wait_until) -> None:
    gate = hold(cluster)
    for asked in ({}, {"request_id": "mine", "tenant": "alice"}):
        headers = {"x-tenant": "alice"} if asked else {}
        answer = asyncio.ensure_future(cluster.http.post(GENERATE, json=BODIES[GENERATE], headers=headers))
        await wait_until(lambda: any(call.outcome == "running" and call.sent_tokens == 3 for call in cluster.calls()))
        await asyncio.sleep(0.05)
        if asked:
            for nobody in ({"request_id": "mine"}, {"request_id": "other", "tenant": "alice"}):
                assert (await cluster.stub.AbortRequests(router_pb2.AbortRequestsRequest(**nobody))).aborted == 0
        assert (await cluster.stub.AbortRequests(router_pb2.AbortRequestsRequest(**asked))).aborted == 1
        assert (await answer).json()["meta_info"]["finish_reason"]["type"] == "abort"
    for mode, how in (("ABORT", None), ("IN_PLACE", "in_place"), ("RETRACT", "retract")):
        request = router_pb2.PauseRequestsRequest(mode=f"PAUSE_MODE_{mode}")
        assert (await cluster.stub.PauseRequests(request)).aborted == 0
        assert [worker.paused for worker in cluster.workers] == [how]
        await cluster.stub.ResumeRequests(router_pb2.ResumeRequestsRequest())
        assert [worker.paused for worker in cluster.workers] == [None]
    gate.set()
    assert (await cluster.http.post(GENERATE, json={"text": "hello"})).json()["text"] == "hello"
    for wrong, field in (
        (cluster.stub.PauseRequests(router_pb2.PauseRequestsRequest(mode=9)), "mode"),
        (cluster.stub.AbortRequests(router_pb2.AbortRequestsRequest(tenant="alice")), "request_id"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await wrong
        assert from_rpc_error(caught.value).field == field


async def test_what_waits_in_a_pause_is_aborted_and_fails(cluster, wait_until) -> None:
    await cluster.http.post("/pause_generation", json={})
    asked = asyncio.ensure_future(cluster.http.post(GENERATE, json={"text": "hello", "rid": "mine"}))
    await wait_until(lambda: cluster.router.status().running >= 0 and not asked.done())
    async with asyncio.timeout(60):
        while (await cluster.http.post("/abort_request", json={"rid": "mine"})).json()["aborted"] == 0:
            await asyncio.sleep(0.01)
    assert (await asked).status_code == 499
    await cluster.http.post("/continue_generation", json={})
    assert (await cluster.http.post(GENERATE, json={"text": "hello"})).json()["text"] == "hello"
    assert len(cluster.calls()) == 1


async def test_what_concerns_others_is_for_operators_where_there_are_any(make_cluster, wait_until) -> None:
    async with make_cluster(workers=1, admin_port=0) as cluster:
        for path in ("/pause_generation", "/continue_generation", "/flush_cache"):
            assert (await cluster.http.post(path, json={})).status_code == 404
        assert (await cluster.http.get("/get_load")).status_code == 404
        answer = await cluster.http.post("/abort_request", json={"abort_all": True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (403, "abort_all")
        assert "internal_states" not in (await cluster.http.get("/server_info")).json()
        hold(cluster)
        asked = asyncio.ensure_future(cluster.http.post(GENERATE, json=BODIES[GENERATE]))
        await running(cluster, wait_until)
        assert (await cluster.http.post("/abort_request", json={"rid": "mine"})).json()["aborted"] == 1
        await asked


async def test_all_requests_are_aborted(cluster, wait_until) -> None:
    hold(cluster)
    asked = [asyncio.ensure_future(cluster.http.post(GENERATE, json={"text": "hello"})) for _ in range(3)]
    await running(cluster, wait_until, 3)
    assert (await cluster.http.post("/abort_request", json={"abort_all": True})).json()["aborted"] == 3
    for answer in await asyncio.gather(*asked):
        assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
    answer = await cluster.http.post("/abort_request", json={})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "rid")


async def test_health_is_shown_by_a_token(cluster) -> None:
    assert (await cluster.http.get("/health_generate")).status_code == 200
    (call,) = cluster.calls()
    assert (list(call.request.token_ids), call.request.sampling.max_tokens) == ([0], 1)
    for worker in cluster.workers:
        worker.script.fail_after, worker.script.error = 0, UnavailableError("broken")
    assert (await cluster.http.get("/health_generate")).status_code == 503
    assert (await cluster.http.get("/health")).status_code == 200


async def test_the_server_is_described(cluster) -> None:
    for path in ("/server_info", "/get_server_info"):
        told = (await cluster.http.get(path)).json()
        assert (told["model_path"], told["context_length"], told["status"]) == ("fake", 100_000, "ready")
        (state,) = told["internal_states"]
        assert (state["state"], told["max_total_num_tokens"]) == ("up", 40_000)
    (load,) = (await cluster.http.get("/get_load")).json()
    assert load == {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
    assert (await cluster.http.get("/load")).json() == {"server_load": 0}


async def test_pooling_tells_vectors_or_labels(cluster) -> None:
    embedded = (await cluster.http.post("/v1/embeddings", json={"input": ["ab", "abc"]})).json()
    pooled = (await cluster.http.post("/pooling", json={"input": ["ab", "abc"]})).json()
    assert [each["data"] for each in pooled["data"]] == [each["embedding"] for each in embedded["data"]]
    assert {each["object"] for each in pooled["data"]} == {"pooling"}
    assert (pooled["object"], pooled["usage"]) == ("list", embedded["usage"])
    coded = (await cluster.http.post("/pooling", json={"input": "ab", "encoding_format": "base64"})).json()
    assert isinstance(coded["data"][0]["data"], str)
    chat = await cluster.http.post("/pooling", json={"messages": HI})
    assert chat.status_code == 200
    (worker,) = cluster.workers
    worker.labels = ["yes", "no"]
    await worker.kill()
    await worker.start()
    await cluster.ready()
    labelled = (await cluster.http.post("/pooling", json={"input": "ab"})).json()["data"][0]["data"]
    classified = (await cluster.http.post("/classify", json={"input": "ab"})).json()["data"][0]["probs"]
    assert labelled == classified
    assert len(labelled) == 2


async def test_texts_are_embedded_as_bare_lists(cluster) -> None:
    embedded = (await cluster.http.post("/v1/embeddings", json={"input": ["ab", "abc"], "normalize": True})).json()
    answer = await cluster.http.post("/embed", json={"inputs": ["ab", "abc"], "truncate": True})
    assert answer.json() == [each["embedding"] for each in embedded["data"]]
    assert (await cluster.http.post("/embed", json={"inputs": "ab"})).json() == answer.json()[:1]
    assert cluster.workers[0].embed_calls[-1].request.normalize
    await cluster.http.post("/embed", json={"inputs": "ab", "normalize": False})
    assert not cluster.workers[0].embed_calls[-1].request.normalize
    for wrong, param in (({}, "inputs"), ({"inputs": ["a", ""]}, "inputs[1]"), ({"inputs": 5}, "inputs")):
        answer = await cluster.http.post("/embed", json=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_texts_are_ranked_as_a_bare_list(cluster) -> None:
    usual = await cluster.http.post("/rerank", json={"query": "ab", "documents": ["xyz", "ab"]})
    answer = await cluster.http.post("/rerank", json={"query": "ab", "texts": ["xyz", "ab"]})
    assert answer.status_code == 200, answer.text
    assert [(each["index"], each["score"]) for each in answer.json()] == [
        (each["index"], each["relevance_score"]) for each in usual.json()["results"]
    ]
    assert all(each.keys() == {"index", "score"} for each in answer.json())
    body = {"query": "ab", "texts": ["xyz", "ab"], "return_text": True, "raw_scores": True, "truncate": True}
    told = (await cluster.http.post("/rerank", json=body)).json()
    assert {each["text"] for each in told} == {"xyz", "ab"}
    for wrong, param in (
        ({"texts": []}, "texts"),
        ({"texts": ["a", ""]}, "texts[1]"),
        ({"texts": ["a"], "documents": ["a"]}, "texts"),
        ({"texts": ["a"] * 2049}, "texts"),
    ):
        answer = await cluster.http.post("/rerank", json={"query": "q", **wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
