"""Data and arrival times: drawn by seed, of the lengths asked for, read from files or refused by line."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from sapwood.bench.arrivals import constant, poisson
from sapwood.bench.data.conversation import Ask, Conversation, History
from sapwood.bench.data.files import read_prompts, read_sharegpt, shuffled
from sapwood.bench.data.json_lines import DataError
from sapwood.bench.data.lengths import Lengths
from sapwood.bench.data.source import DATASETS, Source
from sapwood.bench.data.trace import read_trace, trace_arrivals, trace_prompts
from sapwood.bench.data.words import WORDS, TokenIdMaker


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "data"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def asks(conversations: Any, count: int = 50) -> list[Ask]:
    return [conversation.turns[0] for conversation in islice(conversations, count)]


def test_poisson_arrivals_have_their_rate_and_their_spread() -> None:
    times = list(islice(poisson(20.0, seed=3), 20_000))
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.03)
    # Exponential: the deviation is the mean, and a share of 1 - 1/e is below it.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.05)
    assert sum(gap < mean for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.02)
    assert times == list(islice(poisson(20.0, seed=3), 20_000))
    assert times != list(islice(poisson(20.0, seed=4), 20_000))


def test_constant_arrivals_are_equally_far_apart() -> None:
    assert list(islice(constant(4.0), 4)) == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize("dataset", [name for name in DATASETS if name not in ("sharegpt", "file")])
def test_a_seed_gives_its_prompts_again_and_another_seed_gives_others(dataset: Any) -> None:
    source = Source(dataset, inputs=Lengths(5, 9), outputs=Lengths(3, 7), turns=Lengths(2, 3))
    first, again, other = (list(islice(source.open("completions", 1.0, seed), 20)) for seed in (1, 1, 2))
    assert first == again != other
    assert all(3 <= (turn.max_tokens or 0) <= 7 for conversation in first for turn in conversation.turns)


def test_prompts_have_the_tokens_asked_for_as_the_server_counts_them() -> None:
    source = Source(inputs=Lengths(40, 60))
    for tokens_a_word in (1.0, 2.0):
        counts = [len(str(ask.prompt).split()) * tokens_a_word for ask in asks(source.open("chat", tokens_a_word, 0))]
        assert min(counts) >= 39 and max(counts) <= 61 and len(set(counts)) > 3
    exact = Source(inputs=Lengths(40, 60), token_ids=(100, 199))
    for ask in asks(exact.open("completions", 2.0, 0)):
        assert 40 <= len(ask.prompt) <= 60
        assert all(100 <= int(token) <= 199 for token in ask.prompt)  # type: ignore[call-overload]


def test_prompts_of_a_group_begin_alike() -> None:
    source = Source("shared-prefix", inputs=Lengths(4, 4), prefix=Lengths(30, 30), groups=3)
    prompts = [str(ask.prompt).split() for ask in asks(source.open("completions", 1.0, 0), 60)]
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 3
    assert len({tuple(prompt) for prompt in prompts}) == 60


def test_a_conversation_grows_by_what_was_said() -> None:
    first, second = Ask("one", 5), Ask("two", 6)
    chat, text = History("chat"), History("completions")
    assert chat.extend(first).prompt == [{"role": "user", "content": "one"}]
    assert text.extend(first).prompt == "one"
    chat.answered(" 1")
    text.answered(" 1")
    assert chat.extend(second) == Ask(
        [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": " 1"},
            {"role": "user", "content": "two"},
        ],
        6,
    )
    assert text.extend(second).prompt == "one 1\ntwo"


def test_json_schema_prompts_carry_the_schema() -> None:
    (ask,) = asks(Source("json-schema", schema={"type": "array"}).open("chat", 1.0, 0), 1)
    assert ask.json_schema == '{"type": "array"}'
    assert ask.json_schema in str(ask.prompt)


def test_lengths_are_a_number_or_a_range() -> None:
    assert Lengths.parse("7") == Lengths(7, 7)
    assert (Lengths.parse("7-9"), str(Lengths(7, 9)), str(Lengths(7, 7))) == (Lengths(7, 9), "7-9", "7")
    for wrong in ("", "x", "0", "9-7", "-3", "1-"):
        with pytest.raises(ValueError, match="range"):
            Lengths.parse(wrong)


def test_a_file_of_prompts(tmp_path: Path) -> None:
    turn = [{"role": "user", "content": "hi"}]
    path = write(tmp_path, {"prompt": "a", "max_tokens": 3}, "\n", {"messages": turn, "json_schema": {"type": "null"}})
    found = read_prompts(path, 9)
    assert found == (Conversation((Ask("a", 3),)), Conversation((Ask(turn, 9, '{"type": "null"}'),)))
    again = list(islice(shuffled(found, 1), 6))
    assert again == list(islice(shuffled(found, 1), 6))
    assert all(again.count(each) == 3 for each in found)
    with pytest.raises(DataError, match="--api chat"):
        Source("file", path=path).open("completions", 1.0, 0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "data:1: not JSON"),
        ("[]", "data:1: not a JSON object"),
        ("{}", "give prompt or messages"),
        ('{"prompt": "a", "messages": []}', "give prompt or messages"),
        ('{"prompt": 5}', "prompt must be a text"),
        ('{"messages": ["a"]}', "messages must be an array of objects"),
        ('{"messages": [{"content": "a"}]}', "each needs a role"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be a whole number of at least 1, got 0"),
        ('{"prompt": "a", "json_schema": "x"}', "json_schema must be an object"),
        ("", "nothing in it"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_prompts(write(tmp_path, line), 9)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*missing: No such file"):
        read_prompts(tmp_path / "missing", 9)


def said(*turns: str) -> dict[str, Any]:
    who = ("human", "gpt")
    return {"conversations": [{"from": who[number % 2], "value": turn} for number, turn in enumerate(turns)]}


@pytest.mark.parametrize("lines", [False, True])
def test_conversations_of_sharegpt(tmp_path: Path, lines: bool) -> None:
    entries = [said("q", "a b c", "r", "d"), said("only a question"), said("s", "e")]
    path = write(tmp_path, *entries) if lines else write(tmp_path, json.dumps(entries))
    found = read_sharegpt(path, turns=2, tokens_a_word=2.0)
    assert found == (Conversation((Ask("q", 6), Ask("r", 2))), Conversation((Ask("s", 2),)))
    assert len(read_sharegpt(path, turns=1)[0].turns) == 1


def test_sharegpt_without_a_conversation_is_refused(tmp_path: Path) -> None:
    for content, message in (
        ("[]", "no conversation"),
        ("[{}]", "entry 0"),
        ('{"conversations": 5}', "array"),
        ("[", "not JSON"),
    ):
        with pytest.raises(DataError, match=message):
            read_sharegpt(write(tmp_path, content), 1)


def row(at: Any, inputs: Any, outputs: Any, *blocks: int) -> dict[str, Any]:
    return {"timestamp": at, "input_length": inputs, "output_length": outputs, "hash_ids": list(blocks)}


def test_a_traces_requests_come_when_it_says_and_share_what_it_says(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path, row(3000, 25, 5, 1, 2, 3), row(1000, 22, 0, 1, 2, 4), row(1500, 7, 1)))
    assert list(trace_arrivals(rows, speed=2.0)) == [0.0, 0.25, 1.0]
    found = asks(trace_prompts(rows, TokenIdMaker(0, 999), block_tokens=10, seed=0))
    assert [len(ask.prompt) for ask in found] == [22, 7, 25]
    assert [ask.max_tokens for ask in found] == [1, 1, 5]
    first, _, last = (list(ask.prompt) for ask in found)
    assert first[:20] == last[:20]
    assert first[20:] != last[20:22]
    texts = Source(trace=tuple(rows), block_tokens=10).open("completions", 1.0, 0)
    assert [len(str(ask.prompt).split()) for ask in asks(texts)] == [22, 7, 25]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (row("now", 1, 1), "timestamp must be a number"),
        (row(-1, 1, 1), "timestamp must be a number"),
        (row(1, 0, 1), "input_length must be a whole number of at least 1"),
        (row(1, 1, None), "output_length must be a whole number of at least 0"),
        ({**row(1, 1, 1), "hash_ids": ["a"]}, "hash_ids must be an array"),
    ],
)
def test_a_row_of_a_trace_that_is_wrong_is_named(tmp_path: Path, wrong: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"data:2: {message}"):
        read_trace(write(tmp_path, row(1, 1, 1), wrong))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Source("sharegpt"), "--data"),
        (Source("random", path=Path("x")), "--data"),
        (Source("multi-turn", token_ids=(1, 2)), "--token-ids"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(source: Source, message: str) -> None:
    with pytest.raises(DataError, match=message):
        source.check("completions")


def test_words_are_plain_and_many() -> None:
    assert len(set(WORDS)) > 200
    assert all(word.isalpha() and word.islower() for word in WORDS)
