"""The OpenAPI document is one, its schemas take what the APIs take, and the page shows all of it."""

from __future__ import annotations

import re

import httpx
import jsonschema
import pytest
from openapi_spec_validator import validate

HI = [{"role": "user", "content": "hi"}]
GOOD = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 3, "temperature": 0, "top_k": -1, "stop": ["x"], "seed": -1}),
    ("/v1/chat/completions", {"messages": HI, "temperature": None, "tools": None, "logit_bias": {"5": 1}}),
    ("/v1/embeddings", {"input": ["a", "b"]}),
    ("/v1/responses", {"input": [{"role": "user", "content": "hi"}], "text": {"format": {"type": "text"}}}),
    ("/v1/messages", {"max_tokens": 5, "messages": HI, "system": [{"type": "text", "text": "x"}]}),
    ("/v1/messages/count_tokens", {"messages": HI}),
    ("/v1/score", {"text_1": "a", "text_2": ["b"]}),
    ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c"}]}),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}}),
    ("/tokenize", {"prompt": "a"}),
    ("/tokenize", {"messages": HI}),
    ("/detokenize", {"tokens": [5]}),
]
BAD = [
    ("/v1/completions", {"prompt": "a", "temperature": -1}),
    ("/v1/chat/completions", {"messages": [{"content": "hi"}]}),
    ("/v1/messages", {"messages": HI}),
    ("/v1/responses", {"input": 5}),
    ("/tokenize", {}),
]


@pytest.fixture
async def document(cluster) -> dict:
    answer = await cluster.http.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    found: dict = answer.json()
    return found


def schema_of(document: dict, path: str, part: str) -> dict:
    operation = document["paths"][path]["post"]
    holder = operation["requestBody"] if part == "request" else operation["responses"][part]
    return {**holder["content"]["application/json"]["schema"], "components": document["components"]}


async def test_the_document_is_valid_and_has_all_paths(cluster, document) -> None:
    validate(document)
    for path, methods in document["paths"].items():
        for method in methods:
            answer = await cluster.http.request(method, path.replace("{name}", "fake"), json={})
            assert answer.status_code != 405, path
            assert answer.status_code != 404 or "there is no /" not in answer.text, path


async def test_requests_and_answers_are_as_the_document_says(cluster, document) -> None:
    for path, body in GOOD:
        jsonschema.validate(body, schema_of(document, path, "request"))
        answer: httpx.Response = await cluster.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        jsonschema.validate(answer.json(), schema_of(document, path, "200"))
    for path, body in BAD:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(body, schema_of(document, path, "request"))
        answer = await cluster.http.post(path, json=body)
        assert answer.status_code == 400
        jsonschema.validate(answer.json(), schema_of(document, path, "default"))


async def test_the_page_shows_each_operation_and_needs_nothing_from_elsewhere(cluster, document) -> None:
    answer = await cluster.http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for path in document["paths"]:
        assert f"<code>{path}</code>" in answer.text
    for field in ("temperature", "max_output_tokens", "stop_sequences", "return_documents"):
        assert f"<code>{field}</code>" in answer.text
    assert not re.search(r"<script|https?://", answer.text)
    opened, closed = (answer.text.count(tag) for tag in ("<details>", "</details>"))
    assert opened == closed > len(document["paths"])
