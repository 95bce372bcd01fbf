"""What a mock worker takes for its answers, and what it finds cached: the same behind HTTP and behind gRPC."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from sapwood_common.contract.page_hash import hash_run

BLOCK = 64
"""Characters."""
WORD = " tok"
"""What it says, again and again."""
MOST_HELD = 16_384
"""Tokens of a prompt, and of an answer, that are looked at."""


class Engine:
    """Times and cache.

    Args:
        blocks: Blocks the cache holds.
        base: Seconds a prefill takes.
        per_block: Seconds each block not held adds.
        pace: Seconds between two tokens; 0 sends all at once.
    """

    def __init__(self, blocks: int, base: float, per_block: float, pace: float) -> None:
        self._blocks, self._base, self._per_block, self._pace = blocks, base, per_block, pace
        self._held: OrderedDict[bytes, None] = OrderedDict()
        self._busy_until: dict[str, float] = {}
        """By tenant."""
        self._steps: list[Callable[[], bool]] = []
        self._stepping = False
        self.requests = self.asked = self.hits = self.running = 0

    def prefill(self, prompt: bytes, tokens: int, tenant: str = "") -> tuple[float, int]:
        """Takes a prompt: the seconds until its first token, and the blocks that were held.

        Tenants that have prompts to prefill share the time equally, as with a real worker.
        """
        # Of very long ones the beginning: to hash a million tokens at once would keep the heartbeats waiting.
        prompt = prompt[: MOST_HELD * len(WORD)]
        answer = WORD.encode() * min(max(0, tokens - 1), MOST_HELD)
        both = hash_run(b"", prompt + answer, BLOCK)
        hashes = both[: len(prompt) // BLOCK]
        held = next((index for index, page in enumerate(hashes) if page not in self._held), len(hashes))
        self.requests += 1
        self.asked += len(hashes)
        self.hits += held
        for page in reversed(both):
            self._held[page] = None
            self._held.move_to_end(page)
        while len(self._held) > self._blocks:
            self._held.popitem(last=False)
        cost = self._base + self._per_block * (len(hashes) - held)
        if cost == 0:
            return 0.0, held
        now = asyncio.get_running_loop().time()
        self._busy_until = {each: until for each, until in self._busy_until.items() if until > now}
        begin = self._busy_until.setdefault(tenant, now)
        self._busy_until[tenant] = begin + cost * len(self._busy_until)
        return self._busy_until[tenant] - now, held

    def run(
        self,
        delay: float,
        tokens: int,
        emit: Callable[[int, bool], bool],
        prompt: bytes = b"",
        *,
        together: bool = False,
    ) -> None:
        """Calls ``emit(tokens, last)`` as they come, after ``delay`` seconds, until the last or until it says no.

        Args:
            delay: Seconds until the first.
            tokens: How many.
            emit: Takes them.
            prompt: It may ask for something else.
            together: Those that come at once are emitted in one call.
        """
        loop = asyncio.get_running_loop()
        if prompt.startswith(b"idle"):
            loop.call_later(delay, emit, 1, False)
            return
        if prompt.startswith(b"slow"):
            loop.call_later(delay, self.run, 0.0, tokens, lambda count, last: emit(1000, last))
            return
        if delay:
            loop.call_later(delay, partial(self.run, 0.0, tokens, emit, together=together))
            return
        if together and not self._pace:
            emit(tokens, True)
            return
        if not self._pace:
            for number in range(tokens):
                if not emit(1, number == tokens - 1):
                    return
            return
        left = tokens

        def step() -> bool:
            nonlocal left
            left -= 1
            return emit(1, left == 0) and left > 0

        self._steps.append(step)
        if not self._stepping:
            self._stepping = True
            loop.call_later(self._pace, self._step, loop.time() + self._pace)

    def _step(self, due: float) -> None:
        self._steps = [step for step in self._steps if step()]
        self._stepping = bool(self._steps)
        if self._stepping:
            loop = asyncio.get_running_loop()
            due = max(due + self._pace, loop.time())
            loop.call_at(due, self._step, due)

    def reset(self) -> None:
        self._held.clear()
        self.requests = self.asked = self.hits = 0

    def stats(self) -> dict[str, int]:
        return {"requests": self.requests, "asked": self.asked, "hits": self.hits, "running": self.running}
