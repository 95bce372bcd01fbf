"""Long texts are encoded one request at a time; few wait for it, and none for ever."""

from __future__ import annotations

import asyncio
import math

import pytest

from sapwood_common.errors import DeadlineExceededError, ResourceExhaustedError
from sapwood_router.tokenizer.client import _MOST_WAITING, LARGE, LargeTexts


async def test_one_has_its_turn_the_next_after_it_and_few_wait() -> None:
    large, order, gate = LargeTexts(), [], asyncio.Event()

    async def encode(number: int) -> None:
        async with large.turn("a", math.inf):
            order.append(number)
            await gate.wait()

    tasks = [asyncio.create_task(encode(number)) for number in range(1 + _MOST_WAITING)]
    while large.waiting < _MOST_WAITING:
        await asyncio.sleep(0)
    assert order == [0]
    with pytest.raises(ResourceExhaustedError) as refused:
        async with large.turn("a", math.inf):
            raise AssertionError("too many wait")
    assert refused.value.retry_after
    tasks[0].cancel()
    tasks[-1].cancel()  # who leaves makes room
    while order != [0, 1]:
        await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == list(range(_MOST_WAITING))
    async with large.turn("a", math.inf):
        assert large.waiting == 0


async def test_whose_deadline_passes_waits_no_more() -> None:
    large = LargeTexts()
    async with large.turn("a", math.inf):
        with pytest.raises(DeadlineExceededError):
            async with large.turn("a", asyncio.get_running_loop().time()):
                raise AssertionError("it is another's turn")
        assert large.waiting == 0
    async with large.turn("a", math.inf):
        pass


async def test_callers_take_turns_and_none_takes_the_others_places() -> None:
    large, order = LargeTexts(), []

    async def encode(caller: str) -> None:
        async with large.turn(caller, math.inf):
            order.append(caller)
            await asyncio.sleep(0)

    async with large.turn("many", math.inf):
        tasks = [asyncio.create_task(encode("many")) for _ in range(_MOST_WAITING)]
        while large.waiting < _MOST_WAITING:
            await asyncio.sleep(0)
        few = asyncio.create_task(encode("few"))
        (refused,), _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert refused is tasks[-1]  # who has the most waiting loses the last of them
        assert isinstance(refused.exception(), ResourceExhaustedError)
        with pytest.raises(ResourceExhaustedError):
            await encode("few")  # now both have one
        assert large.waiting == _MOST_WAITING
    await asyncio.gather(few, tasks[0])
    assert order == ["many", "few"]
    assert large.waiting == 0


async def test_a_turn_that_comes_as_its_request_is_cancelled_goes_to_the_next() -> None:
    large, entered = LargeTexts(), asyncio.Event()

    async def encode() -> None:
        async with large.turn("b", math.inf):
            entered.set()

    async def never() -> None:
        async with large.turn("a", math.inf):
            raise AssertionError("it was cancelled")

    async with large.turn("a", math.inf):
        cancelled = asyncio.create_task(never())
        while large.waiting < 1:
            await asyncio.sleep(0)
        other = asyncio.create_task(encode())
        while large.waiting < 2:
            await asyncio.sleep(0)
    cancelled.cancel()  # its turn has come, and it does not know yet
    await entered.wait()
    await other
    assert cancelled.cancelled()


@pytest.mark.parametrize("size", [LARGE // 2, LARGE])
async def test_more_tokens_than_any_context_holds_are_refused_alike_however_long_the_text(cluster, size) -> None:
    body = {"prompt": "a" * size, "max_tokens": 1}
    answer = await cluster.http.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "prompt")
    assert f"{size + 1} tokens" in error["message"]
    answer = await cluster.http.post("/v1/completions", json={**body, "truncate_prompt_tokens": 10})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 10


_LONG = "a" * LARGE
_TURNS = [{"role": "user", "content": _LONG}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": _LONG}, "prompt"),
        ("/v1/chat/completions", {"messages": _TURNS}, "messages"),
        ("/tokenize", {"prompt": _LONG}, "prompt"),
        ("/v1/messages/count_tokens", {"messages": _TURNS}, None),
    ],
)
async def test_the_tokenizer_sends_no_tokens_of_a_long_text_that_no_context_holds(cluster, path, body, param) -> None:
    """Millions of numbers that nobody uses would keep the router's event loop for a second."""
    answer = await cluster.http.post(path, json={"model": "fake", **body})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error.get("param") == param
    assert "prompt is too long" in error["message"]  # the tokenizer's words


async def test_each_conversation_names_the_most_tokens_that_its_template_may_make(cluster) -> None:
    await cluster.openai.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "short"}], max_tokens=1
    )
    (chat,) = cluster.tokenizer.chats
    assert chat.max_tokens == cluster.router.registry.context_length("fake")
