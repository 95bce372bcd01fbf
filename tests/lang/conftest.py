"""A backend whose answers are a function of the prompt: what a program gives can be computed by hand."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

import pytest

from sapwood.lang.backends.base import Ability, Backend, Generated, Piece, Prompt, Usage
from sapwood.lang.choices import Scored


def answer_to(text: str) -> str:
    """What the model writes after a text; it refuses texts that end with a bang."""
    if text.endswith("!"):
        raise ValueError("the model refuses")
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f" {digest[:4]}.{digest[4:6]}"


def logprobs_of(text: str, choice: str) -> tuple[float, ...]:
    """How likely the letters of a choice are after a text."""
    digest = hashlib.sha256(text.encode()).digest()
    return tuple(-((ord(letter) * digest[0] + digest[1]) % 97) / 10 for letter in choice)


class Computed(Backend):
    """Answers by the two functions.

    Attributes:
        asked: The requests so far: kind, text, how many answers.
        running: Requests under way.
        released: States that have ended.
    """

    name = "the computed backend"
    abilities = frozenset(Ability) - {Ability.IMAGE, Ability.VIDEO}

    def __init__(self, template: Any = "plain") -> None:
        super().__init__(template)
        self.asked: list[tuple[str, str, int]] = []
        self.running = 0
        self.most_running = 0
        self.released: list[int] = []
        self.on_ask: Any = None

    async def _ask(self, kind: str, prompt: Prompt, count: int) -> None:
        self.asked.append((kind, prompt.text, count))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            waits = None if self.on_ask is None else self.on_ask(len(self.asked))
            if isinstance(waits, Awaitable):
                await waits
            for _ in range(len(prompt.text) % 4):  # answers overtake each other
                await asyncio.sleep(0)
        finally:
            self.running -= 1

    async def generate(self, prompt: Prompt, options: Any) -> Generated:
        count = options.get("n", 1)
        await self._ask("generate", prompt, count)
        text = answer_to(prompt.text)
        if options.get("stop") == ".":
            text = text.partition(".")[0]
        usage = Usage(len(prompt.text), 0, count * len(text))
        return Generated((text,) * count, usage, meta=({"finish_reason": "stop"},) * count)

    async def stream(self, prompt: Prompt, options: Any) -> AsyncIterator[Piece]:
        found = await self.generate(prompt, options)
        for letter in found.texts[0]:
            await asyncio.sleep(0)
            yield Piece(letter)
        yield Piece("", usage=found.usage, meta={"finish_reason": "stop"})

    async def score(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> tuple[list[Scored], Usage]:
        await self._ask("score", prompt, len(choices))
        alone = [logprobs_of("", choice) if unconditional else () for choice in choices]
        found = [
            Scored(choice, tuple(map(ord, choice)), logprobs_of(prompt.text, choice), each)
            for choice, each in zip(choices, alone, strict=True)
        ]
        return found, Usage(len(prompt.text))

    async def commit(self, prompt: Prompt) -> Usage:
        await self._ask("commit", prompt, 0)
        return Usage(len(prompt.text))

    async def warm(self, prompt: Prompt) -> None:
        await self._ask("warm", prompt, 0)

    async def release(self, states: Sequence[int]) -> None:
        self.released += states


@pytest.fixture
def backend() -> Computed:
    return Computed()


@pytest.fixture(scope="session")
def make_backend() -> type[Computed]:
    return Computed


@pytest.fixture(scope="session")
def oracle() -> Any:
    """The functions by which the backend answers."""
    return answer_to, logprobs_of
