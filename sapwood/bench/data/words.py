"""Prompts of about this many tokens, without the model's tokenizer: the server says how many tokens a word comes to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

_COMMON = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had an they
which one you were all her she there would their we him been has when who will no more if out so up said what
its about than into them can only other time new some could these two may first then do any like my now over
such our man me even most made after also did many off before must well back through years much where your way
down should because long each just state those people too mr how little good world make very year still see
own work men day get here old life both between being under three never know same last another while us might
great go come since against right came take used himself few house use place during high without again home
around small however found part school thought went say general once upon war every does got united left
number course until always away public something fact less though far put head think called set almost enough
end took government night system better four nothing told eyes city going look find asked knew point next
group big water business case young white room side days light hand door present order face
"""
WORDS = tuple(_COMMON.split())
"""Common English words, most of them one token of most models."""


class PromptMaker(Protocol):
    """Makes prompts of about this many tokens."""

    def make(self, random_: random.Random, tokens: int) -> str | list[int]:
        """A prompt of its own."""
        ...

    def join(self, parts: Sequence[str | list[int]]) -> str | list[int]:
        """The parts, one after the other."""
        ...


class WordMaker:
    """Common English words.

    Args:
        tokens_a_word: How many tokens a word comes to.
    """

    def __init__(self, tokens_a_word: float = 1.0) -> None:
        self._tokens_a_word = tokens_a_word

    def make(self, random_: random.Random, tokens: int) -> str:
        """Words at random."""
        count = max(1, round(tokens / self._tokens_a_word))
        return " ".join(random_.choices(WORDS, k=count))

    def join(self, parts: Sequence[str | list[int]]) -> str:
        """The texts with spaces between."""
        return " ".join(map(str, parts))


class TokenIdMaker:
    """Token ids, which have exactly the length that was asked for.

    Args:
        least: The smallest id.
        most: The largest; the model's vocabulary must have it.
    """

    def __init__(self, least: int, most: int) -> None:
        self._ids = range(least, most + 1)

    def make(self, random_: random.Random, tokens: int) -> list[int]:
        """Ids at random."""
        return random_.choices(self._ids, k=tokens)

    def join(self, parts: Sequence[str | list[int]]) -> list[int]:
        """The ids of all parts."""
        return [token for part in parts for token in part if isinstance(token, int)]
