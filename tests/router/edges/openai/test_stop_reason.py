"""``stop_reason`` of a choice, as vLLM has it: what it ended at of all that the client named for it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sapwood_testing.router.fake_tokenizer import encode

LAST = encode("hello")[-1]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi", "max_tokens": 20},
}

CASES: list[tuple[dict[str, Any], bool, tuple[str, str | int | None]]] = [
    ({}, True, ("stop", None)),
    ({"stop": ["z", "ll"]}, True, ("stop", "ll")),
    ({"stop_token_ids": [7, LAST]}, False, ("stop", LAST)),
    ({"stop_token_ids": [7]}, True, ("stop", None)),
    ({"max_tokens": 5, "stop_token_ids": [LAST]}, True, ("length", None)),
    ({"n": 2, "stop": "o"}, True, ("stop", "o")),
    ({"return_token_ids": True, "stop": "o"}, True, ("stop", "o")),
]
"""What is asked with the prompt, whether the model ends with its own end token, and how the answer ends."""


@pytest.mark.parametrize("path", BODIES)
async def test_a_choice_says_what_it_ended_at(make_cluster: Any, path: str) -> None:
    async with make_cluster(workers=1) as cluster:
        for extra, ends_with_token, expected in CASES:
            cluster.answer_with("hello", ends_with_token=ends_with_token)
            body = {**BODIES[path], **extra}
            answer = (await cluster.http.post(path, json=body)).json()
            all_of_them = [expected] * extra.get("n", 1)
            assert [(each["finish_reason"], each["stop_reason"]) for each in answer["choices"]] == all_of_them
            events = (await cluster.http.post(path, json={**body, "stream": True})).text.split("\n\n")
            choices = [json.loads(event[6:])["choices"][0] for event in events if event.startswith("data: {")]
            ends = [choice for choice in choices if choice["finish_reason"]]
            assert [(each["finish_reason"], each["stop_reason"]) for each in ends] == all_of_them
            assert not any("stop_reason" in choice for choice in choices if choice not in ends)
