"""The engine for asyncio."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import sapwood
from sapwood.errors import CancelledError, InvalidArgumentError, UnavailableError

pytestmark = pytest.mark.slow

GREEDY = {"max_tokens": 6, "temperature": 0}
SETTINGS = {"load_format": "dummy", "num_pages": 1024, "threads": 1}


async def test_the_async_engine_answers_as_the_blocking_one_does(engine: Any, tiny: Path) -> None:
    texts = [f"number {index}" for index in range(20)]
    turns = [{"role": "user", "content": "hello"}]
    async with sapwood.AsyncEngine(str(tiny), **SETTINGS) as other:
        together = await asyncio.gather(*(other.generate(text, **GREEDY) for text in texts))
        assert [a.token_ids for a in together] == [a.token_ids for a in engine.generate(texts, **GREEDY)]
        assert (await other.chat(turns, **GREEDY)).token_ids == engine.chat(turns, **GREEDY).token_ids
        assert (await other.generate(["a"], n=2, seed=1, max_tokens=3))[1].token_ids
        assert [delta async for delta in other.stream("abc", **GREEDY)][-1].finish_reason == "length"
        assert (await other.score([("abc", "de")]))[0].logprob == pytest.approx(
            engine.score([("abc", "de")])[0].logprob
        )
        assert (await other.embed(["a", "b"])).prompt_tokens == 2
        assert await other.detokenize(await other.tokenize(["some", "text"])) == ["some", "text"]
        with pytest.raises(InvalidArgumentError, match="prompt 1"):
            await other.generate(["a", ""], **GREEDY)


async def test_leaving_a_stream_and_cancelling_a_task_stop_the_work(tiny: Path) -> None:
    async with sapwood.AsyncEngine(str(tiny), **SETTINGS) as engine:

        async def under_way(wanted: int) -> None:
            while sum(worker.in_flight for worker in await engine._asked.client.list_workers()) != wanted:
                await asyncio.sleep(0.02)

        async with engine.stream("abc", max_tokens=10_000, ignore_eos=True) as stream:
            assert (await anext(stream)).token_ids
        await under_way(0)
        asking = asyncio.create_task(engine.generate(["a", "b"], max_tokens=10_000, ignore_eos=True))
        await under_way(2)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await under_way(0)
        last = asyncio.create_task(engine.generate("a", max_tokens=10_000, ignore_eos=True))
        await under_way(1)
    with pytest.raises(CancelledError, match="closed"):
        await last
    with pytest.raises(UnavailableError, match="closed"):
        await engine.generate("a")


async def test_a_start_that_is_cancelled_leaves_nothing(tiny: Path, children: Any) -> None:
    before = children()
    starting = asyncio.create_task(sapwood.AsyncEngine(str(tiny), **SETTINGS).start())
    while children() == before:
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert children() == before
