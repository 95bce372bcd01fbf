"""One call for all that ask the same at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

AnswerT = TypeVar("AnswerT")


class SharedAnswers(Generic[AnswerT]):
    """Answers of calls under way, each by what it asks. Whoever is cancelled takes the call from nobody else."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, asyncio.Task[AnswerT]] = {}
        self._waiting: dict[Hashable, int] = {}

    async def get(self, key: Hashable, ask: Callable[[], Coroutine[Any, Any, AnswerT]]) -> AnswerT:
        """The answer to what ``key`` stands for; raises what ``ask`` does, which is called only if nobody waits for it."""
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = asyncio.get_running_loop().create_task(ask())
        self._waiting[key] = self._waiting.get(key, 0) + 1
        try:
            return await asyncio.shield(call)
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key], self._calls[key]
                call.cancel()  # does nothing to one that has ended
