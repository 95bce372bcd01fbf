"""Answers with very many tokens: others are answered while they are made."""

from __future__ import annotations

import asyncio
import contextlib

from sapwood.v1 import common_pb2
from sapwood_tokenizer.serve.convert import add_tokens


async def test_others_go_on_while_very_many_tokens_are_put_into_a_message() -> None:
    """750 000 took 50 ms in one piece, in which no other text was encoded."""
    message, turns = common_pb2.TokenIds(), 0
    adding = asyncio.ensure_future(add_tokens(message.ids, list(range(200_000))))
    while not adding.done():
        turns += 1
        await asyncio.sleep(0)
    assert list(message.ids) == list(range(200_000))
    assert turns >= 6


async def test_a_few_are_there_at_once() -> None:
    message = common_pb2.TokenIds()
    coroutine = add_tokens(message.ids, [1, 2, 3])
    with contextlib.suppress(StopIteration):
        coroutine.send(None)
    assert list(message.ids) == [1, 2, 3]
