"""Floods by a tenant with a key: fields that each of a thousand choices carries, and calls that cost little, at volume."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from floods.flood import KEY, Flood
from floods.keyed_floods import bodies

_CHAT, _MB = b"/v1/chat/completions", 1 << 20
_PROMPTS = [f"{number}" for number in range(1024)]
_MANY = 16


def _completion(**more: Any) -> Callable[[], bytes]:
    """A completion's body."""
    return lambda: json.dumps({"model": "mock", "max_tokens": 1, "prompt": "a", **more}).encode()


def _chat(**more: Any) -> Callable[[], bytes]:
    said = {"model": "mock", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    return lambda: json.dumps({**said, **more}).encode()


def _asked(path: bytes, *headers: bytes) -> Callable[[int], Iterator[bytes]]:
    """The same request with a key again and again."""
    lines = b"".join(header + b"\r\n" for header in headers)
    request = b"GET " + path + b" HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + KEY + b"\r\n" + lines + b"\r\n"
    return lambda _: itertools.repeat(request * max(1, 64 * 1024 // len(request)))


def _chunked(end: bytes) -> Callable[[int], Iterator[bytes]]:
    """A completion's body in chunks of a byte."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + KEY
    head += b"\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    body = json.dumps({"model": "mock", "max_tokens": 1, "prompt": "a" * 20_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    return lambda _: itertools.repeat(head + chunks + b"0\r\n" + end + b"\r\n")


def _words(count: int, length: int = 8) -> list[str]:
    return [f"{number:0{length}}" for number in range(count)]


def _flood(name: str, body: Callable[[], bytes], path: bytes = b"/v1/completions", **more: Any) -> Flood:
    return Flood(name, "http", bodies(body, path), keyed=True, **more)


_DEEP: dict[str, Any] = {"type": "string"}
for _ in range(300):
    _DEEP = {"type": "object", "properties": {"a": _DEEP}}

COMBINED_FLOODS = (
    _flood("1024 prompts with 4000 stops", _completion(prompt=_PROMPTS, stop=_words(4000))),
    _flood("1024 prompts with 4000 bad words", _completion(prompt=_PROMPTS, bad_words=_words(4000))),
    _flood(
        "1024 prompts with 60 000 biases", _completion(prompt=_PROMPTS, logit_bias={str(t): 1 for t in range(60_000)})
    ),
    _flood(
        "1024 prompts with 200 000 allowed tokens", _completion(prompt=_PROMPTS, allowed_token_ids=list(range(200_000)))
    ),
    _flood("1024 prompts with 200 000 stop tokens", _completion(prompt=_PROMPTS, stop_token_ids=list(range(200_000)))),
    _flood("1024 prompts with a grammar of 500 KB", _completion(prompt=_PROMPTS, guided_regex="(ab|c)" * 80_000)),
    _flood(
        "1024 prompts of 400 tokens with log probabilities", _completion(prompt=[[7] * 400] * 1024, prompt_logprobs=20)
    ),
    _flood(
        "128 continuations of 30 KB with 60 000 biases",
        _completion(prompt="a " * 15_000, n=128, logit_bias={str(t): 1 for t in range(60_000)}),
    ),
    _flood("128 of a chat with 60 000 biases", _chat(n=128, logit_bias={str(t): 1 for t in range(60_000)}), _CHAT),
    _flood(
        "128 of a chat with a schema of 20 000 values",
        _chat(
            n=128,
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": "a",
                    "schema": {"type": "object", "properties": {"a": {"enum": _words(20_000)}}},
                },
            },
        ),
        _CHAT,
    ),
    _flood(
        "128 of a chat with 1 MB of tools",
        _chat(
            n=128,
            tools=[
                {
                    "type": "function",
                    "function": {"name": f"f{n}", "description": "a" * 1000, "parameters": {"type": "object"}},
                }
                for n in range(900)
            ],
        ),
        _CHAT,
    ),
    _flood("128 of 2000 tokens streamed", _completion(n=128, max_tokens=2000, stream=True)),
    _flood("1024 of 2000 tokens streamed", _completion(prompt=_PROMPTS, max_tokens=2000, stream=True)),
    _flood("1024 of 2000 tokens", _completion(prompt=_PROMPTS, max_tokens=2000)),
    _flood("8 prompts best of 128", _completion(prompt=_PROMPTS[:8], n=1, best_of=128)),
    _flood("30 KB echoed 128 times", _completion(prompt="a " * 15_000, n=128, echo=True)),
    _flood("60 000 stops", _completion(stop=_words(60_000))),
    _flood("60 000 bad words", _completion(bad_words=_words(60_000))),
    _flood("200 000 allowed tokens", _completion(allowed_token_ids=list(range(200_000)))),
    _flood("regular expressions of 8 MB", _completion(guided_regex="(ab|c)" * 1_300_000)),
    _flood(
        "a schema 300 deep",
        _chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": _DEEP}}),
        _CHAT,
    ),
    _flood(
        "tools 300 deep",
        _chat(
            tools=[{"type": "function", "function": {"name": "f", "parameters": _DEEP}}] * 60, tool_choice="required"
        ),
        _CHAT,
    ),
    _flood(
        "prompt twice, 30 000 times",
        lambda: b'{"model": "mock", "max_tokens": 1, %b}' % b", ".join([b'"prompt": "' + b"a" * 200 + b'"'] * 30_000),
    ),
    _flood(
        "pairs of surrogates",
        lambda: b'{"model": "mock", "max_tokens": 1, "prompt": "%b"}' % (b"\\ud83d\\ude00" * 1_000_000),
    ),
    _flood(
        "16 MB that are no UTF-8",
        lambda: b'{"model": "mock", "max_tokens": 1, "prompt": "%b"}' % (b"\xff" * 15_000_000),
    ),
    _flood("15 MB of spaces", lambda: b'{"model": "mock", "max_tokens": 1, "prompt": "a"%b}' % (b" " * 15_000_000)),
    _flood(
        "small numbers of a float",
        lambda: (
            b'{"model": "mock", "max_tokens": 1, "prompt": "a", "x": [%b]}'
            % b",".join([b"1.2345678901234567e-300"] * 250_000)
        ),
    ),
    _flood("completions", _completion(), times=_MANY),
    _flood("completions on new connections", _completion(), hang_up=0.0, times=_MANY),
    _flood("chats", _chat(), _CHAT, times=_MANY),
    _flood("streams of 2000 tokens", _completion(max_tokens=2000, stream=True), times=_MANY),
    _flood("texts to make tokens of", lambda: b'{"model": "mock", "prompt": "a"}', b"/tokenize", times=_MANY),
    _flood(
        "texts of 60 KB to make tokens of",
        lambda: b'{"model": "mock", "prompt": "%b"}' % (b"a " * 30_000),
        b"/tokenize",
        times=_MANY,
    ),
    _flood("tokens to make text of", lambda: b'{"model": "mock", "tokens": [7]}', b"/detokenize", times=_MANY),
    _flood(
        "2048 texts of 4 KB to embed",
        lambda: json.dumps({"model": "mock", "input": ["a " * 2000] * 2048}).encode(),
        b"/v1/embeddings",
    ),
    _flood(
        "2048 pairs of 4 KB to score",
        lambda: json.dumps({"model": "mock", "text_1": "a", "text_2": ["a " * 2000] * 2047}).encode(),
        b"/v1/score",
    ),
    _flood(
        "2048 documents of 4 KB",
        lambda: json.dumps({"model": "mock", "query": "a", "documents": ["a " * 2000] * 2000}).encode(),
        b"/v1/rerank",
    ),
    _flood(
        "2048 texts to classify",
        lambda: json.dumps({"model": "mock", "input": ["a " * 2000] * 2000}).encode(),
        b"/v1/classify",
    ),
    _flood(
        "1024 texts of SGLang's",
        lambda: json.dumps({"text": _PROMPTS, "sampling_params": {"max_new_tokens": 1}}).encode(),
        b"/generate",
    ),
    _flood(
        "1024 texts of SGLang's with parameters each",
        lambda: json.dumps(
            {"text": _PROMPTS, "sampling_params": [{"max_new_tokens": 1, "stop": _words(50)}] * 1024}
        ).encode(),
        b"/generate",
    ),
    _flood(
        "answers of 1 MB that are kept",
        lambda: json.dumps({"model": "mock", "max_output_tokens": 1, "input": "a " * 500_000}).encode(),
        b"/v1/responses",
    ),
    _flood(
        "answers that are kept",
        lambda: json.dumps({"model": "mock", "max_output_tokens": 1, "input": "a"}).encode(),
        b"/v1/responses",
        times=_MANY,
    ),
    _flood(
        "8 MB to count",
        lambda: json.dumps({"model": "mock", "messages": [{"role": "user", "content": "a " * 4_000_000}]}).encode(),
        b"/v1/messages/count_tokens",
    ),
    _flood(
        "routes of 1 MB to explain",
        lambda: json.dumps({"model": "mock", "prompt": "a " * 500_000}).encode(),
        b"/ui/route",
    ),
    Flood("models", "http", _asked(b"/v1/models"), keyed=True),
    Flood("queries of 50 KB", "http", _asked(b"/v1/models?" + b"a=%41&" * 8000), keyed=True),
    Flood("names of models of 50 KB", "http", _asked(b"/v1/models/" + b"%41" * 16_000), keyed=True),
    Flood(
        "a hundred cookies",
        "http",
        _asked(b"/v1/models", *(b"cookie: a%d=%b" % (n, b"b" * 400) for n in range(100))),
        keyed=True,
    ),
    Flood("the fleet's page", "http", _asked(b"/ui/fleet"), keyed=True),
    Flood("/openapi.json", "http", _asked(b"/openapi.json"), keyed=True),
    Flood("/openapi.json unread", "http", _asked(b"/openapi.json"), keyed=True, reads=False, times=30),
    Flood("the page", "http", _asked(b"/ui/"), keyed=True),
    Flood("completions in chunks of a byte", "http", _chunked(b""), keyed=True),
    Flood("completions in chunks of a byte with trailers", "http", _chunked(b"a: b\r\n" * 100), keyed=True),
)
