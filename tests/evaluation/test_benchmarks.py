"""Lines of well-known benchmarks become items with the prompts and right answers that harnesses use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sapwood.bench.data.json_lines import DataError
from sapwood.evaluation.items import Choice, Open, read_items


def read(folder: Path, line: Any, name: str = "test.jsonl") -> Any:
    path = folder / name
    path.write_text(line if isinstance(line, str) else json.dumps(line))
    (item,) = read_items(path, 9)
    return item


def test_a_line_of_mmlus_csv_is_a_choice_among_letters(tmp_path: Path) -> None:
    item = read(tmp_path, '"Which, of these?",one,"two, or three",four,five,B\n', "algebra_test.csv")
    prompt = "Which, of these?\nA. one\nB. two, or three\nC. four\nD. five\nAnswer:"
    assert item == Choice("algebra_test", prompt, ("A", "B", "C", "D"), 1)


@pytest.mark.parametrize("answer", [2, "C"])
def test_a_line_of_mmlus_json_names_its_subject(tmp_path: Path, answer: Any) -> None:
    line = {"question": "q?", "subject": "law", "choices": ["w", "x", "y", "z"], "answer": answer}
    assert read(tmp_path, line) == Choice("law", "q?\nA. w\nB. x\nC. y\nD. z\nAnswer:", ("A", "B", "C", "D"), 2)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("So 3 * 400 = 1,200 dollars.\n#### 1,200", True),
        ("It is 1200.", True),
        ("It is $1,200.00", True),
        ("1200 is wrong, it is 1201", False),
        ("no number", False),
    ],
)
def test_the_last_number_of_an_answer_to_gsm8k_counts(tmp_path: Path, answer: str, right: bool) -> None:
    item = read(tmp_path, {"question": "How many?", "answer": "3*400=<<3*400=1200>>1200\n#### 1,200"})
    assert isinstance(item, Open)
    assert (item.prompt, item.example) == ("Question: How many?\nAnswer:", "3*400=<<3*400=1200>>1200\n#### 1200")
    assert item.is_right(answer) is right


@pytest.mark.parametrize(
    "line",
    [
        {
            "id": "x",
            "question": {"stem": "Why?", "choices": [{"text": "a", "label": "1"}, {"text": "b", "label": "2"}]},
            "answerKey": "2",
        },
        {"id": "x", "question": "Why?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"},
    ],
)
def test_a_line_of_arc_is_a_choice_among_its_answers(tmp_path: Path, line: Any) -> None:
    assert read(tmp_path, line) == Choice("test", "Question: Why?\nAnswer:", ("a", "b"), 1)


def test_a_line_of_hellaswag_is_a_choice_among_endings(tmp_path: Path) -> None:
    line = {"activity_label": "Sailing", "ctx": "A boat", "endings": ["sinks.", "sails."], "label": "1", "ind": 4}
    assert read(tmp_path, line) == Choice("test", "Sailing: A boat", ("sinks.", "sails."), 1)


@pytest.mark.parametrize(
    ("line", "name", "message"),
    [
        ({"task_id": "HumanEval/0", "prompt": "def f():", "test": "", "entry_point": "f"}, "x.jsonl", "are programs"),
        ({"question": "q", "answer": "5"}, "x.jsonl", "no ####"),
        ({"question": "q", "choices": ["a", "b"], "answer": "Z"}, "x.jsonl", "is not as its benchmark has it"),
        ({"question": "q", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "B"}, "x.jsonl", "is not as"),
        ({"question": "q", "answerKey": "B"}, "x.jsonl", "is not as its benchmark has it"),
        ("question,a,b,Z\n", "x.csv", "x.csv:1: a line has a question"),
        ("", "x.csv", "nothing in it"),
    ],
)
def test_a_line_that_cannot_be_scored_is_named(tmp_path: Path, line: Any, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, line, name)
