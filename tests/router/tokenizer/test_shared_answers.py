"""One call for all that ask the same at the same time."""

import asyncio

import pytest

from sapwood_router.tokenizer.client import SharedAnswers


async def test_those_who_ask_the_same_share_a_call_and_others_do_not() -> None:
    answers: SharedAnswers[str] = SharedAnswers()
    asked, gate = [], asyncio.Event()

    async def ask(key: str) -> str:
        asked.append(key)
        await gate.wait()
        if key == "bad":
            raise ValueError(key)
        return f"answer to {key}"

    async def get(key: str) -> str:
        return await answers.get(key, lambda: ask(key))

    waiting = [asyncio.ensure_future(get(key)) for key in ("a", "a", "b", "bad", "bad", "a")]
    await asyncio.sleep(0.01)
    assert sorted(asked) == ["a", "b", "bad"]
    waiting[0].cancel()  # who came first leaves: the call continues for the others
    await asyncio.sleep(0)
    gate.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert found[1:3] == ["answer to a", "answer to b"]
    assert found[5] == "answer to a"
    assert [str(each) for each in found[3:5]] == ["bad", "bad"]
    assert await get("a") == "answer to a"
    assert asked.count("a") == 2, "nothing is kept"


async def test_a_call_that_nobody_waits_for_any_more_is_cancelled() -> None:
    answers: SharedAnswers[None] = SharedAnswers()
    ended = asyncio.Event()

    async def ask() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    waiting = [asyncio.ensure_future(answers.get("a", ask)) for _ in range(2)]
    await asyncio.sleep(0)
    for each in waiting:
        each.cancel()
    async with asyncio.timeout(5):
        await ended.wait()
    for each in waiting:
        with pytest.raises(asyncio.CancelledError):
            await each
