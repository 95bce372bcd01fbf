"""Items from files, and how often a served model is right about them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sapwood.bench.data.conversation import Ask
from sapwood.bench.data.json_lines import DataError
from sapwood.bench.targets.open_target import Where, open_target
from sapwood.bench.targets.record import Record
from sapwood.bench.targets.target import Sampling
from sapwood.cli.main import main
from sapwood.evaluation.evaluate import Evaluation, Scored, joined
from sapwood.evaluation.figures import accuracies
from sapwood.evaluation.items import Choice, Item, Open, read_items
from sapwood_common.errors import InternalError
from sapwood_testing.router.fake_tokenizer import encode


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "letters.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(folder: Path, line: Any) -> Item:
    (item,) = read_items(write(folder, line), 9)
    return item


def test_items_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, {"prompt": "q", "choices": ["a", "b"], "answer": "b"}) == Choice(
        "letters", "q", ("a", "b"), 1
    )
    assert read(tmp_path, {"task": "t", "prompt": "q", "choices": ["a"], "answer": 0}) == Choice("t", "q", ("a",), 0)
    assert read(tmp_path, {"prompt": "q", "answer": ["a", "b"], "stop": "\n", "max_tokens": 3}) == Open(
        "letters", "q", ("a", "b"), "exact", "", 3, ("\n",), "a"
    )
    assert read(tmp_path, {"prompt": "q", "answer": "a+", "match": "regex"}) == Open(
        "letters", "q", ("a+",), "regex", "", 9, (), ""
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"answer": "a"}, "prompt must be a text"),
        ({"prompt": "q"}, "answer must be a text or an array of texts"),
        ({"prompt": "q", "answer": []}, "answer must be a text or an array of texts"),
        ({"prompt": "q", "choices": ["a"], "answer": 1}, "answer must be one of the choices"),
        ({"prompt": "q", "choices": ["a"], "answer": "b"}, "answer must be one of the choices"),
        ({"prompt": "q", "choices": ["a"], "answer": 0, "stop": "x"}, "stop does not go with choices"),
        ({"prompt": "q", "answer": "a", "match": "fuzzy"}, "match is exact or regex"),
        ({"prompt": "q", "answer": "(", "match": "regex"}, "is no regular expression"),
        ({"prompt": "q", "answer": "a", "extract": "("}, "is no regular expression"),
        ({"prompt": "q", "answer": "a", "max_tokens": "3"}, "max_tokens must be a whole number"),
        ({"prompt": "q", "answer": "a", "target": "a"}, "target is none of"),
    ],
)
def test_an_item_that_is_wrong_is_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"letters.jsonl:2: .*{message}"):
        read_items(write(tmp_path, {"prompt": "q", "answer": "a"}, line), 9)


@pytest.mark.parametrize(
    ("fields", "answer", "right"),
    [
        ({"answer": "Paris"}, " Paris\n", True),
        ({"answer": "Paris"}, "Paris, of course", False),
        ({"answer": ["5", "five"]}, "five", True),
        ({"answer": "5", "extract": "-?[0-9]+"}, "2 + 3 is 5.", True),
        ({"answer": "5", "extract": "#### ([0-9]+)"}, "5 #### 6", False),
        ({"answer": "5", "extract": "#### ([0-9]+)"}, "no number", False),
        ({"answer": "(?i)red|green", "match": "regex"}, "I like Green.", True),
        ({"answer": "^red", "match": "regex"}, "dark red", False),
    ],
)
def test_answers_are_compared_as_the_item_says(tmp_path: Path, fields: Any, answer: str, right: bool) -> None:
    item = read(tmp_path, {"prompt": "q", **fields})
    assert isinstance(item, Open)
    assert item.is_right(answer) is right


def test_a_tasks_accuracy_has_its_standard_error() -> None:
    items = [Choice("a", "q", ("x",), 0), Open("b", "q", ("x",), "exact", "", 1, (), "x")]
    scored = [Scored(items[0], "x", right, not right) for right in (True, True, True, False)]
    found = accuracies([*scored, Scored(items[0], error="timeout"), Scored(items[1], "x", True, True)])
    assert found["a"].accuracy == 0.75
    assert found["a"].standard_error == pytest.approx((0.75 * 0.25 / 3) ** 0.5)
    assert (found["a"].accuracy_by_length, found["a"].items, found["a"].failed, found["a"].error) == (
        0.25,
        4,
        1,
        "timeout",
    )
    assert (found["b"].accuracy, found["b"].standard_error, found["b"].accuracy_by_length) == (1.0, None, None)
    assert accuracies([Scored(items[0], error="timeout")])["a"].accuracy is None


def test_prompt_and_answer_are_joined_by_one_space() -> None:
    assert [joined("a", "b"), joined("a ", "b"), joined("a", " b"), joined("a\n", "b")] == ["a b", "a b", "a b", "a\nb"]


async def evaluate(served: Any, kind: str, items: list[Item], api: Any = "completions", **fields: Any) -> list[Scored]:
    where = Where(served.url, api=api) if kind == "http" else Where(None, served.grpc, api=api)
    target = open_target(where, Sampling())
    try:
        return await Evaluation(target, api, **fields).run(items)
    finally:
        await target.close()


@pytest.mark.parametrize("kind", ["http", "grpc"])
async def test_the_likeliest_choice_is_the_answer(served: Any, kind: str) -> None:
    # To the fake worker a token is the less likely the greater it is: "b" beats "c", a short choice beats a long one,
    # and for each byte of their length "aa" beats "b".
    items: list[Item] = [
        Choice("t", "q:", ("c", "b", "d"), 1),
        Choice("t", "q:", ("c", "b"), 0),
        Choice("t", "q:", ("b", "aa"), 1),
    ]
    scored = {each.item: each for each in await evaluate(served, kind, items)}
    assert [(scored[item].answer, scored[item].right, scored[item].right_by_length) for item in items] == [
        ("b", True, True),
        ("b", False, False),
        ("b", False, True),
    ]


@pytest.mark.parametrize("kind", ["http", "grpc"])
async def test_probabilities_are_those_of_the_texts_tokens_but_the_first(served: Any, kind: str) -> None:
    target = open_target(Where(served.url) if kind == "http" else Where(None, served.grpc), Sampling())
    await target.connect()
    record = Record()
    found = await target.score("abc", record)
    await target.close()
    assert not record.error
    assert found == [-token / 8 for token in encode("abc")[1:]]


@pytest.mark.parametrize(("kind", "api"), [("http", "completions"), ("http", "chat"), ("grpc", "completions")])
async def test_generated_answers_follow_the_examples(served: Any, kind: str, api: Any) -> None:
    items: list[Item] = [Open("t", prompt, ("no",), "exact", "", 60, ("!",), "yes") for prompt in ("one?", "two?")]
    (scored,) = await evaluate(served, kind, items, api, shots=1)
    # The fake worker says the prompt again.
    if api == "chat":
        assert scored.answer == "<user>one?<assistant>yes<user>two?<assistant>"
    else:
        assert scored.answer == "one? yes\n\ntwo?"
    assert not scored.right
    (stopped,) = await evaluate(served, kind, [Open("t", "a!b", ("a",), "regex", "", 60, ("!",), "")], api)
    assert stopped.answer.endswith("a") and stopped.right


async def test_items_that_fail_are_told_and_not_counted(served: Any) -> None:
    for worker in served.workers:
        worker.script.error = InternalError("it broke")
        worker.script.fail_after = 0
    items: list[Item] = [Choice("a", "q", ("x",), 0), Open("b", "q", ("x",), "exact", "", 5, (), "x")]
    found = accuracies(await evaluate(served, "http", items))
    assert all((each.items, each.failed, each.accuracy) == (0, 1, None) for each in found.values())
    assert all("it broke" in each.error for each in found.values())


async def test_what_cannot_be_evaluated_is_refused(served: Any) -> None:
    choice, unshown = Choice("a", "q", ("x",), 0), Open("a", "q", ("x",), "regex", "", 5, (), "")
    for items, fields, message in (
        ([choice], {"shots": 1}, "no item left"),
        ([unshown, choice], {"shots": 1}, "needs the field example"),
        ([choice], {"api": "chat"}, "--api completions only"),
    ):
        with pytest.raises(DataError, match=message):
            await evaluate(served, "http", items, **fields)  # type: ignore[arg-type]


async def test_an_evaluation_that_is_stopped_returns_what_was_scored() -> None:
    class Second:
        """Answers one item; while the second is asked the evaluation is stopped."""

        asked = 0

        async def connect(self) -> str:
            return "second"

        async def ask(self, ask: Ask, record: Record) -> None:
            self.asked += 1
            if self.asked == 2:
                evaluation.stop()
                await asyncio.Event().wait()
            record.pieces.append("x")

    evaluation = Evaluation(Second(), "completions", concurrency=1)  # type: ignore[arg-type]
    scored = await evaluation.run([Open("t", "q", ("x",), "exact", "", 5, (), "x")] * 3)
    assert [each.right for each in scored] == [True]
    assert evaluation.stopped


async def test_the_command_prints_a_table_and_writes_figures_and_answers(
    served: Any, sapwood: Any, tmp_path: Path
) -> None:
    path = write(
        tmp_path,
        {"prompt": "q:", "choices": ["c", "b"], "answer": "b"},
        {"prompt": "q:", "choices": ["c", "b"], "answer": "c"},
        {"task": "echo", "prompt": "abc", "answer": "abc"},
    )
    told, records = tmp_path / "json", tmp_path / "records"
    code, out, err = await sapwood(
        *("eval", str(path), "--url", served.url, "--json", str(told), "--records", str(records))
    )
    assert code == 0, err
    assert [line.split()[:4] for line in out.splitlines()[1:]] == [
        ["echo", "1", "1.000", "-"],
        ["letters", "2", "0.500", "0.500"],
    ]
    found = json.loads(told.read_text())
    assert (found["model"], found["tasks"]["letters"]["accuracy"]) == ("fake", 0.5)
    answers = [json.loads(line) for line in records.read_text().splitlines()]
    assert sorted((each["answer"], each["right"]) for each in answers) == [("abc", True), ("b", False), ("b", True)]


def test_a_file_that_is_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(write(tmp_path, {"prompt": 1}))]) == 2
    assert "letters.jsonl:1: prompt must be a text" in capsys.readouterr().err
