"""Batches: order, bound, prefix, errors, and the journal."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

import sapwood.lang as sl
from sapwood.lang.batch import Journal

PREFIX = "Some instructions that all rows begin with, long enough to be worth a request. "


@sl.function
def program(s: sl.State, number: int) -> int:
    s += PREFIX + str(number) + ":" + sl.gen("answer")
    return len(s["answer"])


def rows(count: int) -> list[dict[str, Any]]:
    return [{"number": number} for number in range(count)]


def test_states_come_in_the_rows_order_and_no_more_rows_than_allowed_run_at_a_time(backend: Any, oracle: Any) -> None:
    answer, _ = oracle
    states = program.run_batch(rows(40), backend=backend, concurrency=3)
    assert [state["answer"] for state in states] == [answer(f"{PREFIX}{number}:") for number in range(40)]
    assert [state.returned for state in states] == [len(state["answer"]) for state in states]
    assert 1 < backend.most_running <= 3
    assert program.run_batch([], backend=backend) == []
    assert program.run_batch([(7,)], backend=backend)[0]["answer"] == answer(f"{PREFIX}7:")


def test_the_prefix_of_all_rows_is_computed_once_before_them(backend: Any) -> None:
    @sl.function
    def chat(s: sl.State, question: str) -> None:
        s += sl.system("A system's turn that is a bit longer than sixty-four letters, so that it is warmed.")
        s += sl.user(question) + sl.assistant(sl.gen("answer"))

    chat.run_batch([{"question": "a"}, {"question": "b"}], backend=backend)
    assert backend.asked[0][0] == "warm" and backend.asked[0][1].endswith("warmed.\nUSER:")
    assert [kind for kind, _, _ in backend.asked] == ["warm", "generate", "generate"]
    backend.asked.clear()
    chat.run_batch([{"question": "a"}, {"question": "b"}], backend=backend, cache_prefix=False)
    program.run_batch(rows(1), backend=backend)
    assert all(kind == "generate" for kind, _, _ in backend.asked)
    backend.asked.clear()
    program.bind(number=1).cache(backend=backend)
    assert backend.asked == [("warm", f"{PREFIX}1:", 0)]


def test_a_row_that_fails_ends_the_batch_or_is_returned_with_its_error(backend: Any) -> None:
    @sl.function
    def some_fail(s: sl.State, text: str) -> None:
        s += text + sl.gen("answer")
        if text == "div":
            s += str(1 // 0)

    batch = [{"text": text} for text in ("a", "no!", "div", "b")]
    with pytest.raises(sl.ProgramError, match=r"row 1: gen\('answer'\) at .*test_batch\.py:\d+: the model refuses"):
        some_fail.run_batch(batch, backend=backend, concurrency=1)
    assert backend.running == 0
    states = some_fail.run_batch(batch, backend=backend, errors="return")
    errors = [state.error() for state in states]
    assert errors[0] is None and errors[3] is None
    assert "the model refuses" in str(errors[1]) and "ZeroDivisionError" in str(errors[2])
    assert errors[2] is not None and errors[2].line.endswith(f":{some_fail.func.__code__.co_firstlineno + 4}")
    with pytest.raises(ValueError, match="'raise' or 'return'"):
        some_fail.run_batch(batch, backend=backend, errors="other")
    with pytest.raises(ValueError, match="at least 1"):
        some_fail.run_batch(batch, backend=backend, concurrency=0)
    with pytest.raises(TypeError, match=r"row 1: .*takes 1 argument"):
        some_fail.run_batch([("a",), ("b", "c")], backend=backend)


def test_a_bar_shows_how_far_the_batch_is(backend: Any, capsys: pytest.CaptureFixture[str]) -> None:
    program.run_batch(rows(5), backend=backend, progress_bar=True)
    shown = capsys.readouterr().err
    assert re.search(r"\[#{30}\] 5/5 rows, [\d.]+ a second\n$", shown)
    program.run_batch(rows(5), backend=backend)
    assert not capsys.readouterr().err


def test_an_async_program_runs_over_rows_inside_of_an_event_loop(backend: Any) -> None:
    @sl.function
    async def awaited(s: sl.State, number: int) -> str:
        s += f"{number}" + sl.gen("answer")
        return str(await s.get("answer"))

    states = asyncio.run(awaited.arun_batch([{"number": 1}, {"number": 2}], backend=backend))
    assert [state.returned for state in states] == [state["answer"] for state in states]


def test_a_journal_gives_back_what_has_ended_and_the_rest_is_run(backend: Any, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = program.run_batch(rows(9), backend=backend, journal=path)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 10
    for kept in (1, 4, 10):
        for cut in (b"", lines[kept - 1][: len(lines[kept - 1]) // 2] if kept < 10 else b""):
            path.write_bytes(b"".join(lines[:kept]) + cut)
            backend.asked.clear()
            again = program.run_batch(rows(9), backend=backend, journal=path)
            assert len([kind for kind, _, _ in backend.asked if kind == "generate"]) == 10 - kept
            for old, new in zip(whole, again, strict=True):
                assert (new.text(), new["answer"], new.returned) == (old.text(), old["answer"], old.returned)
                assert new.get_meta_info("answer") == old.get_meta_info("answer")
            entries = [json.loads(line) for line in path.read_text().splitlines()]
            assert sorted(each["row"] for each in entries[1:]) == list(range(9))
    assert again[3].timeline().requests == 1 and again[3].error() is None


def test_values_from_a_journal_are_those_of_the_run(make_backend: Any, tmp_path: Path) -> None:
    class Numbers(make_backend):  # type: ignore[misc]
        async def generate(self, prompt: Any, options: Any) -> Any:
            return dataclasses.replace(await super().generate(prompt, options), texts=("42",))

    @sl.function
    def numbers(s: sl.State, number: int) -> None:
        s += str(number) + sl.gen_int("i") + sl.gen("j", json_schema={"type": "number"}) + sl.gen("t")

    for _ in range(2):
        (state,) = numbers.run_batch(rows(1), backend=Numbers(), journal=tmp_path / "journal")
        assert [state.value(name) for name in "ijt"] == [42, 42, "42"]


def test_a_value_that_a_journal_cannot_hold_is_named(backend: Any, tmp_path: Path) -> None:
    @sl.function
    def holds(s: sl.State, number: int) -> None:
        s["odd"] = {number}

    with pytest.raises(TypeError, match="row 0: the journal cannot hold 'odd': Object of type set"):
        holds.run_batch(rows(1), backend=backend, journal=tmp_path / "journal")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["Oslo"], "row 0 is 'Oslo': give arguments by name"),
        ([{"number": 1}, 5], "row 1 is 5: give arguments by name"),
        ({"number": 1}, "rows is a list of rows, not one row"),
        ([{"number": 1, "temperature": 0}], "row 0: 'temperature' is an option of all rows"),
        ([{"numbre": 1}], "row 0: .*'numbre'"),
        ([{}], "row 0: missing a required argument: 'number'"),
    ],
)
def test_rows_that_no_run_could_take_are_refused(backend: Any, given: Any, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        program.run_batch(given, backend=backend)
    assert not backend.asked


def test_a_program_that_checks_its_arguments_is_run_all_the_same(backend: Any) -> None:
    class StrangeError(Exception):
        pass

    @sl.function
    def careful(s: sl.State, number: int) -> None:
        s += PREFIX
        assert isinstance(number, int), number
        if not isinstance(number, int):
            raise StrangeError
        s += str(number)

    states = careful.run_batch(rows(2), backend=backend)
    assert [state.text() for state in states] == [PREFIX + "0", PREFIX + "1"]
    assert backend.asked == [("warm", PREFIX, 0)]


def test_a_journal_of_something_else_is_refused(backend: Any, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    program.run_batch(rows(3), backend=backend, journal=path)
    with pytest.raises(ValueError, match=r"row 1 of .* had other arguments"):
        program.run_batch([{"number": 0}, {"number": 5}, {"number": 2}], backend=backend, journal=path)
    with pytest.raises(ValueError, match=r"row 2 of .* had other arguments"):
        program.run_batch(rows(2), backend=backend, journal=path)
    with pytest.raises(ValueError, match="or of other options"):
        program.run_batch(rows(3), backend=backend, journal=path, temperature=0)
    (tmp_path / "other").write_text("no json\n")
    with pytest.raises(ValueError, match="is none"):
        program.run_batch(rows(3), backend=backend, journal=tmp_path / "other")


def test_a_journal_that_another_run_is_writing_is_refused(backend: Any, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    held = Journal(path, "another", {})
    with pytest.raises(ValueError, match="another process is writing"):
        program.run_batch(rows(1), backend=backend, journal=path)
    held.close()
    assert not [kind for kind, _, _ in backend.asked if kind == "generate"]


def test_failed_rows_are_in_the_journal_where_errors_are_returned(backend: Any, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"

    @sl.function
    def some_fail(s: sl.State, text: str) -> None:
        s += text + sl.gen("answer")

    batch = [{"text": "a"}, {"text": "no!"}]
    for _ in range(2):
        states = some_fail.run_batch(batch, backend=backend, journal=path, errors="return")
        assert states[0].error() is None and "the model refuses" in str(states[1].error())
    assert len(backend.asked) == 2
    with pytest.raises(sl.ProgramError, match="row 1"):
        some_fail.run_batch(batch, backend=backend, journal=path)
    assert len(backend.asked) == 3
