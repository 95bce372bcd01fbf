"""Log probabilities of many tokens are told in pieces, and are then what they are in one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sapwood.v1 import worker_pb2
from sapwood_net.pacing.heavy_work import HeavyWork
from sapwood_router.edges.openai.annotate import Annotator
from sapwood_router.edges.openai.logprobs import ChatWriter, CompletionWriter, text_of
from sapwood_router.request.context import Delta, TokenLogprobs
from sapwood_router.request.output import Output
from sapwood_text.vocabulary import TokenTable, Vocabulary

IDS = list(range(40, 340))
NAMES = {token: chr(token) for token in range(40, 350)}


class Tokenizer:
    """Knows characters."""

    async def vocabulary(self, *_: Any) -> Vocabulary:
        return Vocabulary(TokenTable(lambda token: NAMES[token].encode()), 350, {})


def annotator(stint: Any, make_writer: Any, **more: Any) -> Annotator:
    messages = worker_pb2.WorkerGenerateResponse(
        prompt_logprobs=[
            worker_pb2.TokenLogprobs(logprob=-token / 8, top_ids=(token + 1, token), top_logprobs=(-0.5, -token / 8))
            for token in IDS[1:]
        ]
    )
    context: Any = SimpleNamespace(
        token_ids=IDS, prompt_logprobs=messages.prompt_logprobs, request_id="r", deadline=0.0
    )
    tokenizer: Any = SimpleNamespace(client=Tokenizer())
    return Annotator([context], tokenizer, make_writer, stint, **more)


def of_answer() -> Delta:
    found = [TokenLogprobs(-token / 8, (token + 1, token), (-0.5, -token / 8)) for token in IDS]
    return Delta(Output("x"), list(IDS), logprobs=found, text_tokens=len(IDS))


async def prompt(stint: Any) -> Any:
    return await annotator(stint, None, tells_prompt=True).prompt_logprobs(0)


async def chat(stint: Any) -> Any:
    return await annotator(stint, partial(ChatWriter, text_of)).annotate(of_answer())


async def completion(stint: Any) -> Any:
    return await annotator(stint, partial(CompletionWriter, False, text_of)).annotate(of_answer())


EXPECTED = {
    prompt: [
        None,
        *(
            {
                str(t): {"logprob": -t / 8, "rank": 2, "decoded_token": NAMES[t]},
                str(t + 1): {"logprob": -0.5, "rank": 1, "decoded_token": NAMES[t + 1]},
            }
            for t in IDS[1:]
        ),
    ],
    chat: {
        "content": [
            {
                "token": NAMES[t],
                "logprob": -t / 8,
                "bytes": list(NAMES[t].encode()),
                "top_logprobs": [
                    {"token": NAMES[other], "logprob": found, "bytes": list(NAMES[other].encode())}
                    for other, found in ((t + 1, -0.5), (t, -t / 8))
                ],
            }
            for t in IDS
        ],
        "refusal": None,
    },
    completion: {
        "tokens": [NAMES[t] for t in IDS],
        "token_logprobs": [-t / 8 for t in IDS],
        "top_logprobs": [{NAMES[t + 1]: -0.5, NAMES[t]: -t / 8} for t in IDS],
        "text_offset": list(range(len(IDS))),
    },
}


@pytest.mark.parametrize("told", EXPECTED)
async def test_others_go_on_while_many_tokens_are_told_of(told: Callable[[Any], Awaitable[Any]]) -> None:
    steps = itertools.count()
    heavy = HeavyWork(lambda: next(steps) * 0.0015)  # each look at the clock is later than a piece may take
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    found = await told(heavy.stint("tenant"))
    beside.cancel()
    assert turns >= 2 * (len(IDS) // 32 - 1)  # a few tokens at a time, first for what they stand for, then as JSON
    assert msgspec.json.decode(msgspec.json.encode(found)) == EXPECTED[told]


async def test_a_few_tokens_wait_for_nobody() -> None:
    class Busy:
        async def pause(self) -> None:
            raise AssertionError("there are few")

    made = annotator(Busy(), partial(ChatWriter, text_of))
    for token in [*range(40, 50)] * 10:  # as a stream has them
        delta = Delta(Output("x"), [token], logprobs=[TokenLogprobs(-1.0)], text_tokens=1)
        note = await made.annotate(delta)
        assert [item["token"] for item in msgspec.json.decode(note)["content"]] == [NAMES[token]]
