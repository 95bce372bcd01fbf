"""Lines of well-known benchmarks, as their files have them, turned into the fields of an item.

The fields of a line say which benchmark it is of. Prompts follow the usual harnesses: a choice among letters for MMLU, among
texts for ARC and HellaSwag, the last number of the answer for GSM8K.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sapwood.bench.data.json_lines import DataError, read_text

Fields = dict[str, Any]
_NUMBER = r"-?[0-9][0-9,]*(?:\.[0-9]+)?"
_MOST_TOKENS = 512
"""Of an answer that reasons in steps."""
_LETTERS = "ABCDEFGHIJ"


def fields_of(place: str, found: Fields) -> Fields:
    """An item's fields; a line that is of no benchmark here is returned as it is.

    Args:
        place: The file and the line, for errors.
        found: The line's object.

    Raises:
        DataError: The line is of a benchmark that cannot be scored, or something in it is not as the benchmark has it.
    """
    if found.keys() >= {"prompt", "test", "entry_point"}:
        raise DataError(
            f"{place}: HumanEval's answers are programs, which would have to be run; they are not scored here"
        )
    for needed, read in _FORMATS:
        if found.keys() >= needed and "prompt" not in found:
            try:
                return read(found)
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                what = ", ".join(sorted(needed))
                raise DataError(f"{place}: a line with {what} is not as its benchmark has it ({error!r})") from error
    return found


def read_csv(path: Path) -> list[tuple[str, Fields]]:
    """The lines of a file of MMLU: a question, its answers and the letter of the right one, without a head.

    Raises:
        DataError: The file cannot be read, is empty, or a line is no such one.
    """
    lines = []
    for number, row in enumerate(csv.reader(io.StringIO(read_text(path))), 1):
        place = f"{path}:{number}"
        question, *choices, letter = row if len(row) > 3 else ("", "", "")
        if not question or not all(choices) or letter not in _LETTERS[: len(choices)] or not letter:
            raise DataError(f"{place}: a line has a question, its answers and the letter of the right one")
        lines.append((place, _letters(question, choices, _LETTERS.index(letter))))
    if not lines:
        raise DataError(f"{path}: nothing in it")
    return lines


def _letters(question: str, choices: list[str], right: int) -> Fields:
    shown = "".join(f"{letter}. {choice}\n" for letter, choice in zip(_LETTERS, choices, strict=False))
    return {"prompt": f"{question.strip()}\n{shown}Answer:", "choices": list(_LETTERS[: len(choices)]), "answer": right}


def _mmlu(found: Fields) -> Fields:
    answer = found["answer"]
    right = answer if isinstance(answer, int) else _LETTERS.index(answer)
    named = {"task": found["subject"]} if found.get("subject") else {}
    return named | _letters(found["question"], found["choices"], right)


def _gsm8k(found: Fields) -> Fields:
    solution, marker, number = found["answer"].rpartition("####")
    if not marker:
        raise ValueError("the answer has no ####")
    number = number.strip().replace(",", "")
    whole, _, part = number.partition(".")
    grouped = f"{int(whole):,}" + (f".{part}" if part else "")
    return {
        "prompt": f"Question: {found['question'].strip()}\nAnswer:",
        "answer": list(
            dict.fromkeys((number, grouped, *(() if part else (f"{number}.0", f"{number}.00", f"{grouped}.00"))))
        ),
        "extract": _NUMBER,
        "max_tokens": _MOST_TOKENS,
        "stop": ["Question:"],
        "example": f"{solution.strip()}\n#### {number}",
    }


def _arc(found: Fields) -> Fields:
    question = found["question"]
    if isinstance(question, dict):  # as AI2 publishes it
        choices, question = question["choices"], question["stem"]
        texts, labels = [each["text"] for each in choices], [each["label"] for each in choices]
    else:  # as the hub has it
        texts, labels = list(found["choices"]["text"]), list(found["choices"]["label"])
    return {
        "prompt": f"Question: {question.strip()}\nAnswer:",
        "choices": texts,
        "answer": labels.index(found["answerKey"]),
    }


def _hellaswag(found: Fields) -> Fields:
    about = f"{found['activity_label']}: " if found.get("activity_label") else ""
    return {"prompt": about + found["ctx"], "choices": list(found["endings"]), "answer": int(found["label"])}


_FORMATS: tuple[tuple[frozenset[str], Callable[[Fields], Fields]], ...] = (
    (frozenset({"ctx", "endings", "label"}), _hellaswag),
    (frozenset({"question", "answerKey"}), _arc),
    (frozenset({"question", "choices", "answer"}), _mmlu),
    (frozenset({"question", "answer"}), _gsm8k),
)
"""The fields that tell a benchmark's line, the most telling first, and what reads it."""
