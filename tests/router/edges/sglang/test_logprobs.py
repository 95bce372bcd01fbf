"""Log probabilities of many tokens are told in pieces."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import msgspec

from sapwood_net.pacing.heavy_work import HeavyWork
from sapwood_router.edges.sglang.logprobs import LogprobsWish, Told, tell
from sapwood_router.request.context import TokenLogprobs


async def test_others_go_on_while_a_long_prompt_is_told_of() -> None:
    steps = itertools.count()
    heavy = HeavyWork(lambda: next(steps) * 0.0015)  # each look at the clock is later than a piece may take
    prompt, answer = list(range(300)), list(range(130))
    of_prompt = [TokenLogprobs(-token / 8, (token, token + 1), (-0.5, -1.0)) for token in prompt[1:]]
    of_answer = [TokenLogprobs(-token / 8, (token,), (-0.5,)) for token in answer]
    context: Any = SimpleNamespace(token_ids=prompt, prompt_logprobs=of_prompt, logprobs=of_answer)
    told, turns = Told(), 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    tokenizer: Any = None
    await tell(told, context, answer, LogprobsWish(0, 2, False), tokenizer, heavy.stint("tenant"))
    beside.cancel()
    assert turns >= (300 + 130) // 32  # a few tokens at a time
    assert msgspec.json.decode(msgspec.json.encode(told)) == {
        "input_token_logprobs": [[None, 0, None], *([-token / 8, token, None] for token in prompt[1:])],
        "output_token_logprobs": [[-token / 8, token, None] for token in answer],
        "input_top_logprobs": [None, *([[-0.5, t, None], [-1.0, t + 1, None]] for t in prompt[1:])],
        "output_top_logprobs": [[[-0.5, t, None]] for t in answer],
    }
