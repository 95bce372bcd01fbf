"""Items of tasks, as a file has them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sapwood.bench.data.json_lines import DataError, read_json_lines, whole
from sapwood.evaluation.benchmarks import fields_of, read_csv

Match = Literal["exact", "regex"]


@dataclass(frozen=True, slots=True)
class Choice:
    """A question whose answer is the likeliest of some.

    Attributes:
        task: The task that it belongs to.
        prompt: The question.
        choices: The answers.
        right: Which of them is right, from 0.
    """

    task: str
    prompt: str
    choices: tuple[str, ...]
    right: int

    @property
    def example(self) -> str:
        """The right answer."""
        return self.choices[self.right]


@dataclass(frozen=True, slots=True)
class Open:
    """A question whose answer is generated.

    Attributes:
        task: The task that it belongs to.
        prompt: The question.
        answers: Right answers: texts, or expressions; one of them is found in the answer.
        match: Which of the two.
        extract: A regular expression; its last match in the answer (the first group, if it has one) is compared. Empty compares
            the whole answer.
        max_tokens: The most tokens of the answer.
        stop: The answer ends before the first of these.
        example: An answer to show, where the item is an example for others.
    """

    task: str
    prompt: str
    answers: tuple[str, ...]
    match: Match
    extract: str
    max_tokens: int
    stop: tuple[str, ...]
    example: str

    def is_right(self, answer: str) -> bool:
        """Whether an answer is."""
        if self.extract:
            found = list(re.finditer(self.extract, answer))
            if not found:
                return False
            answer = found[-1][1 if found[-1].re.groups else 0] or ""
        if self.match == "regex":
            return any(re.search(pattern, answer) for pattern in self.answers)
        return answer.strip() in (right.strip() for right in self.answers)


Item = Choice | Open


def read_items(path: Path, max_tokens: int) -> list[Item]:
    """Reads JSON lines, of items or of a well-known benchmark, or MMLU's CSV; docs/benchmarking.md says which fields they have.

    Args:
        path: The file; its name is that of items that name no task.
        max_tokens: For items that do not say it.

    Raises:
        DataError: The file is of no use.
    """
    if path.suffix == ".csv":
        return [_item_of(place, found, path.stem, max_tokens) for place, found in read_csv(path)]
    lines = read_json_lines(path)
    return [_item_of(place, fields_of(place, found), path.stem, max_tokens) for place, found in lines]


def _item_of(place: str, found: dict[str, Any], task: str, max_tokens: int) -> Item:
    known = {"task", "prompt", "choices", "answer", "match", "extract", "max_tokens", "stop", "example"}
    if unknown := sorted(found.keys() - known):
        raise DataError(f"{place}: {unknown[0]} is none of {', '.join(sorted(known))}")
    task, prompt = _text(place, found, "task", task), _text(place, found, "prompt")
    if "choices" in found:
        if other := sorted(found.keys() - {"task", "prompt", "choices", "answer"}):
            raise DataError(f"{place}: {other[0]} does not go with choices")
        choices = _texts(place, found, "choices")
        return Choice(task, prompt, choices, _right(place, found.get("answer"), choices))
    match = found.get("match", "exact")
    if match not in ("exact", "regex"):
        raise DataError(f"{place}: match is exact or regex, not {match!r}")
    answers = _texts(place, found, "answer")
    extract = _text(place, found, "extract", "")
    for pattern in (*(answers if match == "regex" else ()), extract):
        try:
            re.compile(pattern)
        except re.error as error:
            raise DataError(f"{place}: {pattern!r} is no regular expression: {error}") from None
    return Open(
        task=task,
        prompt=prompt,
        answers=answers,
        match=match,
        extract=extract,
        max_tokens=whole(place, found, "max_tokens") if "max_tokens" in found else max_tokens,
        stop=_texts(place, found, "stop") if "stop" in found else (),
        example=_text(place, found, "example", answers[0] if match == "exact" else ""),
    )


def _text(place: str, found: dict[str, Any], name: str, default: str | None = None) -> str:
    value = found.get(name, default)
    if not isinstance(value, str) or (default is None and not value):
        raise DataError(f"{place}: {name} must be a text")
    return value


def _texts(place: str, found: dict[str, Any], name: str) -> tuple[str, ...]:
    """A text, or an array of them."""
    value = found.get(name)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise DataError(f"{place}: {name} must be a text or an array of texts")
    return tuple(texts)


def _right(place: str, answer: Any, choices: Sequence[str]) -> int:
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise DataError(f"{place}: answer must be one of the choices, or its number from 0")
    return answer
