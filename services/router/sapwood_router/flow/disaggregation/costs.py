"""The measured times of prefill, KV transfer and generation, from answered requests.

Each is learnt for a model, and what is old counts ever less: a fleet's load and network change. Nothing is assumed: before there
are measurements, nothing is weighed. Workers of all roles are taken to compute prompts equally fast: figures of each role differ
by who had the few slow first steps, and one worker got many more of 48 documents that came at once than the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable

_KEPT = 0.98
"""The factor by which each sample fades the weight of earlier ones: about fifty count."""
PROBE_SECONDS, _KEPT_STALE = 30.0, 0.5
"""If no hand-over was measured for so long, what was measured may no longer hold: the next one leaves this of its weight. So a
few of them are enough to disprove slow first ones, as when connections are opened."""
_FLAT = 1e-3
"""Sizes that differ less than this, as a share of their mean squared, tell nothing of what size does."""
_FIRST = 8
"""So many hand-overs are measured before they are believed to be known."""


class LinearFit:
    """Seconds as a fixed part and a part that grows with size, fitted by least squares, late samples counting most. O(1)."""

    def __init__(self) -> None:
        self._weight = self._size = self._seconds = self._squares = self._products = 0.0

    @property
    def known(self) -> bool:
        """Whether there was a sample."""
        return self._weight > 0

    def add(self, size: float, seconds: float, kept: float = _KEPT) -> None:
        """Takes a sample, which leaves the share ``kept`` of the weight of those before it."""
        self._weight = self._weight * kept + 1
        self._size = self._size * kept + size
        self._seconds = self._seconds * kept + seconds
        self._squares = self._squares * kept + size * size
        self._products = self._products * kept + size * seconds

    def at(self, size: float) -> float:
        """Seconds that something of that size takes; 0 without a sample. Neither part is negative."""
        if not self.known:
            return 0.0
        mean_size, mean = self._size / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - mean_size**2
        if spread > _FLAT * mean_size**2:
            slope = max(0.0, (self._products / self._weight - mean_size * mean) / spread)
            fixed = mean - slope * mean_size
            if fixed >= 0:
                return fixed + slope * size
        return mean * size / mean_size if mean_size else mean


class ModelCosts:
    """What a model's workers take. Written as requests go on, read at decisions; all on one event loop.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._prefill = LinearFit()
        self._handover = LinearFit()
        self._handovers = 0
        self._measured_at = self._begun_at = -math.inf
        self._step = LinearFit()
        self._answer = LinearFit()

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A worker came to a request's first token.

        Args:
            tokens: Prompt tokens that it had to compute until then: queued before the request, and its own.
            seconds: The time that took.
        """
        self._prefill.add(tokens, seconds)

    def handed_over(self, tokens: int, seconds: float) -> None:
        """A decode worker came to its first token.

        Args:
            tokens: How many of the prompt's tokens it was believed to lack.
            seconds: Since the ticket came, without the time that prompts queued there before it take: the transfer, what it
                computed and a step.
        """
        now = self._clock()
        self._handover.add(tokens, seconds, _KEPT if now - self._measured_at < PROBE_SECONDS else _KEPT_STALE)
        self._handovers += 1
        self._measured_at = now

    def generated(self, tokens: int, seconds: float, requests: int, prefilling: float) -> None:
        """A worker has generated.

        Args:
            tokens: Tokens after its first one.
            seconds: From the first token to the last.
            requests: How many requests it generated for meanwhile, this one included.
            prefilling: The share of the worker's time that prompts took.
        """
        if tokens > 0:
            self._step.add(requests, seconds / tokens * (1 - prefilling))

    def answered(self, tokens: int) -> None:
        """Notes that an answer of this many tokens is complete."""
        self._answer.add(1, tokens)

    @property
    def known_alone(self) -> bool:
        """Whether requests were answered, so that it is known what workers take alone."""
        return self._step.known

    @property
    def measured(self) -> bool:
        """Whether it is known what a hand-over takes."""
        return self._handovers >= _FIRST

    @property
    def handover_age(self) -> float:
        """Seconds since a hand-over was measured, or begun for that."""
        return self._clock() - max(self._measured_at, self._begun_at)

    def probing(self) -> None:
        """A hand-over was begun only to measure it: no other one is begun for that meanwhile."""
        self._begun_at = self._clock()

    def prefill(self, tokens: float) -> float:
        """Seconds to compute prompt tokens, 0 for none."""
        return self._prefill.at(tokens) if tokens else 0.0

    def handover(self, tokens: float) -> float:
        """Seconds from a ticket to the decode worker's first token, if the worker lacks this many of the prompt's tokens."""
        return self._handover.at(tokens)

    def generate(self, tokens: float, requests: float, prefilling: float) -> float:
        """Seconds to generate this many tokens together with other requests, if prompts take the share ``prefilling`` of the
        time."""
        return tokens * self._step.at(requests + 1) / (1 - prefilling)

    def crowding(self, tokens: float, requests: float) -> float:
        """Seconds by which one more request, of this many tokens, delays the ``requests`` that run already, summed over them."""
        return tokens * requests * (self._step.at(requests + 1) - self._step.at(requests))

    def output_tokens(self, most: int) -> float:
        """How long an answer is likely to be."""
        return min(most, self._answer.at(1)) if self._answer.known else most


class Costs:
    """The costs of all models.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._of: dict[str, ModelCosts] = {}

    def of(self, model: str) -> ModelCosts:
        """The costs of one model: always the same object."""
        found = self._of.get(model)
        if found is None:
            found = self._of[model] = ModelCosts(self._clock)
        return found
