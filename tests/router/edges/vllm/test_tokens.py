"""vLLM's endpoints besides OpenAI's: tokens of texts and conversations, texts of tokens, the version."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from importlib.metadata import version

from sapwood_net.pacing.heavy_work import LARGE, HeavyWork
from sapwood_router.request.tokens import MANY
from sapwood_router.request.validation import check_token_ids
from sapwood_testing.router.fake_tokenizer import BOS, encode

HI = [{"role": "user", "content": "hi"}]


async def test_a_text_becomes_tokens_and_they_become_the_text_again(cluster) -> None:
    text = "Grüße 你好"
    found = (await cluster.http.post("/tokenize", json={"model": "fake", "prompt": text})).json()
    assert found == {"count": len(encode(text)), "max_model_len": 100_000, "tokens": encode(text), "token_strs": None}
    again = (await cluster.http.post("/detokenize", json={"model": "fake", "tokens": found["tokens"]})).json()
    assert again == {"prompt": f"<{BOS}>{text}"}
    bare = await cluster.http.post("/tokenize", json={"prompt": "ab", "add_special_tokens": False})
    assert bare.json()["tokens"] == encode("ab")[1:]
    shown = await cluster.http.post("/tokenize", json={"prompt": "ab", "return_token_strs": True})
    assert shown.json()["token_strs"] == [f"<{BOS}>", "a", "b"]
    assert (await cluster.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_many_tokens_are_looked_at_some_at_a_time(cluster, monkeypatch) -> None:
    looked_at: list[int] = []

    def look(token_ids: Sequence[int], field: str) -> None:
        looked_at.append(len(token_ids))
        check_token_ids(token_ids, field)

    monkeypatch.setattr("sapwood_router.edges.vllm.tokens.check_token_ids", look)
    text = "ab" * MANY
    found = await cluster.http.post("/detokenize", json={"tokens": encode(text)})
    assert found.json() == {"prompt": f"<{BOS}>{text}"}
    assert (max(looked_at), sum(looked_at)) == (MANY // 4, 2 * MANY + 1)
    for wrong in (-1, 2**32):
        refused = await cluster.http.post("/detokenize", json={"tokens": [*encode(text), wrong]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")


async def test_large_requests_take_a_loop_turn_a_piece_and_memory_one_at_a_time(cluster, monkeypatch) -> None:
    turns: list[str] = []
    take = HeavyWork.turn

    async def turn(heavy: HeavyWork, caller: object = None, *, goes_on: bool = False) -> None:
        turns.append(str(caller))
        await take(heavy, caller, goes_on=goes_on)

    monkeypatch.setattr(HeavyWork, "turn", turn)
    text = "ab" * (LARGE // 2)
    shown = (await cluster.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert shown["tokens"] == encode(text)
    assert "".join(shown["token_strs"]) == f"<{BOS}>{text}"
    assert len(turns) >= LARGE // (MANY // 4)
    turns.clear()
    body = {"tokens": encode(text)}
    found = await asyncio.gather(*(cluster.http.post("/detokenize", json=body) for _ in range(6)))
    served = [answer for answer in found if answer.status_code == 200]
    assert len(served) >= 3  # one has its turn, two wait; others are told to come again
    assert {answer.status_code for answer in found} <= {200, 429}
    assert all(answer.json() == {"prompt": f"<{BOS}>{text}"} for answer in served)
    assert len(turns) >= len(served) * (LARGE // (MANY // 4) - 1)


async def test_a_conversation_is_rendered_as_a_chat_would_be(cluster) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "x": 1}}]
    asked = {"messages": HI, "tools": tools, "chat_template_kwargs": {"a": 1}, "add_generation_prompt": False}
    found = (await cluster.http.post("/tokenize", json=asked)).json()
    assert found["tokens"] == encode("<user>hi<assistant>")
    seen = cluster.tokenizer.chats[-1]
    assert (json.loads(seen.tools), json.loads(seen.template_variables)) == (tools, {"a": 1})
    assert seen.add_generation_prompt is False
    assert not cluster.calls()


async def test_the_version_is_the_packages(cluster) -> None:
    assert (await cluster.http.get("/version")).json() == {"version": version("sapwood")}


WRONG = [
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "promt": "b"}, 400, "promt"),
    ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
    ("/tokenize", {"messages": []}, 400, "messages"),
    ("/tokenize", {"messages": HI, "add_special_tokens": True}, 400, "add_special_tokens"),
    ("/tokenize", {"messages": [*HI, {"role": "system", "content": "late"}]}, 400, "messages[1].role"),
    ("/tokenize", {"messages": HI, "chat_template_kwargs": {"messages": 1}}, 400, "chat_template_kwargs"),
    ("/detokenize", {}, 400, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/detokenize", {"tokens": [5, 259]}, 400, "tokens"),
]


async def test_a_wrong_parameter_is_named(strict) -> None:
    for path, body, status, param in WRONG:
        answer = await strict.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
