"""A model in a program: what it answers. ``test_engine_life.py`` has how it starts and ends."""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path
from typing import Any

import pytest

from sapwood.errors import InvalidArgumentError, NotFoundError, UnavailableError

GREEDY = {"max_tokens": 6, "temperature": 0}


def test_one_prompt_gives_one_answer_and_a_list_a_list_in_order(engine: Any) -> None:
    texts = [f"number {index}" for index in range(40)]
    answers = engine.generate(texts, **GREEDY)
    assert [answer.usage.prompt_tokens for answer in answers] == [len(text) for text in texts]
    assert len({answer.token_ids for answer in answers}) > 10
    for index in (0, 17):
        alone = engine.generate(texts[index], **GREEDY)
        assert (alone.text, alone.token_ids) == (answers[index].text, answers[index].token_ids)
        assert engine.stream(texts[index], **GREEDY).answer().token_ids == alone.token_ids
    assert engine.generate([], **GREEDY) == []


def test_token_ids_are_prompts_as_texts_are(engine: Any) -> None:
    ids = engine.tokenize("some text")
    assert engine.detokenize(ids) == "some text"
    assert engine.tokenize(["some", "text"]) == [ids[:4], ids[5:]]
    assert engine.detokenize([ids[:4], ids[5:]]) == ["some", "text"]
    assert engine.generate(ids, **GREEDY).token_ids == engine.generate("some text", **GREEDY).token_ids
    assert len(engine.generate([ids, ids[:4]], **GREEDY)) == 2


def test_a_seed_gives_the_same_again_and_n_goes_with_a_list(engine: Any) -> None:
    sampled = {"max_tokens": 8, "temperature": 1.5, "seed": 7}
    first = engine.generate(["abc"], n=3, **sampled)
    assert len({answer.token_ids for answer in first}) == 3
    assert [a.token_ids for a in engine.generate(["abc"], n=3, **sampled)] == [a.token_ids for a in first]
    assert engine.generate("abc", **sampled).token_ids == first[0].token_ids
    with pytest.raises(ValueError, match="n goes with a list"):
        engine.generate("abc", n=2)


def test_a_conversation_is_put_into_the_models_template(engine: Any) -> None:
    turns = [{"role": "user", "content": "hello"}]
    answer = engine.chat(turns, **GREEDY)
    assert answer.token_ids == engine.generate("user: hello\n", **GREEDY).token_ids
    assert answer.message["role"] == "assistant"
    assert [each.token_ids for each in engine.chat([turns, turns], **GREEDY)] == [answer.token_ids] * 2


def test_grammars_and_stop_strings_hold(engine: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    for answer in engine.chat([[{"role": "user", "content": "go"}]] * 2, json_schema=schema, max_tokens=40):
        assert re.fullmatch(r'\s*{\s*"a"\s*:\s*[12]\s*}\s*', answer.text)
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    turns = [{"role": "user", "content": "go"}]
    called = engine.chat(turns, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=120)
    assert called.tool_calls[0].name == "f"
    answer = engine.generate("go", regex="[a-c]{3}stop[a-c]{3}", stop="stop", max_tokens=40)
    assert re.fullmatch("[a-c]{3}", answer.text) and (answer.finish_reason, answer.stop_match) == ("stop", "stop")


def test_a_score_is_what_the_model_said_of_its_own_answer(engine: Any) -> None:
    answer = engine.generate("abc", logprobs=0, **GREEDY)
    ids = engine.tokenize("abc")
    own, other, text = engine.score([(ids, answer.token_ids), (ids, [*answer.token_ids[:-1], 0]), ("abc", "de")])
    assert own.token_ids == answer.token_ids and own.greedy and not other.greedy
    assert math.isclose(own.logprob, sum(each.logprob for each in answer.logprobs), abs_tol=1e-3)
    assert own.logprob > other.logprob
    assert list(text.token_ids) == engine.tokenize("de") and len(text.logprobs) == 2
    for pair, problem in (
        (("abc", ""), "pair 1: the continuation adds no"),
        (("", "abc"), "pair 1: the prompt has no"),
    ):
        with pytest.raises(ValueError, match=problem):
            engine.score([("a", "b"), pair])


def test_embeddings_of_more_than_one_call_come_in_order(engine: Any) -> None:
    found = engine.embed([f"text {index}" for index in range(70)])
    assert len(found.vectors) == 70 and found.prompt_tokens == sum(len(f"text {index}") for index in range(70))
    assert found.vectors[66] == pytest.approx(engine.embed("text 66").vectors[0], abs=1e-5)


def test_an_error_names_its_prompt_and_costs_nobody_else(engine: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"prompt 1: prompt is too long: 20000 tokens > 16384") as caught:
        engine.generate(["fine", "x" * 20_000, "fine"], **GREEDY)
    assert caught.value.field == "text"
    with pytest.raises(NotFoundError, match="no model 'nope'"):
        engine.generate("a", model="nope")
    with pytest.raises(InvalidArgumentError) as caught:
        engine.generate("a", temperature=-1)
    assert caught.value.field == "sampling.temperature"
    assert engine.generate("fine", **GREEDY).finish_reason == "length"


def test_leaving_in_mid_stream_stops_the_generation(engine: Any, until: Any) -> None:
    with engine.stream("abc", max_tokens=10_000, ignore_eos=True) as generation:
        assert next(generation).finish_reason is None
    until(lambda: all(not worker.in_flight for worker in engine._stream.list_workers()))
    assert engine.generate("fine", **GREEDY).finish_reason == "length"


def test_starting_an_engine_again_changes_nothing(engine: Any) -> None:
    assert engine.start() is engine
    assert engine.generate("fine", **GREEDY).finish_reason == "length"


async def test_an_engine_works_inside_a_running_event_loop(engine: Any) -> None:
    assert engine.generate("fine", **GREEDY).finish_reason == "length"


def test_no_port_is_listened_on(engine: Any, children: Any) -> None:
    inodes = set()
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        inodes |= {row[9] for row in rows if row[3] == "0A"}
    # Other tests' clusters may run here, too: an engine's services are those on Unix sockets, and what they started.
    services = [pid for pid in children() if b"unix:" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    found = {pid: module for pid, module in children().items() if pid in services}
    for service in services:
        found |= children(service)
    assert {"sapwood_router", "sapwood_tokenizer", "sapwood_worker"} <= set(found.values())
    for pid in found:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                assert str(entry.readlink()) not in {f"socket:[{inode}]" for inode in inodes}


def test_an_engine_that_was_not_started_says_so() -> None:
    import sapwood

    with pytest.raises(UnavailableError, match="it is not started"):
        sapwood.Engine("demo").generate("a")
