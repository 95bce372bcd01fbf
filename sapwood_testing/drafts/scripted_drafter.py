"""A drafter that is told what the model will say, and gets some of it wrong: a dial for how much of a draft is right."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.speculation.drafter import HostDrafter


class ScriptedDrafter(HostDrafter):
    """Implements :class:`~sapwood_worker.core.scheduler.speculation.drafter.Drafter`.

    Args:
        answer: The output of a request, from its first token on; may be endless.
        chance: Makes drafts shorter, and wrong in places.
        right: Share of the drafted tokens that are the answer's.
        vocab_size: Wrong ones are below it.
    """

    name = "scripted"

    def __init__(
        self, answer: Callable[[Request], Iterator[int]], chance: random.Random, right: float, vocab_size: int
    ) -> None:
        self._answer = answer
        self._chance = chance
        self._right = right
        self._vocab_size = vocab_size

    def begin(self, request: Request) -> ScriptedRow:
        return ScriptedRow(request, self._answer(request), self._wrong)

    def _wrong(self, tokens: Sequence[int]) -> list[int]:
        chance = self._chance
        tokens = tokens[: chance.randint(0, len(tokens))]
        return [each if chance.random() < self._right else chance.randrange(self._vocab_size) for each in tokens]


class ScriptedRow:
    """Implements :class:`~sapwood_worker.core.scheduler.request.RowDrafter`.

    Args:
        request: The request.
        answer: Its output.
        wrong: Spoils a draft.
    """

    def __init__(self, request: Request, answer: Iterator[int], wrong: Callable[[Sequence[int]], list[int]]) -> None:
        self._request = request
        self._answer = answer
        self._known: list[int] = []
        self._wrong = wrong

    def follow(self) -> tuple[int, int]:
        return 8, 0  # always sure

    def propose(self, unknown: int, most: int) -> list[int]:
        start = self._request.generated + unknown
        for token in self._answer:
            self._known.append(token)
            if len(self._known) >= start + most:
                break
        return self._wrong(self._known[start : start + most])
