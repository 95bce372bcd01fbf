"""One stream of text: merging, the window, much at once, faults."""

import asyncio

import pytest

from sapwood_common.errors import DeadlineExceededError, InternalError, UnavailableError
from sapwood_net.pacing.time_share import TimeShare
from sapwood_router.request.output import WINDOW, Output
from sapwood_router.tokenizer.text_stream import TextStream
from sapwood_text.incremental.events import Event
from sapwood_text.parsed_stream import StreamOptions, open_stream
from sapwood_text.vocabulary import TokenTable, Vocabulary

BYTES = Vocabulary(TokenTable(lambda token: bytes([token])), 256, {})


def stream(*, whole: bool = False, **options) -> TextStream:
    decoded = open_stream(BYTES, StreamOptions(**options))
    return TextStream(BYTES, decoded, TimeShare(), whole=whole, eager=bool(options.get("stop")))


def test_what_is_read_late_is_read_merged() -> None:
    one = stream()
    for token in b"abc":
        one.push([token])
    one.push([], end=True)
    chunk = one.take()
    assert (chunk.output, chunk.tokens, chunk.ended) == (Output("abc"), 3, True)


def test_an_error_comes_after_the_text_and_the_first_one_counts() -> None:
    one = stream()
    one.push(b"a")
    one.fail(UnavailableError("first"))
    one.fail(DeadlineExceededError("second"))
    one.push(b"late", end=True)
    assert one.take().output.text == "a"
    with pytest.raises(UnavailableError, match="first"):
        one.take()


def test_a_listener_hears_of_output_and_of_an_error() -> None:
    one = stream()
    heard: list[bool] = []
    one.follow(lambda: heard.append(one.ready))
    one.push(b"a")
    one.take()
    one.fail(UnavailableError("gone"))
    assert heard == [True, True]


@pytest.mark.parametrize("stop", [(), ("never",)])
async def test_a_whole_answer_is_heard_of_at_its_end_only(stop: tuple[str, ...]) -> None:
    one = stream(whole=True, stop=stop)
    heard: list[bool] = []
    one.follow(lambda: heard.append(one.ready))
    for token in b"word " * 100:
        one.push([token])
    await asyncio.sleep(0.05)
    assert (heard, one.ready) == ([], False)
    one.push(b"end", end=True)
    while not heard:
        await asyncio.sleep(0)
    chunk = one.take()
    assert (chunk.output.text, chunk.tokens) == ("word " * 100 + "end", 503)


def test_a_stop_string_ends_a_whole_answer_at_its_completing_token() -> None:
    one = stream(whole=True, stop=("STOP",))
    for count, token in enumerate(b"say STOP", start=1):
        assert one.over == (count == 9)
        one.push([token])
    chunk = one.take()
    assert (chunk.output.text, chunk.stop_match, chunk.ended) == ("say ", "STOP", True)


def test_the_pusher_is_told_of_room_once_less_than_a_window_is_untaken() -> None:
    one = stream()
    told: list[str] = []
    assert not one.push(b"x" * 60)
    for _ in range(4):
        full = one.push(b"x" * 60)
    assert full and one.full
    one.call_when_room(lambda: told.append("taken"))
    assert not told
    one.take()
    assert told == ["taken"]
    one.call_when_room(lambda: told.append("closed"))
    one.close()
    one.close()
    assert told == ["taken", "closed"]


async def test_much_at_once_is_decoded_in_order_between_other_work() -> None:
    one = stream()
    text = "wörd 🌲 " * 4000
    texts: list[str] = []
    one.follow(lambda: texts.append(one.take().output.text))
    assert one.push(text.encode()), "more than a window waits"
    one.push(b"later")
    one.push(b"!", end=True)
    assert texts == []
    turns = 0
    while not one.over:
        await asyncio.sleep(0)
        turns += 1
    assert "".join(texts) == text + "later!"
    assert turns > 3


async def test_a_closed_stream_decodes_nothing_more() -> None:
    one = stream()
    one.push(b"x" * 5000)
    one.close()
    await asyncio.sleep(0.01)
    assert not one._fresh


class _Broken:
    special_tokens: frozenset[str] = frozenset()
    may_reason = False
    openings: frozenset[str] = frozenset()

    def feed(self, text: str) -> list[Event]:
        raise RuntimeError("broken")

    def finish(self) -> list[Event]:
        return []


async def test_a_fault_of_a_parser_ends_its_own_stream_alone(caplog: pytest.LogCaptureFixture) -> None:
    share = TimeShare()
    broken = TextStream(
        BYTES, open_stream(BYTES, StreamOptions(), lambda _: _Broken()), share, whole=False, eager=False
    )
    other = TextStream(BYTES, open_stream(BYTES, StreamOptions()), share, whole=False, eager=False)
    for one in (broken, other):
        one.push(b"x" * WINDOW, end=True)
    while not (broken.over and other.over):
        await asyncio.sleep(0)
    assert other.take().output.text == "x" * WINDOW
    with pytest.raises(InternalError, match="the router's log"):
        broken.take()
    assert "RuntimeError: broken" in caplog.text


def test_a_token_that_the_vocabulary_does_not_have_ends_the_stream() -> None:
    one = stream()
    one.push([256])
    with pytest.raises(InternalError, match="256"):
        one.take()
