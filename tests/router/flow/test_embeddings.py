"""Embeddings over both edges."""

import asyncio

import grpc
import openai
import pytest

from sapwood.v1 import common_pb2, router_pb2, worker_pb2
from sapwood_common.errors import UnavailableError
from sapwood_common.models.prompts import Prompts
from sapwood_testing.router.fake_tokenizer import encode

PATH = "/v1/embeddings"
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def vector(ids: list[int]) -> list[float]:
    return [len(ids), ids[0], ids[-1]]


async def test_the_official_client_gets_its_vectors(cluster) -> None:
    answer = await cluster.openai.embeddings.create(model="fake", input=["hello", "é"])  # asks for base64
    assert [(item.index, item.embedding) for item in answer.data] == [
        (0, vector(encode("hello"))),
        (1, vector(encode("é"))),
    ]
    assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == ("fake", 9, 9)
    plain = await cluster.openai.embeddings.create(model="fake", input="hello", encoding_format="float", dimensions=3)
    assert plain.data[0].embedding == vector(encode("hello"))
    for given, expected in (([5, 6, 7], [[3, 5, 7]]), ([[5, 6], [9]], [[2, 5, 6], [1, 9, 9]])):
        tokens = await cluster.openai.embeddings.create(model="fake", input=given)
        assert [item.embedding for item in tokens.data] == expected


async def test_extensions_reach_the_worker(cluster) -> None:
    response = await cluster.http.post(PATH, json={"input": "a", "pooling": "cls", "normalize": False, "user": "me"})
    assert response.status_code == 200
    (call,) = [call.request for worker in cluster.workers for call in worker.embed_calls]
    assert (call.pooling, call.normalize, call.HasField("normalize")) == (worker_pb2.POOLING_CLS, False, True)
    assert call.request_id == response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("given", "before"),
    [({}, "d: "), ({"prompt_name": "query"}, "q: "), ({"prompt_name": ""}, ""), ({"prompt_name": None}, "d: ")],
)
async def test_the_prompt_that_the_models_files_name_goes_before_each_text(cluster, given, before) -> None:
    cluster.tokenizer.prompts = Prompts({"query": "q: ", "document": "d: "}, "document")
    cluster.ask_tokenizer_again()
    wanted = [vector(encode(before + text)) for text in ("a", "bc")]
    answer = await cluster.http.post(PATH, json={"input": ["a", "bc"], **given})
    assert [item["embedding"] for item in answer.json()["data"]] == wanted
    assert (await cluster.http.post("/embed", json={"inputs": ["a", "bc"], **given})).json() == wanted
    found = await cluster.stub.Embed(
        router_pb2.RouterEmbedRequest(input=[router_pb2.EmbedInput(text=text) for text in ("a", "bc")], **given)
    )
    assert [list(each.values) for each in found.embeddings] == wanted
    tokens = await cluster.http.post(PATH, json={"input": [5, 6], **given})
    assert tokens.json()["data"][0]["embedding"] == [2, 5, 6]
    refused = await cluster.http.post(PATH, json={"input": "a", "prompt_name": "other"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_name")


WRONG = [
    ({}, "input"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": ""}, "input"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": ["a", 5]}, "input[1]"),
    ({"input": [[5], []]}, "input[1]"),
    ({"input": [[-1]]}, "input[0]"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": "x" * 200_000}, "input"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ({"input": "a", "dimensions": 2}, "dimensions"),
    ({"input": "a", "pooling": "max"}, "pooling"),
    ({"input": "a", "normalize": "no"}, "normalize"),
    ({"input": "a", "stream": True}, "stream"),
]


async def test_what_is_wrong_is_named(strict) -> None:
    for body, param in WRONG:
        response = await strict.http.post(PATH, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), body
    assert (await strict.http.post(PATH, json={"input": "a", "model": "no"})).status_code == 404
    assert not any(worker.embed_calls for worker in strict.workers)


async def test_a_worker_that_cannot_is_followed_by_another(cluster) -> None:
    cluster.workers[0].script.error = UnavailableError("not now")
    for _ in range(4):
        assert (await cluster.http.post(PATH, json={"input": "a"})).status_code == 200
    cluster.workers[1].script.error = UnavailableError("nor here")
    response = await cluster.http.post(PATH, json={"input": "a"})
    assert response.status_code == 503
    assert "retry-after" in response.headers
    assert all((worker.in_flight, worker.embedding) == (0, 0) for worker in cluster.router.registry.all())


async def restart_workers(cluster, wait_until, **attributes: int) -> None:
    for worker in cluster.workers:
        await worker.kill()
        vars(worker).update(attributes)
    await wait_until(lambda: not cluster.router.registry.any_available())
    for worker in cluster.workers:
        await worker.start()
    await cluster.ready()


async def test_a_worker_that_cuts_long_inputs_is_given_them_whole(cluster, wait_until) -> None:
    await restart_workers(cluster, wait_until, embedded_tokens=256)
    answer = await cluster.openai.embeddings.create(model="fake", input="x" * 200_000, encoding_format="float")
    assert answer.data[0].embedding == vector(encode("x" * 200_000))


async def test_a_model_that_makes_none_says_so(cluster, wait_until) -> None:
    await restart_workers(cluster, wait_until, embedding_size=0)
    with pytest.raises(openai.BadRequestError) as caught:
        await cluster.openai.embeddings.create(model="fake", input="a")
    assert caught.value.param == "model"


async def test_grpc_gives_embeddings_and_names_the_wrong_input(cluster, expect_error) -> None:
    item = router_pb2.EmbedInput
    inputs = [item(text="ab"), item(tokens=common_pb2.TokenIds(ids=[7, 8]))]
    answer = await cluster.stub.Embed(router_pb2.RouterEmbedRequest(input=inputs, pooling=worker_pb2.POOLING_MEAN))
    assert [list(found.values) for found in answer.embeddings] == [vector(encode("ab")), [2, 7, 8]]
    assert (answer.prompt_tokens, answer.model) == (len(encode("ab")) + 2, "fake")
    for wrong, field in (
        ([], "input"),
        ([item()], "input[0]"),
        ([item(text="a"), item(text="")], "input[1].text"),
        ([item(tokens=common_pb2.TokenIds())], "input[0].tokens"),
    ):
        call = cluster.stub.Embed(router_pb2.RouterEmbedRequest(input=wrong))
        assert (await expect_error(call, INVALID))[1] == field


async def test_embeddings_wait_for_room_and_are_refused_when_the_queue_is_full(make_cluster, wait_until) -> None:
    async with make_cluster(1, requests_per_worker=1, queue_size=1) as cluster:
        cluster.workers[0].script.gate = asyncio.Event()
        running = asyncio.ensure_future(cluster.generate("abc"))
        await wait_until(lambda: len(cluster.calls()) == 1)
        waiting = asyncio.ensure_future(cluster.http.post(PATH, json={"input": "a"}))
        await wait_until(lambda: cluster.router.status().queued == 1)
        refused = await cluster.http.post(PATH, json={"input": "b"})
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        assert not cluster.workers[0].embed_calls
        cluster.workers[0].script.gate.set()
        await running
        assert (await waiting).status_code == 200


async def test_the_policy_chooses_for_embeddings_too_and_faults_open_the_breaker(make_cluster) -> None:
    async with make_cluster(2, policy="round_robin", breaker_failures=2, breaker_open_seconds=60) as cluster:
        for _ in range(6):
            await cluster.http.post(PATH, json={"input": "the same text"})
        assert [len(worker.embed_calls) for worker in cluster.workers] == [3, 3]
        cluster.workers[0].script.error = UnavailableError("not now")
        for _ in range(8):
            assert (await cluster.http.post(PATH, json={"input": "a"})).status_code == 200
        assert len(cluster.workers[0].embed_calls) == 5
        states = {worker.address: worker.breaker.state.value for worker in cluster.router.registry.all()}
        assert [states[worker.address] for worker in cluster.workers] == ["open", "closed"]


@pytest.mark.parametrize("lose", ["kill", "hang", "remove"])
async def test_a_worker_that_is_lost_is_followed_by_another(make_cluster, wait_until, lose) -> None:
    async with make_cluster(worker_silence=1 if lose == "hang" else 30) as cluster:
        for worker in cluster.workers:
            worker.script.gate = asyncio.Event()
        asked = asyncio.ensure_future(cluster.http.post("/v1/embeddings", json={"input": "abc"}))
        await wait_until(lambda: any(worker.embed_calls for worker in cluster.workers))
        lost = next(worker for worker in cluster.workers if worker.embed_calls)
        for worker in cluster.workers:
            if worker is not lost:
                worker.script.gate.set()
        if lose == "kill":
            await lost.kill()
        elif lose == "hang":
            lost.silent = True
        else:
            await cluster.stub.RemoveWorker(router_pb2.RemoveWorkerRequest(address=lost.address))
        answer = await asked
        assert (answer.status_code, len(answer.json()["data"])) == (200, 1)


async def test_all_that_a_lost_worker_had_are_answered_without_retries(make_cluster, wait_until) -> None:
    """What one loss takes may be more than the retry budget grants."""
    async with make_cluster() as cluster:
        gate = asyncio.Event()
        for worker in cluster.workers:
            worker.script.gate = gate
        asked = [asyncio.ensure_future(cluster.http.post(PATH, json={"input": f"{i}"})) for i in range(60)]
        await wait_until(lambda: sum(len(worker.embed_calls) for worker in cluster.workers) == 60)
        await cluster.workers[0].kill()
        gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 60
        lost, _ = cluster.router.registry.all()
        assert lost.breaker.state.value == "closed"  # one loss is one fault


async def test_with_no_other_worker_a_request_waits_for_one(make_cluster, wait_until) -> None:
    async with make_cluster(1, resume_grace=20) as cluster:
        (worker,) = cluster.workers
        worker.script.gate = asyncio.Event()
        asked = asyncio.ensure_future(cluster.http.post(PATH, json={"input": "abc"}))
        await wait_until(lambda: worker.embed_calls)
        await worker.kill()
        await wait_until(lambda: not cluster.router.registry.any_available())
        worker.script.gate.set()
        await worker.start()
        assert (await asked).status_code == 200


async def test_one_whose_only_worker_is_removed_says_how_it_was_lost(make_cluster, wait_until) -> None:
    async with make_cluster(1, resume_grace=0.3) as cluster:
        (worker,) = cluster.workers
        worker.script.gate = asyncio.Event()
        asked = asyncio.ensure_future(cluster.http.post(PATH, json={"input": "abc"}))
        await wait_until(lambda: worker.embed_calls)
        await cluster.stub.RemoveWorker(router_pb2.RemoveWorkerRequest(address=worker.address))
        answer = await asked
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
        assert cluster.id_of(worker) in answer.json()["error"]["message"]


async def test_time_and_trace_reach_the_worker_and_a_client_that_leaves_ends_it_there(make_cluster, wait_until) -> None:
    async with make_cluster(1) as cluster:
        (worker,) = cluster.workers
        worker.script.gate = asyncio.Event()
        trace = f"00-{'5b' * 16}-{'c7' * 8}-01"
        request = router_pb2.RouterEmbedRequest(input=[router_pb2.EmbedInput(text="abc")])
        call = cluster.stub.Embed(request, timeout=100, metadata=(("traceparent", trace),))
        await wait_until(lambda: worker.embed_calls)
        (seen,) = worker.embed_calls
        assert 0 < seen.time_remaining < 102  # grpcio may round a deadline up to whole seconds
        assert seen.request.traceparent[:35] == trace[:35]
        call.cancel()
        await asyncio.wait_for(seen.over.wait(), 60)
        await cluster.idle()
        assert worker.address == cluster.router.registry.all()[0].address
        assert cluster.router.registry.all()[0].breaker.state.value == "closed"


async def test_one_that_is_late_is_told_so_and_ends_at_the_worker(make_cluster, wait_until) -> None:
    async with make_cluster(1) as cluster:
        (worker,) = cluster.workers
        worker.script.gate = asyncio.Event()
        answer = await cluster.http.post(PATH, json={"input": "abc"}, headers={"x-request-timeout": "0.3"})
        assert answer.status_code == 504
        await asyncio.wait_for(worker.embed_calls[0].over.wait(), 60)
        await cluster.idle()


async def test_a_large_batch_goes_in_parts_and_a_lost_worker_costs_one_of_them(
    make_cluster, wait_until, monkeypatch
) -> None:
    monkeypatch.setattr("sapwood_router.flow.embedding.TOKENS_A_MESSAGE", 200)
    async with make_cluster(2) as cluster:
        for worker in cluster.workers:
            worker.script.gate = asyncio.Event()
        inputs = [[number] * 90 for number in range(1, 7)]
        asked = asyncio.ensure_future(cluster.http.post(PATH, json={"input": inputs}))

        def parts() -> list:
            return [(worker, call.request) for worker in cluster.workers for call in worker.embed_calls]

        await wait_until(lambda: len(parts()) == 1)
        ((holder, part),) = parts()
        assert [len(item.ids) for item in part.inputs] == [90] * 2, "the others wait"
        opened, holder.script.gate = holder.script.gate, asyncio.Event()
        opened.set()
        await wait_until(lambda: len(parts()) == 2)
        lost = next(worker for worker, call in parts() if call.inputs[0].ids[0] == 3)
        await lost.kill()
        for worker in cluster.workers:
            worker.script.gate.set()
        answer = await asked
        assert [item["embedding"] for item in answer.json()["data"]] == [vector(item) for item in inputs]
        assert answer.json()["usage"]["prompt_tokens"] == 6 * 90
        assert sorted(call.inputs[0].ids[0] for _, call in parts()) == [1, 3, 3, 5]
        await cluster.idle()


async def test_an_input_that_no_message_can_hold_is_refused(cluster, monkeypatch) -> None:
    monkeypatch.setattr("sapwood_router.flow.embedding.MOST_TOKENS", 3)
    answer = await cluster.http.post(PATH, json={"input": [[1, 2, 3], [1, 2, 3, 4]]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[1]")
    assert not any(worker.embed_calls for worker in cluster.workers)
