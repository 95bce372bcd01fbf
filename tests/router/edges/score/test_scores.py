"""Scores and rankings are cosines of embeddings; the fake's are a text's number of tokens, its first and its last token."""

from __future__ import annotations

import math

import pytest

from sapwood_testing.router.fake_tokenizer import encode

SCORE, RERANK = "/v1/score", "/v1/rerank"


def cosine(one: str, other: str) -> float:
    a, b = ([len(ids), ids[0], ids[-1]] for ids in (encode(one), encode(other)))
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


async def test_one_text_is_compared_with_many_or_many_pair_by_pair(cluster) -> None:
    for path in (SCORE, "/score"):
        for ones, others in (("ab", ["c", "defg"]), (["ab"], "c"), (["ab", "x"], ["c", "defg"])):
            body = {"model": "fake", "text_1": ones, "text_2": others}
            answer = (await cluster.http.post(path, json=body)).json()
            first, second = ([text] if isinstance(text, str) else text for text in (ones, others))
            first = first * len(second) if len(first) == 1 else first
            expected = [cosine(one, other) for one, other in zip(first, second, strict=True)]
            assert [item["score"] for item in answer["data"]] == pytest.approx(expected)
            assert [item["index"] for item in answer["data"]] == list(range(len(expected)))
            tokens = sum(len(encode(text)) for text in {*first, *second})
            assert (answer["object"], answer["model"]) == ("list", "fake")
            assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


async def test_documents_are_ordered_by_how_like_the_query_they_are(cluster) -> None:
    documents = ["zzzzzzzzzzzzzzz", "b", {"text": "ccccccc"}]
    scores = [cosine("a", text) for text in ("zzzzzzzzzzzzzzz", "b", "ccccccc")]
    order = sorted(range(3), key=lambda index: -scores[index])
    for path in (RERANK, "/rerank", "/v2/rerank"):
        answer = (await cluster.http.post(path, json={"query": "a", "documents": documents})).json()
        assert [item["index"] for item in answer["results"]] == order
        assert [item["relevance_score"] for item in answer["results"]] == pytest.approx([scores[i] for i in order])
        assert answer["results"][0]["document"] == {"text": "b"}
    body = {"query": "a", "documents": documents, "top_n": 1, "return_documents": False}
    (only,) = (await cluster.http.post(RERANK, json=body)).json()["results"]
    assert (only["index"], "document" in only) == (1, False)


async def test_a_large_ranking_is_whole(cluster) -> None:
    documents = ["x" * (1 + number % 7) for number in range(500)]
    answer = (await cluster.http.post(RERANK, json={"query": "xxx", "documents": documents})).json()
    assert sorted(item["index"] for item in answer["results"]) == list(range(500))
    assert answer["results"][0]["document"] == {"text": "xxx"}


WRONG = [
    (SCORE, {}, "text_1"),
    (SCORE, {"text_1": "a"}, "text_2"),
    (SCORE, {"text_1": "a", "text_2": []}, "text_2"),
    (SCORE, {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    (SCORE, {"text_1": "a", "text_2": [1]}, "text_2[0]"),
    (SCORE, {"text_1": "a", "text_2": ["b"] * 2048}, "text_2[2047]"),
    (SCORE, {"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
    (SCORE, {"text_1": ["b"] * 2049, "text_2": ["b"]}, "text_1"),
    (SCORE, {"text_1": "a", "text_2": "b", "softmax": True}, "softmax"),
    (RERANK, {"query": "a"}, "documents"),
    (RERANK, {"query": "", "documents": ["a"]}, "query"),
    (RERANK, {"query": "a", "documents": []}, "documents"),
    (RERANK, {"query": "a", "documents": [{"txt": "b"}]}, "documents[0].text"),
    (RERANK, {"query": "a", "documents": ["b"] * 2049}, "documents"),
    (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    (RERANK, {"query": "a", "documents": ["b"], "max_chunks": 1}, "max_chunks"),
]


async def test_a_wrong_parameter_is_named(strict) -> None:
    for path, body, param in WRONG:
        answer = await strict.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_a_model_without_embeddings_makes_no_scores(make_cluster) -> None:
    async with make_cluster(1) as cluster:
        cluster.workers[0].embedding_size = 0
        await cluster.workers[0].kill()
        await cluster.workers[0].start()
        await cluster.ready()
        answer = await cluster.http.post(SCORE, json={"text_1": "a", "text_2": "b"})
        assert answer.status_code == 400, answer.text
