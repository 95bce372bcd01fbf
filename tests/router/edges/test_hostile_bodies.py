"""Every node of a good body of every path, replaced by what nobody means: no answer says that the router is at fault."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from sapwood_common.settings.flags import service_flag

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EVIL = "x\x1b[31m\n12:00:00.000 INFO router [-] forged\r\u2028\x85\u202e\x00"
DEEP: Any = "x"
for _ in range(100):
    DEEP = [{"a": DEEP}]
JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 0.5, 2**31, 2**53 + 1, 2**63, 2**64, -(2**70), 10**400, 1e308, 5e-324),
    *("", EVIL, "9" * 5000, [], [None], [[]], [EVIL], {}, {EVIL: EVIL}, {"type": EVIL}, [{"type": EVIL}], DEEP),
)
RAW = (b"NaN", b"-Infinity", b"1e999", b'"\\ud800"', b'{"\\udfff": 1}', b"[" * 3000 + b"]" * 3000, b"-0", b"1e-99999")
"""What Python's encoder does not write."""
HOLE = "\ue000"

_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_CHAT = {
    "model": "fake",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "s"}], "name": "n"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
    ],
    "tools": [_TOOL],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "stop": ["x"],
    "logit_bias": {"5": 1.0},
    "metadata": {"a": "b"},
    "max_tokens": 2,
    "stream_options": {"include_usage": True},
    "stream": True,
}
GOOD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", _CHAT),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]}
            ],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
            },
            "max_tokens": 2,
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": [[104, 105]],
            "max_tokens": 2,
            "n": 1,
            "logprobs": 1,
            "guided_json": {"type": "integer"},
            "guided_choice": ["a"],
            "bad_words": ["x"],
            "stop_token_ids": [5],
            "allowed_token_ids": [104],
            "logit_bias": {"5": 1},
            "session": "s",
            "logit_processors": [{"name": "p", "parameters": {"a": 1}}],
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "r"},
                {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}]},
                {"type": "item_reference", "id": "i"},
            ],
            "instructions": "i",
            "tools": [
                {"type": "function", "name": "f", "parameters": {"type": "object"}},
                {"type": "mcp", "server_label": "l", "server_url": "https://mcp.example/x", "headers": {"a": "b"}},
            ],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "metadata": {"a": "b"},
            "include": ["message.output_text.logprobs"],
            "conversation": {"id": "c"},
            "max_output_tokens": 2,
        },
    ),
    ("/v1/responses/input_tokens", {"input": [{"role": "user", "content": "hi"}], "previous_response_id": "r"}),
    ("/v1/responses/compact", {"input": [{"role": "user", "content": "hi"}]}),
    (
        "/v1/messages",
        {
            "model": "fake",
            "max_tokens": 2,
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "5m"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "r"}]}
                    ],
                },
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "f"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "metadata": {"user_id": "u"},
        },
    ),
    ("/v1/messages/count_tokens", {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/embeddings", {"input": ["a"], "dimensions": 2, "encoding_format": "float"}),
    ("/v1/score", {"text_1": "a", "text_2": ["b"]}),
    ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1, 2]}),
    ("/score", {"queries": ["a"], "documents": ["b"]}),
    ("/v1/rerank", {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1}),
    ("/rerank", {"query": "q", "documents": ["a"]}),
    ("/classify", {"input": ["a"]}),
    ("/v2/rerank", {"query": "q", "documents": ["a"]}),
    ("/v1/classify", {"input": "a", "labels": ["b", "c"]}),
    ("/v1/score_tree", {"prompt": [104], "continuations": [{"token_ids": [105], "next": [[106], {"token_ids": [1]}]}]}),
    (
        "/v1/score_tree",
        {"messages": [{"role": "user", "content": "a"}], "continuations": ["b", {"text": "c", "next": ["d"]}]},
    ),
    ("/tokenize", {"prompt": "a"}),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": [_TOOL], "chat_template_kwargs": {"a": 1}}),
    ("/detokenize", {"tokens": [104, 105]}),
    ("/pooling", {"input": ["a"]}),
    ("/embed", {"inputs": ["a"]}),
    (
        "/v2/chat",
        {
            "model": "fake",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            "max_tokens": 2,
            "documents": [{"id": "d", "data": {"a": "b"}}],
        },
    ),
    ("/v2/embed", {"model": "fake", "texts": ["a"], "input_type": "x", "embedding_types": ["float"]}),
    ("/v1/conversations", {"items": [{"type": "message", "role": "user", "content": "a"}], "metadata": {"a": "b"}}),
    (
        "/v1/batches",
        {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"a": "b"}},
    ),
    ("/v1/sessions", {"ttl_seconds": 1, "fork_of": "s"}),
    (
        "/generate",
        {
            "text": ["a"],
            "sampling_params": {"max_new_tokens": 2, "stop": ["x"], "json_schema": "{}"},
            "rid": ["r"],
            "return_logprob": True,
            "top_logprobs_num": [1],
            "token_ids_logprob": [[1]],
        },
    ),
    ("/generate", {"input_ids": [[104]], "sampling_params": [{"max_new_tokens": 2}], "session_params": {"id": "s"}}),
    ("/abort_request", {"rid": "r"}),
    ("/concate_and_append_request", {"src_rids": ["a"], "dst_rid": "b"}),
    (
        "/api/chat",
        {
            "model": "fake",
            "messages": [
                {
                    "role": "user",
                    "content": "a",
                    "images": ["aGk="],
                    "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
                }
            ],
            "tools": [_TOOL],
            "format": {"type": "object"},
            "options": {"num_predict": 2, "stop": ["x"]},
            "keep_alive": "5m",
            "stream": False,
        },
    ),
    (
        "/api/generate",
        {"model": "fake", "prompt": "a", "suffix": "b", "context": [1], "options": {"num_predict": 2}, "stream": False},
    ),
    ("/api/embed", {"model": "fake", "input": ["a"]}),
    ("/api/embeddings", {"model": "fake", "prompt": "a"}),
    ("/api/show", {"model": "fake"}),
    ("/v1/load_lora_adapter", {"lora_name": "l", "lora_path": "/nowhere"}),
    ("/load_lora_adapter", {"lora_name": "l", "lora_path": "/nowhere"}),
    ("/v1/unload_lora_adapter", {"lora_name": "l"}),
    ("/unload_lora_adapter", {"lora_name": "l"}),
)


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The ways from a body's root to each of its nodes."""
    for key, below in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (key,)
        yield from ((key, *rest) for rest in places(below))


def broken(body: dict[str, Any]) -> Iterator[bytes]:
    for way in places(body):
        made = copy.deepcopy(body)
        holder: Any = made
        for key in way[:-1]:
            holder = holder[key]
        holder[way[-1]] = HOLE
        text = json.dumps(made).encode()
        for junk in (*(json.dumps(each).encode() for each in JUNK), *RAW):
            yield text.replace(b'"\\ue000"', junk)
        del holder[way[-1]]
        yield json.dumps(made).encode()
        if isinstance(holder, dict):
            holder[EVIL] = EVIL
            yield json.dumps(made).encode()
    yield json.dumps(body).encode()[:-1] + b", " + json.dumps(body).encode()[1:]  # each key twice


NO_SLOTS = f"no worker of 'fake' has slots for adapters: {service_flag('worker', 'lora-slots')} gives some"
"""503, and true."""
STEERING = {"/pause_generation", "/continue_generation", "/flush_cache"}
"""Paths whose bodies have next to nothing in them, and hold up all others."""
PATHS = sorted({path for path, _ in GOOD})


@pytest.mark.parametrize("path", PATHS)
async def test_no_body_is_the_routers_fault(cluster: Any, path: str) -> None:
    for worker in cluster.workers:
        worker.script.tokens = lambda prompt: [104, 105]
    bodies = [each for of, body in GOOD if of == path for each in broken(body)]
    wrong: list[tuple[bytes, int, str]] = []

    async def ask(part: list[bytes]) -> None:
        for body in part:
            answer = await cluster.http.post(path, content=body, headers={"content-type": "application/json"})
            fault = answer.status_code >= 500 and answer.status_code != 501 and NO_SLOTS not in answer.text
            if fault or any(re.search(r"[\x00-\x1f\x7f]", value) for value in answer.headers.values()):
                wrong.append((body[:2000], answer.status_code, answer.text[:500]))

    await asyncio.gather(*(ask(bodies[start::4]) for start in range(4)))
    assert not wrong, wrong[:3]
    await cluster.idle()


async def test_bodies_of_every_path_are_tried(cluster: Any) -> None:
    told = (await cluster.http.get("/openapi.json")).json()["paths"]
    known = {path for path, methods in told.items() if "post" in methods and not path.endswith("{name}")}
    assert known - {"/v1/files"} - STEERING <= {*PATHS}
