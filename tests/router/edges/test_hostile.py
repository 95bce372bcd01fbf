"""Requests that are wrong in every way, readers that do not read and clients that vanish: nobody else notices."""

from __future__ import annotations

import asyncio
import json
import random

import msgspec

from sapwood_net.pacing.heavy_work import Stint
from sapwood_router.edges.openai.parameters import SAMPLING
from sapwood_router.edges.openai.types import ChatRequest, CompletionRequest
from sapwood_router.flow.prepare import prepare

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GOOD = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hello"},
}
JUNK = [
    {"x": 1}, {}, [], [[]], [1.5], "text", "", "\ud800", -1, 0, 1.5, 2**70, -(2**70), True, [None], [{"type": "x"}], "9" * 5000,
]  # fmt: skip
BODIES = [
    b"", b"{", b"[]", b"null", b"5", b'"a"', b"\xff\xfe", b'{"messages": [' + b"[" * 5000, b'{"prompt": "\xff"}', b'{"a":1}',
    b"[" * 100_000, b'{"prompt": "a", "prompt": }', b'{"prompt": NaN}', b'{"max_tokens": 1e999, "prompt": "a"}',
]  # fmt: skip


def fields(path: str) -> list[str]:
    struct = ChatRequest if path == CHAT else CompletionRequest
    sampling = SAMPLING - {*struct.__struct_fields__}
    return [*struct.__struct_fields__, *sorted(sampling), "use_beam_search", "unknown"]


def wrong_requests() -> list[tuple[str, bytes, str | None]]:
    """Path, body, and the parameter at fault; None where the body as a whole is."""
    made: list[tuple[str, bytes, str | None]] = []
    for path, good in GOOD.items():
        made += [(path, json.dumps({**good, name: junk}).encode(), name) for name in fields(path) for junk in JUNK]
        made += [(path, body, None) for body in BODIES]
    return made


async def test_a_thousand_wrong_requests_are_refused_by_name_and_the_rest_is_served(cluster) -> None:
    for worker in cluster.workers:
        worker.script.tokens = lambda prompt: [104, 108] * 20
    wrong = wrong_requests()
    assert len(wrong) >= 1000
    random.Random(0).shuffle(wrong)
    refused = 0

    async def flood(part: list[tuple[str, bytes, str | None]]) -> None:
        nonlocal refused
        for path, body, name in part:
            response = await cluster.http.post(path, content=body)
            if response.status_code == 200:
                assert name is not None, body  # this value happens to be a good one
                continue
            assert response.status_code in (400, 404), (body[:200], response.text)
            error = response.json()["error"]
            assert error["message"]
            if name is not None and "\\ud800" not in body.decode():
                assert (error["param"] or "").partition(".")[0].partition("[")[0] == name, (body[:200], error)
            refused += 1

    async def serve() -> None:
        for _ in range(40):
            texts = [part.text async for part in await cluster.openai.completions.create(
                model="fake", prompt="x", max_tokens=40, stream=True) for part in part.choices]  # fmt: skip
            assert "".join(texts) == "ei" * 20

    await asyncio.gather(serve(), *(flood(wrong[start::8]) for start in range(8)))
    assert refused >= 800
    await cluster.idle()


async def test_readers_that_stall_and_clients_that_vanish_hold_up_nobody(cluster) -> None:
    for worker in cluster.workers:
        worker.script.tokens = lambda prompt: [104] * (100_000 if len(prompt) > 5 else 20)
        worker.script.chunk = 50
    host, port = "127.0.0.1", cluster.router.http_port
    body = msgspec.json.encode({"prompt": "a very long answer", "stream": True, "max_tokens": 100_000})
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    stalled = []
    for number in range(40):
        reader, writer = await asyncio.open_connection(host, port, limit=1024)
        writer.write(head.encode() + body)
        await writer.drain()
        if number % 2:
            await reader.readexactly(200)
            writer.transport.abort()
        else:
            stalled.append(writer)
    answers = await asyncio.gather(
        *(cluster.openai.completions.create(model="fake", prompt="x", max_tokens=20) for _ in range(50))
    )
    assert {answer.choices[0].text for answer in answers} == {"e" * 20}
    for writer in stalled:
        writer.transport.abort()
    await cluster.idle()
    assert all(call.outcome in ("finished", "cancelled") for call in cluster.calls())


async def test_token_ids_are_looked_at_in_pieces_and_those_of_a_prompt_too_long_not_at_all(cluster) -> None:
    async def ask_any(token_ids: list[int]) -> dict[str, str]:
        response = await cluster.http.post(COMPLETIONS, json={"prompt": token_ids, "max_tokens": 1})
        assert response.status_code == 400
        error: dict[str, str] = response.json()["error"]
        return error

    async def ask(token_ids: list[int]) -> str:
        error = await ask_any(token_ids)
        assert error["param"] == "prompt"
        return error["message"]

    assert (
        "or 262144 values" in (await ask_any([7] * 300_000))["message"]
    )  # more than the longest context holds, or a batch
    assert (await ask([-1] * 150_000)).startswith("prompt is too long: 150000 tokens > 100000 maximum")
    assert "token ids must be in" in await ask([7] * 90_000 + [-1])


async def test_a_long_prompt_continued_often_is_refused_and_others_start_one_a_turn(cluster, monkeypatch) -> None:
    """A body of 600 KB, 200 000 tokens to be continued 128 times, stopped the router for over a second."""
    refused = await cluster.http.post(COMPLETIONS, json={"prompt": "a" * 200_000, "n": 128, "max_tokens": 1})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"
    assert "have 25600000 characters" in refused.json()["error"]["message"]
    turn, started = 0, []

    def count() -> None:
        nonlocal turn, handle
        turn += 1
        handle = loop.call_soon(count)

    async def counted(*given) -> None:
        started.append(turn)
        await prepare(*given)

    loop = asyncio.get_running_loop()
    handle = loop.call_soon(count)
    monkeypatch.setattr("sapwood_router.flow.generation.prepare", counted)
    answer = await cluster.http.post(COMPLETIONS, json={"prompt": "a" * 40_000, "n": 6, "max_tokens": 1})
    handle.cancel()
    assert len(answer.json()["choices"]) == 6
    assert len(set(started)) == len(started) == 6


async def test_a_large_request_is_made_of_its_body_a_piece_a_turn_of_the_loop(cluster, monkeypatch) -> None:
    """A conversation took 10 to 20 ms in one piece. Of token ids, which take 4 ms, only the count of values is in pieces."""
    turns_taken, turn = 0, Stint.turn

    async def counted(stint: Stint) -> None:
        nonlocal turns_taken
        turns_taken += 1
        await turn(stint)

    monkeypatch.setattr(Stint, "turn", counted)
    monkeypatch.setattr("sapwood_net.pacing.heavy_work.PIECE", 0.0)  # however fast it is here, each step is a piece
    many = [7] * 250_000
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    turns = [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "tool_call_id": "c", "content": "a"}] * 2000
    for path, body, least in (
        ("/v1/completions", {"prompt": many, "max_tokens": 1}, 8),
        ("/v1/completions", {"prompt": [many[:200]] * 1000, "n": 0}, 8),
        ("/v1/embeddings", {"input": many}, 8),
        ("/generate", {"input_ids": many}, 8),
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 12_000, "max_output_tokens": 1}, 12_000),
        ("/v1/chat/completions", {"messages": turns, "max_tokens": 1}, 4000),
    ):
        turns_taken = 0
        await cluster.http.post(path, json=body)
        assert turns_taken >= least, path


async def test_a_chat_of_thousands_of_turns_leaves_the_tokenizers_call_open(cluster) -> None:
    """Its message had more fields than any may have: it ended the call that all requests share, again with each try."""
    calls = cluster.tokenizer.encode_calls
    said = [{"role": "user", "content": "a"}] * 12_000
    answer = await cluster.http.post(CHAT, json={"messages": said, "max_tokens": 1})
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] > 12_000
    assert cluster.tokenizer.encode_calls == calls


async def test_tools_of_more_than_a_megabyte_are_refused_before_anything_reads_them(cluster) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "a" * 1024 * 1024}}
    answer = await cluster.http.post(CHAT, json={**GOOD[CHAT], "tools": [tool]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert not cluster.tokenizer.chats
