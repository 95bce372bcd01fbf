"""Streams whose first tokens are no text."""

from __future__ import annotations

import json

import pytest

from sapwood_testing.router.fake_tokenizer import encode

PROMPT = {"prompt": "ab", "stream": True, "max_tokens": 20}


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_may_begin_with_a_token_that_is_no_text(make_cluster, n) -> None:
    """The head of the response was missing: nothing had been sent when the first text came."""
    async with make_cluster(workers=1) as cluster:
        first, *text = encode("some text")
        script = cluster.workers[0].script
        script.tokens, script.chunk, script.delay = (lambda prompt: [first, first, *text]), 1, 0.01
        async with cluster.http.stream("POST", "/v1/completions", json={**PROMPT, "n": n}) as answer:
            assert answer.status_code == 200
            lines = [line[6:] async for line in answer.aiter_lines() if line]
        choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
        for index in range(n):
            assert "".join(choice["text"] for choice in choices if choice["index"] == index) == "some text"
