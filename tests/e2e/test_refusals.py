"""Each wrong request gets its status with the field named, over gRPC and HTTP, and the service continues."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from sapwood.client import Client, InvalidArgumentError, NotFoundError, SapwoodError
from sapwood.errors import from_rpc_error
from sapwood.v1 import router_pb2


@pytest.fixture
def client(cluster: Any) -> Iterator[Client]:
    """Checks after the test that the service still answers."""
    with Client(cluster.grpc, timeout=60) as client:
        yield client
        generated = client.generate("The capital of France is", max_tokens=4, temperature=0).text()
        assert generated == " the capital of the"


@pytest.fixture
def post(cluster: Any, client: Client) -> Any:
    """Posts to the OpenAI API; checks after the test that the service still answers."""
    return lambda path, **body: httpx.post(f"http://{cluster.http}/v1/{path}", timeout=60, **body)


def _context_length(client: Client) -> int:
    (model,) = client.list_models()
    return model.context_length


@pytest.mark.parametrize(
    ("prompt", "options", "kind", "field"),
    [
        ({"text": ""}, {}, InvalidArgumentError, "text"),
        ({"messages": []}, {}, InvalidArgumentError, "messages"),
        ({"token_ids": []}, {}, InvalidArgumentError, "tokens"),
        ({"token_ids": [4_000_000]}, {}, InvalidArgumentError, "tokens"),
        ({"text": "x"}, {"temperature": -1.0}, InvalidArgumentError, "sampling.temperature"),
        ({"text": "x"}, {"temperature": float("nan")}, InvalidArgumentError, "sampling.temperature"),
        ({"text": "x"}, {"top_p": 0.0}, InvalidArgumentError, "sampling.top_p"),
        ({"text": "x"}, {"max_tokens": 0}, InvalidArgumentError, "sampling.max_tokens"),
        ({"text": "x"}, {"stop": [""]}, InvalidArgumentError, "stop"),
        ({"text": "x"}, {"model": "unknown"}, NotFoundError, "model"),
    ],
    ids=lambda value: str(value)[:40] if not isinstance(value, type) else value.__name__,
)
def test_grpc_names_the_field(client: Client, prompt: Any, options: Any, kind: type[SapwoodError], field: str) -> None:
    with pytest.raises(kind) as caught:
        client.generate(**prompt, **options).text()
    assert caught.value.field is not None
    assert caught.value.field.startswith(field)


def test_grpc_refuses_a_prompt_over_the_context(client: Client) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        client.generate(token_ids=[5] * (_context_length(client) + 1)).text()
    assert caught.value.field is not None
    assert caught.value.field.startswith("tokens")
    with pytest.raises(InvalidArgumentError) as caught:
        client.generate("word " * (_context_length(client) + 1)).text()
    assert caught.value.field == "text"


def test_grpc_refuses_text_that_is_not_utf8(cluster: Any, client: Client) -> None:
    with grpc.insecure_channel(cluster.grpc) as channel:
        generate = channel.unary_stream(
            "/sapwood.v1.Router/Generate", response_deserializer=router_pb2.RouterGenerateResponse.FromString
        )
        call = generate(b"\x1a\x04ab\xff\xfe")  # field 3, text: four bytes that are no UTF-8
        with pytest.raises(grpc.RpcError):
            next(call)
        error = from_rpc_error(call)
    assert isinstance(error, InvalidArgumentError)
    assert error.field == "text"


def test_grpc_refuses_bytes_that_are_no_message(cluster: Any, client: Client) -> None:
    with grpc.insecure_channel(cluster.grpc) as channel:
        call = channel.unary_stream("/sapwood.v1.Router/Generate")(b"\xff\xff\xff")
        with pytest.raises(grpc.RpcError):
            next(call)
        assert isinstance(from_rpc_error(call), InvalidArgumentError)


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("completions", {"prompt": ""}, 400, "prompt"),
        ("completions", {}, 400, "prompt"),
        ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "x", "temperature": "hot"}, 400, "temperature"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ("completions", {"prompt": "x", "model": "unknown"}, 404, "model"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_p": 7}, 400, "top_p"),
    ],
    ids=str,
)
def test_http_names_the_field(post: Any, path: str, body: dict[str, Any], status: int, field: str) -> None:
    answer = post(path, json={"model": "demo", **body})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert error["param"].startswith(field)


def test_http_refuses_a_prompt_over_the_context(post: Any, client: Client) -> None:
    answer = post("completions", json={"model": "demo", "prompt": "word " * (_context_length(client) + 1)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    "content",
    [b'{"model": "demo", "prompt": ', b"[]", b"", b'{"model": "demo", "prompt": "ab\xff\xfe"}'],
    ids=["cut off", "no object", "empty", "not utf-8"],
)
def test_http_refuses_a_malformed_body(post: Any, content: bytes) -> None:
    answer = post("completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_http_does_not_know_other_paths(post: Any) -> None:
    assert post("nothing", json={}).status_code == 404
