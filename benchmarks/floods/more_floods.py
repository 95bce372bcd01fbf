"""More of what a tenant with a key can ask for: large values in fields that look harmless, and answers that nobody waits for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from floods.flood import KEY, Flood
from floods.keyed_floods import bodies

_CHAT, _MB = b"/v1/chat/completions", 1 << 20


def _chat(**more: Any) -> bytes:
    """A conversation's body."""
    said = {"model": "mock", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    return json.dumps({**said, **more}).encode()


def _history() -> bytes:
    """6000 messages, half of them calls."""
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = [{"role": "assistant", "tool_calls": [called]}, {"role": "tool", "tool_call_id": "c", "content": "a"}]
    return json.dumps({"model": "mock", "max_tokens": 1, "messages": turns * 3000}).encode()


def _blocks() -> bytes:
    """8000 blocks of tools' calls and results, of Anthropic's kind."""
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "a"}
    turns = [{"role": "assistant", "content": [use] * 4}, {"role": "user", "content": [result] * 4}]
    return json.dumps({"model": "mock", "max_tokens": 1, "messages": turns * 1000}).encode()


def _tools() -> list[dict[str, Any]]:
    """Definitions of 500 tools with nested schemas, 1.5 MB."""
    schema: dict[str, Any] = {"type": "string", "description": "a" * 100}
    for _ in range(10):
        schema = {"type": "object", "properties": {"a": schema, "b": {"type": "string", "enum": ["a", "b"]}}}
    return [
        {"type": "function", "function": {"name": f"f{number}", "description": "a" * 1000, "parameters": schema}}
        for number in range(500)
    ]


def _schema(values: int) -> dict[str, Any]:
    """A schema with so many values to choose from."""
    choices = [f"value {number}" for number in range(values)]
    schema = {"type": "object", "properties": {"a": {"enum": choices}}}
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def _bad_text() -> bytes:
    """A megabyte in which one text of 60 000 is no Unicode: the error names it."""
    texts = b",".join([b'"aaaaaaaaaaa"'] * 60_000)
    return b'{"model": "mock", "prompt": "a", "stop": [%b,"\\ud800"]}' % texts


def _items() -> bytes:
    items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 8000
    return json.dumps({"model": "mock", "max_output_tokens": 1, "input": items}).encode()


def _completion(prompt: bytes, more: bytes = b"") -> bytes:
    return b'{"model": "mock", "max_tokens": 1, "prompt": %b%b}' % (prompt, more)


def _numbers(count: int) -> bytes:
    return b"[%b]" % b",".join([b"7"] * count)


def _gone(_: int) -> Iterator[bytes]:
    """A stream whose client leaves at once, and comes again with the last event that it saw."""
    body = b'{"model": "mock", "max_tokens": 2000, "stream": true, "prompt": "a"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\nlast-event-id: 7\r\n" % KEY
    yield head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


MORE_FLOODS = (
    Flood("tool calls in history", "http", bodies(_history, _CHAT), keyed=True),
    Flood("tool calls in blocks", "http", bodies(_blocks, b"/v1/messages"), keyed=True),
    Flood("500 tools", "http", bodies(lambda: _chat(tools=_tools(), tool_choice="none"), _CHAT), keyed=True),
    Flood(
        "schemas of 60 000 values", "http", bodies(lambda: _chat(response_format=_schema(60_000)), _CHAT), keyed=True
    ),
    Flood(
        "biases of 60 000 tokens",
        "http",
        bodies(lambda: _chat(logit_bias={str(token): 1 for token in range(60_000)}), _CHAT),
        keyed=True,
    ),
    Flood(
        "variables of a template",
        "http",
        bodies(lambda: _chat(chat_template_kwargs={"a": [["a"] * 8] * 4000, "b": "a" * (17 * _MB // 10)}), _CHAT),
        keyed=True,
    ),
    Flood("escapes in a text", "http", bodies(lambda: _completion(b'"%b"' % (b"\\u00e9" * 2_000_000))), keyed=True),
    Flood("a text that is no Unicode", "http", bodies(_bad_text), keyed=True),
    Flood("pictures", "http", bodies(lambda: _chat(messages=[_picture()]), _CHAT), keyed=True),
    Flood("16 000 turns", "http", bodies(_items, b"/v1/responses"), keyed=True),
    Flood(
        "a million tokens echoed",
        "http",
        bodies(lambda: _completion(_numbers(900_000), b', "echo": true')),
        keyed=True,
    ),
    Flood(
        "2000 lists of 400 tokens to embed",
        "http",
        bodies(lambda: b'{"model": "mock", "input": [%b]}' % b",".join([_numbers(400)] * 2000), b"/v1/embeddings"),
        keyed=True,
    ),
    Flood(
        "a text of 4 MB to make tokens of",
        "http",
        bodies(lambda: b'{"prompt": "%b", "return_token_strs": true}' % (b"a " * (2 * _MB)), b"/tokenize"),
        keyed=True,
    ),
    Flood("names of 8 MB", "http", bodies(lambda: _chat(user="a" * 8 * _MB, model="m" * 4 * _MB), _CHAT), keyed=True),
    Flood("streams that are left and asked for again", "http", _gone, keyed=True, hang_up=0.0),
)


def _picture() -> dict[str, Any]:
    url = "data:image/png;base64," + "a" * 8 * _MB
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
