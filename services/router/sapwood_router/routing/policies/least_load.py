"""The worker with the least to do, by requests or by prompt tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from sapwood_router.routing.policies.base import Choice, Forgetful, PromptPages, load_key
from sapwood_router.routing.shortlist import DRAWS, draw
from sapwood_router.routing.worker_view import WorkerView


class _Least(Forgetful):
    """The least worker by a key. O(workers); of a large fleet the least of some drawn ones, O(1)."""

    def __init__(self, reason: str, key: Callable[[WorkerView], tuple[float, ...]], rng: random.Random | None) -> None:
        self._reason = reason
        self._key = key
        self._rng = rng or random.Random()

    def shortlist(self, addresses: Sequence[str], page_size: int, prompt: PromptPages) -> Sequence[str]:
        return draw(addresses, self._rng, 4 * DRAWS)

    def choose(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Choice:
        return Choice(min(workers, key=self._key).address, self._reason)


class LeastLoad(_Least):
    """The worker with the least to do, prompts and answers; see :func:`~sapwood_router.routing.policies.base.load_key`.

    Args:
        rng: Draws.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        super().__init__("least_load", load_key, rng)


class LeastTokens(_Least):
    """The worker with the fewest prompt tokens still to compute, then that with the fewest requests: for prompts of very
    different lengths, such as documents to embed.

    Args:
        rng: Draws.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        super().__init__("least_tokens", _tokens_key, rng)


def _tokens_key(view: WorkerView) -> tuple[float, ...]:
    return (view.queued_tokens, view.requests, view.recent_work)
