"""One stream of the detokenizer session: merging, replay, failing, the window."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_common.errors import DeadlineExceededError, UnavailableError
from sapwood_router.detokenize_stream import WINDOW, DetokenizeStream
from sapwood_router.output import Output, OutputOptions


def stream(closed: list | None = None) -> DetokenizeStream:
    gone = [] if closed is None else closed
    return DetokenizeStream(1, OutputOptions(), lambda stream: None, gone.append)


async def test_what_is_read_late_is_read_merged() -> None:
    one = stream()
    one.push([1, 2, 3])
    for tokens, text in enumerate("abc", start=1):
        one.deliver(Output(text), tokens, ended=tokens == 3, stop_match=None)
    chunk = await one.read()
    assert (chunk.output, chunk.tokens, chunk.ended) == (Output("abc"), 3, True)


async def test_an_error_comes_after_the_text_and_the_first_one_counts() -> None:
    closed: list = []
    one = stream(closed)
    one.deliver(Output("a"), 1, ended=False, stop_match=None)
    one.fail(UnavailableError("first"))
    one.fail(DeadlineExceededError("second"))
    one.deliver(Output("late"), 5, ended=True, stop_match=None)
    assert (await one.read()).output.text == "a"
    with pytest.raises(UnavailableError, match="first"):
        await one.read()
    one.close()
    assert closed == [one]


async def test_a_waiting_reader_is_woken_by_an_error() -> None:
    one = stream()
    reading = asyncio.ensure_future(one.read())
    await asyncio.sleep(0)
    one.fail(UnavailableError("gone"))
    with pytest.raises(UnavailableError):
        await reading


async def test_the_pusher_waits_while_a_window_of_tokens_is_unwritten_or_unread() -> None:
    one = stream()
    one.push(range(WINDOW))
    waiting = asyncio.ensure_future(one.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    one.wrote(WINDOW)
    await waiting
    one.deliver(Output("x" * WINDOW), WINDOW, ended=False, stop_match=None)
    waiting = asyncio.ensure_future(one.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    await one.read()
    await waiting
    one.push(range(WINDOW))
    waiting = asyncio.ensure_future(one.room())
    await asyncio.sleep(0)
    one.close()
    await waiting


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30), st.lists(st.integers(0, 30), max_size=4), st.randoms(use_true_random=False))
def test_however_often_the_call_is_lost_the_text_comes_once(text, losses, rng) -> None:
    async def run() -> None:
        one = stream()
        one.push(range(len(text)), end=True)
        read = ""
        for loss in [*losses, None]:
            one.rewind()
            upto = len(text) if loss is None else min(loss, len(text))
            at = 0
            while at < upto:
                step = rng.randint(1, upto - at)
                one.deliver(Output(text[at : at + step]), at + step, ended=False, stop_match=None)
                at += step
            if loss is None:
                one.deliver(Output(), len(text), ended=True, stop_match=None)
            elif rng.random() < 0.5 and one._fresh:
                read += (await one.read()).output.text
        chunk = await one.read()
        assert read + chunk.output.text == text
        assert (chunk.tokens, chunk.ended) == (len(text), True)

    asyncio.run(run())
