"""Floods by a tenant with a key: what each of a thousand choices carries, what is slow to parse, cheap calls at volume."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from floods.flood import KEY, Flood
from floods.keyed_floods import bodies

_CHAT, _COMPLETIONS, _TEXT = b"/v1/chat/completions", b"/v1/completions", "a " * 2000
_PROMPTS = [f"{number}" for number in range(1024)]
_MANY = 16
"""Connections for each of the attacker's."""
_SAID = {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}


def _flood(name: str, path: bytes = _COMPLETIONS, times: int = 1, hang_up: float | None = None, **fields: Any) -> Flood:
    """The same body again and again; of no other fields than these and the model."""
    body = bodies(lambda: json.dumps({"model": "mock", **fields}).encode(), path)
    return Flood(name, "http", body, keyed=True, times=times, hang_up=hang_up)


def _raw(name: str, value: Callable[[], bytes]) -> Flood:
    """A completion with a value that is written like this."""
    body = bodies(lambda: b'{"model": "mock", "max_tokens": 1, "prompt": "a", "x": %b}' % value(), _COMPLETIONS)
    return Flood(name, "http", body, keyed=True)


def _asked(path: bytes, *headers: bytes) -> Callable[[int], Iterator[bytes]]:
    """The same request with a key again and again."""
    lines = b"".join(header + b"\r\n" for header in headers)
    request = (
        b"GET " + path + b" HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer " + KEY + b"\r\n" + lines + b"\r\n"
    )
    return lambda _: itertools.repeat(request * max(1, 64 * 1024 // len(request)))


def _chunked(end: bytes) -> Callable[[int], Iterator[bytes]]:
    """A completion's body in chunks of a byte."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer " + KEY
    head += b"\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    body = json.dumps({"model": "mock", "max_tokens": 1, "prompt": "a" * 20_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    return lambda _: itertools.repeat(head + chunks + b"0\r\n" + end + b"\r\n")


def _deep(depth: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": _deep(depth - 1)}} if depth else {"type": "string"}


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def _calls(value: str, count: int) -> list[dict[str, Any]]:
    """A call whose arguments have so many values."""
    arguments = '{"a": [' + ",".join([value] * count) + "]}"
    return [{"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}]


_CHOICES = {"type": "object", "properties": {"a": {"enum": [f"{number:08}" for number in range(2000)]}}}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _deep(300)}}
_COOKIES = tuple(b"cookie: a%d=%b" % (number, b"b" * 400) for number in range(100))

COMBINED_FLOODS = (
    _flood("1024 prompts with a grammar of 500 KB", prompt=_PROMPTS, guided_regex="(ab|c)" * 80_000),
    _flood("1024 prompts with a grammar of 3 KB", prompt=_PROMPTS, guided_regex="(ab|c)" * 500, max_tokens=1),
    _flood("1024 prompts with 1000 biases", prompt=_PROMPTS, logit_bias={str(token): 1 for token in range(1000)}),
    _flood("1024 prompts with 60 KB of stops", prompt=_PROMPTS, stop=["a" * 4000] * 16),
    _flood("1024 prompts with 128 bad words", prompt=_PROMPTS, bad_words=[f"{number:04}" for number in range(128)]),
    _flood("1024 prompts with 60 000 allowed tokens", prompt=_PROMPTS, allowed_token_ids=list(range(60_000))),
    _flood("128 of a chat with a schema of 2000 values", _CHAT, **_SAID, n=128, response_format=_schema(_CHOICES)),
    _flood("128 of 2000 tokens streamed", prompt="a", n=128, max_tokens=2000, stream=True),
    _flood("1024 of 2000 tokens", prompt=_PROMPTS, max_tokens=2000),
    _flood("8 prompts best of 128", prompt=_PROMPTS[:8], max_tokens=1, n=1, best_of=128),
    _flood("30 KB echoed 128 times", prompt="a " * 15_000, max_tokens=1, n=128, echo=True),
    _flood("regular expressions of 8 MB", prompt="a", guided_regex="(ab|c)" * 1_300_000),
    _flood("a schema 300 deep", _CHAT, **_SAID, response_format=_schema(_deep(300))),
    _flood("60 tools 300 deep", _CHAT, **_SAID, tools=[_TOOL] * 60, tool_choice="required"),
    _raw("floats of a large exponent", lambda: b"[%b]" % b",".join([b"1e300"] * 250_000)),
    _raw("small floats", lambda: b"[%b]" % b",".join([b"1.2345678901234567e-300"] * 250_000)),
    _raw("numbers of 4000 digits", lambda: b"[%b]" % b",".join([b"9" * 4000] * 3800)),
    _raw("pairs of surrogates", lambda: b'"%b"' % (b"\\ud83d\\ude00" * 1_200_000)),
    _raw("15 MB that are no UTF-8", lambda: b'"%b"' % (b"\xff" * 15_000_000)),
    _raw("the same name 60 000 times", lambda: b'"a", %b' % b", ".join([b'"prompt": "' + b"a" * 200 + b'"'] * 60_000)),
    _flood("floats in a call's arguments", b"/v1/responses", input=_calls("1e300", 150_000)),
    _flood("8 MB of a call's arguments", b"/v1/responses", input=_calls("[]", 2_700_000)),
    _flood("completions", prompt="a", max_tokens=1, times=_MANY),
    _flood("completions on new connections", prompt="a", max_tokens=1, times=_MANY, hang_up=0.0),
    _flood("streams of 2000 tokens", prompt="a", max_tokens=2000, stream=True, times=_MANY),
    _flood("texts of 60 KB to make tokens of", b"/tokenize", prompt="a " * 30_000, times=_MANY),
    _flood("2048 texts of 4 KB to embed", b"/v1/embeddings", input=[_TEXT] * 2048),
    _flood("2048 pairs of 4 KB to score", b"/v1/score", text_1="a", text_2=[_TEXT] * 2000),
    _flood("1024 texts of SGLang's", b"/generate", text=_PROMPTS, sampling_params={"max_new_tokens": 1}),
    _flood("answers of 1 MB that are kept", b"/v1/responses", max_output_tokens=1, input="a " * 500_000),
    _flood("8 MB to count", b"/v1/messages/count_tokens", messages=[{"role": "user", "content": "a " * 4_000_000}]),
    _flood("routes of 1 MB to explain", b"/ui/route", prompt="a " * 500_000),
    Flood("queries of 50 KB", "http", _asked(b"/v1/models?" + b"a=%41&" * 8000), keyed=True),
    Flood("a hundred cookies", "http", _asked(b"/v1/models", *_COOKIES), keyed=True),
    Flood("/openapi.json unread", "http", _asked(b"/openapi.json"), keyed=True, reads=False, times=30),
    Flood("completions in chunks of a byte", "http", _chunked(b""), keyed=True),
    Flood("completions in chunks of a byte with trailers", "http", _chunked(b"a: b\r\n" * 100), keyed=True),
)
