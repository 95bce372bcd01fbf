"""Labels and cross-encoders over both edges. The fake's logits are a sequence's number of tokens, its first and its last."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc
import pytest

from sapwood.v1 import router_pb2, worker_pb2
from sapwood_common.status import from_rpc_error
from sapwood_router.request.embed_request import Labels
from sapwood_testing.router.fake_tokenizer import BOS, EOS, encode

CLASSIFY, SCORE, RERANK = "/v1/classify", "/v1/score", "/v1/rerank"


async def serve(cluster: Any, labels: list[str], activation: int) -> None:
    for worker in cluster.workers:
        worker.embedding_size, worker.labels, worker.activation = 0, labels, activation
        await worker.kill()
        await worker.start()
    epochs = {fake.epoch for fake in cluster.workers}
    while {worker.model and worker.model.epoch for worker in cluster.router.registry.all()} != epochs:
        await asyncio.sleep(0.005)
    await cluster.ready()


def joined(first: str, second: str) -> list[int]:
    return [BOS, *encode(first)[1:], EOS, *encode(second)[1:], EOS]


async def test_texts_and_tokens_get_labels(make_cluster) -> None:
    async with make_cluster(1) as cluster:
        await serve(cluster, ["low", "high"], worker_pb2.ACTIVATION_SIGMOID)
        for path in (CLASSIFY, "/classify"):
            body = {"model": "fake", "input": ["abc", "x"], "use_activation": False}
            answer = (await cluster.http.post(path, json=body)).json()
            logits = [[float(len(encode(text))), float(BOS)] for text in ("abc", "x")]
            assert [item["probs"] for item in answer["data"]] == logits
            assert [(item["index"], item["label"], item["num_classes"]) for item in answer["data"]] == [
                (0, "low", 2),
                (1, "low", 2),
            ]
            assert answer["usage"]["prompt_tokens"] == len(encode("abc")) + len(encode("x"))
        answer = (await cluster.http.post(CLASSIFY, json={"input": [9, 2]})).json()
        assert answer["data"][0]["probs"] == pytest.approx([1 / (1 + math.exp(-2)), 1 / (1 + math.exp(-9))])
        assert answer["data"][0]["label"] == "high"
        (call,) = [call.request for call in cluster.workers[0].embed_calls[-1:]]
        assert (call.pooling, call.HasField("normalize"), call.dimensions) == (worker_pb2.POOLING_LABELS, False, 0)


async def test_a_model_with_one_label_scores_pairs(make_cluster) -> None:
    async with make_cluster(1) as cluster:
        await serve(cluster, ["fits"], worker_pb2.ACTIVATION_SIGMOID)
        body = {"text_1": "ab", "text_2": ["c", "defg"], "activation": False}
        answer = (await cluster.http.post(SCORE, json=body)).json()
        sequences = [joined("ab", "c"), joined("ab", "defg")]
        assert [item["score"] for item in answer["data"]] == [len(sequence) for sequence in sequences]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, sequences))
        (call,) = cluster.workers[0].embed_calls
        assert [list(item.ids) for item in call.request.inputs] == sequences
        body = {"text_1": ["ab", "x"], "text_2": ["c", "defg"]}
        answer = (await cluster.http.post(SCORE, json=body)).json()
        lengths = [len(joined("ab", "c")), len(joined("x", "defg"))]
        expected = [1 / (1 + math.exp(-length)) for length in lengths]
        assert [item["score"] for item in answer["data"]] == pytest.approx(expected)
        body = {"query": "q", "documents": ["a", {"text": "abcd"}, "ab"], "top_n": 2}
        answer = (await cluster.http.post(RERANK, json=body)).json()
        assert [item["index"] for item in answer["results"]] == [1, 2]
        assert answer["results"][0]["document"] == {"text": "abcd"}


async def test_over_grpc_texts_tokens_and_pairs_are_one_request(make_cluster) -> None:
    async with make_cluster(1) as cluster:
        await serve(cluster, ["low", "high"], worker_pb2.ACTIVATION_SOFTMAX)
        inputs = [{"text": "abc"}, {"tokens": {"ids": [7, 8]}}, {"pair": {"first": "a", "second": "b"}}]
        answer = await cluster.stub.Classify(router_pb2.ClassifyRequest(input=inputs, raw=True))
        found = [list(item.scores) for item in answer.classifications]
        assert found == [[len(encode("abc")), BOS], [2, 7], [len(joined("a", "b")), BOS]]
        assert (list(answer.labels), answer.model) == (["low", "high"], "fake")
        assert answer.prompt_tokens == sum(int(each[0]) for each in found)
        answer = await cluster.stub.Classify(router_pb2.ClassifyRequest(input=inputs[1:2]))
        assert list(answer.classifications[0].scores) == pytest.approx(
            [1 / (1 + math.exp(5)), math.exp(5) / (1 + math.exp(5))]
        )
        for wrong, field in (
            ({"input": [{}]}, "input[0]"),
            ({"input": [{"pair": {"first": "a"}}]}, "input[0].pair.second"),
            ({"input": [{"text": "a"}, {"text": ""}]}, "input[1].text"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.stub.Classify(router_pb2.ClassifyRequest(**wrong))
            assert from_rpc_error(caught.value).field == field


WRONG = [
    (["a", "b"], CLASSIFY, {}, "input"),
    (["a", "b"], CLASSIFY, {"input": ""}, "input"),
    (["a", "b"], CLASSIFY, {"input": "a", "pooling": "mean"}, "pooling"),
    (["a", "b"], SCORE, {"text_1": "a", "text_2": "b"}, "model"),
    (["a"], SCORE, {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
    (["a"], RERANK, {"query": "", "documents": ["b"]}, "query"),
    (["a"], SCORE, {"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
    (["a"], "/v1/embeddings", {"input": "a"}, "model"),
    ([], CLASSIFY, {"input": "a"}, "model"),
    ([], SCORE, {"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation"),
]


async def test_what_the_model_cannot_do_is_refused_and_the_parameter_named(make_cluster) -> None:
    async with make_cluster(1, strict_parameters=True) as cluster:
        served: list[str] | None = None
        for labels, path, body, param in WRONG:
            if labels != served:
                await serve(cluster, labels, worker_pb2.ACTIVATION_UNSPECIFIED)
                served = labels
            answer = await cluster.http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_a_tokenizer_that_joins_no_pairs_is_told(make_cluster) -> None:
    async with make_cluster(1) as cluster:
        cluster.tokenizer.joins_pairs = False
        cluster.ask_tokenizer_again()
        await serve(cluster, ["fits"], worker_pb2.ACTIVATION_UNSPECIFIED)
        answer = await cluster.http.post(SCORE, json={"text_1": "a", "text_2": "b"})
        assert (answer.status_code, "two texts" in answer.text) == (400, True)


@pytest.mark.parametrize(
    ("activation", "logits", "expected"),
    [
        ("none", [-3.0, 4.0], [-3.0, 4.0]),
        ("sigmoid", [0.0, 1000.0, -1000.0], [0.5, 1.0, 0.0]),
        ("softmax", [1000.0, 1000.0], [0.5, 0.5]),
        ("softmax", [0.0, -1000.0], [1.0, 0.0]),
    ],
)
def test_scores_stay_finite_whatever_the_logits(activation: Any, logits: list[float], expected: list[float]) -> None:
    assert Labels(tuple(map(str, logits)), activation).scores(logits) == pytest.approx(expected)
