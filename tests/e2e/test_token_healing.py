"""A healed answer is what the model writes if its first token is any that begins with the text taken back."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

import sapwood.lang as sl
from sapwood.client import Client
from sapwood_tokenizer.vocab.loader import load_tokenizer, resolve_tokenizer

pytestmark = pytest.mark.slow
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0}


def test_a_healed_answer_begins_with_the_likeliest_token_that_has_the_text_taken_back(start_cluster_of: Any) -> None:
    tokenizer = load_tokenizer(resolve_tokenizer("demo")).tokenizer
    spelt = {token: tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())}
    with start_cluster_of("--workers", "1") as cluster, Client(cluster.grpc) as client:
        for prompt in ('The link is <a href="http:', "My favourite colour is gre", "Once upon a "):
            ids = tokenizer.encode(prompt, add_special_tokens=False).ids
            found = client.generate(prompt, **GREEDY, token_healing=True).answer()
            count = len(ids) - found.usage.prompt_tokens
            assert count > 0
            back = tokenizer.decode(ids[-count:])
            allowed = [token for token, text in spelt.items() if text.startswith(back)]
            first = client.generate(
                token_ids=ids[:-count], **{**GREEDY, "max_tokens": 1}, allowed_token_ids=allowed
            ).answer()
            assert found.token_ids[0] == first.token_ids[0]
            rest = client.generate(token_ids=[*ids[:-count], *first.token_ids], **{**GREEDY, "max_tokens": 7}).answer()
            assert found.text == tokenizer.decode([*first.token_ids, *rest.token_ids])[len(back) :]
            streamed = [delta.text for delta in client.generate(prompt, **GREEDY, token_healing=True)]
            assert "".join(streamed) == found.text
            settings = {"max_new_tokens": 8, "temperature": 0, "token_healing": True}
            body = json.dumps({"text": prompt, "sampling_params": settings}).encode()
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(f"http://{cluster.http}/generate", body, headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.loads(answer.read())["text"] == found.text
            for backend in (sl.Sapwood(cluster.grpc), sl.SapwoodHttp(f"http://{cluster.http}")):
                with backend:
                    program = sl.function(
                        lambda s, prompt: s.__iadd__(prompt + sl.gen("x", **GREEDY, token_healing=True))
                    )
                    assert program.run(prompt, backend=backend)["x"] == found.text
