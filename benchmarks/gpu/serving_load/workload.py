"""What is asked for, and when."""

from __future__ import annotations

import random

import msgspec


class Planned(msgspec.Struct, frozen=True):
    """A request: its prompt, how many tokens it is to generate, when it is sent, in seconds after the start, and how hot."""

    prompt: list[int]
    outputs: int
    at: float = 0.0
    temperature: float = 0.0


def offline(count: int, vocabulary: int, *, shortest: int = 100, longest: int = 1024, seed: int = 0) -> list[Planned]:
    """All at once: prompts and outputs of ``shortest`` to ``longest`` tokens; with 256 it is ``offline256``."""
    draw = random.Random(seed)
    shapes = [(draw.randint(shortest, longest), draw.randint(shortest, longest)) for _ in range(count)]
    return [Planned(_ids(draw, prompt, vocabulary), outputs) for prompt, outputs in shapes]


def poisson(requests: list[Planned], rate: float, vocabulary: int, *, fresh: bool, seed: int = 1) -> list[Planned]:
    """Requests with a quarter of their outputs, ``rate`` of them a second on average.

    Args:
        requests: Whose lengths, and prompts, they have.
        rate: Arrivals a second.
        vocabulary: Ids are drawn as for ``requests``.
        fresh: With other prompts of the same lengths, so that no prefix cache knows them.
        seed: Of arrival times and fresh prompts.
    """
    draw = random.Random(seed)
    at, planned = 0.0, []
    for request in requests:
        at += draw.expovariate(rate)
        prompt = _ids(draw, len(request.prompt), vocabulary) if fresh else request.prompt
        planned.append(Planned(prompt, max(1, request.outputs // 4), at))
    return planned


def one_by_one(count: int, prompt: int, outputs: int, vocabulary: int, *, apart: float, seed: int) -> list[Planned]:
    """Single requests, so many seconds apart."""
    draw = random.Random(seed)
    return [Planned(_ids(draw, prompt, vocabulary), outputs, number * apart) for number in range(count)]


def _ids(draw: random.Random, count: int, vocabulary: int) -> list[int]:
    return [draw.randint(10, min(99_999, vocabulary - 1)) for _ in range(count)]
