"""Long texts are encoded one request at a time; few wait for it, and none for ever."""

from __future__ import annotations

import asyncio
import math

import pytest

from sapwood_common.errors import DeadlineExceededError, ResourceExhaustedError
from sapwood_router.tokenizer.large_texts import _MOST_WAITING, LARGE, LargeTexts


async def test_one_has_its_turn_the_next_after_it_and_few_wait() -> None:
    large, order, gate = LargeTexts(), [], asyncio.Event()

    async def encode(number: int) -> None:
        async with large.turn(math.inf):
            order.append(number)
            await gate.wait()

    tasks = [asyncio.create_task(encode(number)) for number in range(1 + _MOST_WAITING)]
    while large.waiting < _MOST_WAITING:
        await asyncio.sleep(0)
    assert order == [0]
    with pytest.raises(ResourceExhaustedError) as refused:
        async with large.turn(math.inf):
            raise AssertionError("too many wait")
    assert refused.value.retry_after
    tasks[0].cancel()
    tasks[-1].cancel()  # who leaves makes room
    while order != [0, 1]:
        await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == list(range(_MOST_WAITING))
    async with large.turn(math.inf):
        assert large.waiting == 0


async def test_whose_deadline_passes_waits_no_more() -> None:
    large = LargeTexts()
    async with large.turn(math.inf):
        with pytest.raises(DeadlineExceededError):
            async with large.turn(asyncio.get_running_loop().time()):
                raise AssertionError("it is another's turn")
        assert large.waiting == 0
    async with large.turn(math.inf):
        pass


@pytest.mark.parametrize("size", [LARGE // 2, LARGE])
async def test_more_tokens_than_any_context_holds_are_refused_alike_however_long_the_text(cluster, size) -> None:
    body = {"prompt": "a" * size, "max_tokens": 1}
    answer = await cluster.http.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "prompt")
    assert error["message"].startswith(f"the prompt has {size + 1} tokens, the context holds ")
    answer = await cluster.http.post("/v1/completions", json={**body, "truncate_prompt_tokens": 10})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 10
