"""Conversations from files, JSON lines or ShareGPT's format, in an order that the seed draws, again and again."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from sapwood.bench.data.conversation import Ask, Conversation, Conversations, Prompt
from sapwood.bench.data.json_lines import DataError, read_json_lines, read_text, whole

_CHARACTERS_A_TOKEN = 4.0


@lru_cache(maxsize=2)
def read_prompts(path: Path, max_tokens: int) -> tuple[Conversation, ...]:
    """Reads JSON lines.

    Args:
        path: Each line has ``prompt`` (a text) or ``messages`` (as in OpenAI's API); it may have ``max_tokens`` and
            ``json_schema`` (an object).
        max_tokens: For lines that do not say it.

    Raises:
        DataError: The file is of no use.
    """
    conversations = []
    for place, found in read_json_lines(path):
        prompt = _prompt_of(place, found)
        schema = found.get("json_schema")
        if schema is not None and not isinstance(schema, dict):
            raise DataError(f"{place}: json_schema must be an object")
        most = whole(place, found, "max_tokens") if "max_tokens" in found else max_tokens
        ask = Ask(prompt, most, "" if schema is None else json.dumps(schema))
        conversations.append(Conversation((ask,)))
    return tuple(conversations)


def _prompt_of(place: str, found: dict[str, Any]) -> Prompt:
    prompt, messages = found.get("prompt"), found.get("messages")
    if (prompt is None) == (messages is None):
        raise DataError(f"{place}: give prompt or messages")
    if prompt is not None:
        if not isinstance(prompt, str) or not prompt:
            raise DataError(f"{place}: prompt must be a text")
        return prompt
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise DataError(f"{place}: messages must be an array of objects")
    if any(not isinstance(each.get("role"), str) for each in messages):
        raise DataError(f"{place}: messages: each needs a role")
    return messages


@lru_cache(maxsize=2)
def read_sharegpt(path: Path, turns: int, tokens_a_word: float | None = None) -> tuple[Conversation, ...]:
    """Reads conversations in ShareGPT's format: ``[{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}]``.

    An answer's ``max_tokens`` is about what the answer in the file comes to.

    Args:
        path: A JSON array, or JSON lines.
        turns: How many turns of each are asked.
        tokens_a_word: How many tokens a word comes to; None: a token is taken for four characters.

    Raises:
        DataError: The file is of no use.
    """
    text = read_text(path)
    entries: list[tuple[str, Any]]
    if text.lstrip().startswith("["):
        try:
            entries = [(f"{path}: entry {number}", entry) for number, entry in enumerate(json.loads(text))]
        except ValueError as error:
            raise DataError(f"{path}: not JSON: {error}") from None
    else:
        entries = list(read_json_lines(path))
    found = [Conversation(asks) for place, entry in entries if (asks := _turns_of(place, entry, turns, tokens_a_word))]
    if not found:
        raise DataError(f"{path}: no conversation begins with a human's turn and its answer")
    return tuple(found)


def _turns_of(place: str, entry: Any, turns: int, tokens_a_word: float | None) -> tuple[Ask, ...]:
    """The first turns of an entry that are a question and its answer; none of an entry that begins otherwise."""
    said = (entry.get("conversations") or entry.get("conversation")) if isinstance(entry, dict) else None
    if not isinstance(said, list) or not all(isinstance(each, dict) for each in said):
        raise DataError(f"{place}: conversations must be an array of objects")
    said = [each for each in said if each.get("from") != "system"]
    asks: list[Ask] = []
    for question, answer in list(zip(said[::2], said[1::2], strict=False))[:turns]:
        if question.get("from") not in ("human", "user") or answer.get("from") not in ("gpt", "chatgpt", "assistant"):
            break
        asked, answered = question.get("value"), answer.get("value")
        if not isinstance(asked, str) or not isinstance(answered, str) or not asked or not answered:
            break
        asks.append(Ask(asked, _tokens(answered, tokens_a_word)))
    return tuple(asks)


def _tokens(text: str, tokens_a_word: float | None) -> int:
    tokens = len(text) / _CHARACTERS_A_TOKEN if tokens_a_word is None else len(text.split()) * tokens_a_word
    return max(1, round(tokens))


def shuffled(conversations: Sequence[Conversation], seed: int) -> Conversations:
    """The conversations in an order drawn from ``seed``, again and again."""
    draw = random.Random(f"file {seed}")
    while True:
        yield from draw.sample(conversations, len(conversations))
