"""One stream of the detokenizer session: merging, replay, failing, the window."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_common.errors import DeadlineExceededError, UnavailableError
from sapwood_router.request.output import Output, OutputOptions
from sapwood_router.request.output_stream import WINDOW
from sapwood_router.tokenizer.detokenize_stream import DetokenizeStream


def stream(closed: list | None = None, *, whole: bool = False) -> DetokenizeStream:
    gone = [] if closed is None else closed
    return DetokenizeStream(1, OutputOptions(), lambda stream: None, gone.append, whole=whole)


def test_what_is_read_late_is_read_merged() -> None:
    one = stream()
    one.push([1, 2, 3])
    for tokens, text in enumerate("abc", start=1):
        one.deliver(Output(text), tokens, ended=tokens == 3, stop_match=None)
    chunk = one.take()
    assert (chunk.output, chunk.tokens, chunk.ended) == (Output("abc"), 3, True)


def test_an_error_comes_after_the_text_and_the_first_one_counts() -> None:
    closed: list = []
    one = stream(closed)
    one.deliver(Output("a"), 1, ended=False, stop_match=None)
    one.fail(UnavailableError("first"))
    one.fail(DeadlineExceededError("second"))
    one.deliver(Output("late"), 5, ended=True, stop_match=None)
    assert one.take().output.text == "a"
    with pytest.raises(UnavailableError, match="first"):
        one.take()
    one.close()
    assert closed == [one]


def test_who_follows_hears_of_output_and_of_an_error() -> None:
    one = stream()
    heard: list[bool] = []
    one.follow(lambda: heard.append(one.ready))
    one.deliver(Output("a"), 1, ended=False, stop_match=None)
    one.take()
    one.fail(UnavailableError("gone"))
    assert heard == [True, True]
    with pytest.raises(UnavailableError):
        one.take()


def test_a_whole_answer_is_heard_of_at_its_end_only() -> None:
    one = stream(whole=True)
    heard: list[bool] = []
    one.follow(lambda: heard.append(one.ready))
    one.deliver(Output("a"), 1, ended=False, stop_match=None)
    assert (heard, one.ready) == ([], False)
    one.deliver(Output("b"), 2, ended=True, stop_match=None)
    assert heard == [True]
    assert one.take().output.text == "ab"


def test_the_pusher_is_told_of_room_once_less_than_a_window_is_unwritten_and_untaken() -> None:
    one = stream()
    told: list[str] = []
    assert one.push(range(WINDOW))
    one.call_when_room(lambda: told.append("written"))
    assert not told
    one.wrote(WINDOW)
    assert told == ["written"]
    one.deliver(Output("x" * WINDOW), WINDOW, ended=False, stop_match=None)
    assert one.full
    one.call_when_room(lambda: told.append("taken"))
    assert told == ["written"]
    one.take()
    assert told == ["written", "taken"]
    assert one.push(range(WINDOW))
    one.call_when_room(lambda: told.append("closed"))
    one.close()
    one.close()
    assert told == ["written", "taken", "closed"]


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
                read += one.take().output.text
        chunk = one.take()
        assert read + chunk.output.text == text
        assert (chunk.tokens, chunk.ended) == (len(text), True)

    asyncio.run(run())
