"""How much an engine in this program computes, without a network between: everything is asked at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from sapwood.bench.data.conversation import Ask
from sapwood.bench.targets.record import Record, clock
from sapwood.bench.targets.target import Sampling
from sapwood.errors import SapwoodError
from sapwood.generation import Answer


class EngineTarget:
    """Implements :class:`~sapwood.bench.targets.target.Asked` with whole answers, so that there are no times of first tokens.

    Args:
        generate: ``generate`` of a :class:`sapwood.AsyncEngine`.
        sampling: How all requests are sampled.
    """

    def __init__(self, generate: Callable[..., Awaitable[Answer]], sampling: Sampling) -> None:
        self._generate = generate
        self._sampling = sampling

    async def ask(self, ask: Ask, record: Record) -> None:
        options: dict[str, Any] = {"temperature": self._sampling.temperature, "ignore_eos": self._sampling.ignore_eos}
        if ask.max_tokens is not None:
            options["max_tokens"] = ask.max_tokens
        if ask.json_schema:
            options["json_schema"] = ask.json_schema
        record.sent = clock()
        try:
            answer = await self._generate(ask.prompt, **options)
        except SapwoodError as error:
            record.fail(error.status.name, str(error))
            return
        finally:
            record.ended = clock()
        record.pieces.append(answer.text)
        record.finish_reason = answer.finish_reason or ""
        if answer.usage is not None:
            record.prompt_tokens = answer.usage.prompt_tokens
            record.completion_tokens = answer.usage.completion_tokens
            record.cached_tokens = answer.usage.cached_tokens
