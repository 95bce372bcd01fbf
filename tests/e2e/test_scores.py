"""Scores and rankings of the demo model are the cosines of its embeddings."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.slow
TEXTS = ["A cat sits on the mat.", "def f(x): return x ** 2", "A kitten lies on the rug."]


def test_scores_are_the_cosines_of_the_embeddings_and_order_the_documents(cluster: Any) -> None:
    client = openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", max_retries=0, timeout=120)
    vectors = [item.embedding for item in client.embeddings.create(model="demo", input=TEXTS).data]
    query, *documents = TEXTS
    expected = [sum(x * y for x, y in zip(vectors[0], vector, strict=True)) for vector in vectors[1:]]
    asked = {"model": "demo", "text_1": query, "text_2": documents}
    scored = httpx.post(f"http://{cluster.http}/v1/score", json=asked, timeout=120).json()
    assert [item["score"] for item in scored["data"]] == pytest.approx(expected, abs=1e-3)
    asked = {"model": "demo", "query": query, "documents": documents}
    ranked = httpx.post(f"http://{cluster.http}/v1/rerank", json=asked, timeout=120).json()
    assert [item["index"] for item in ranked["results"]] == [1, 0]
