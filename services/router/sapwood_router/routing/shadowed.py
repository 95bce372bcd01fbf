"""A policy that decides, and others that are asked too: their choices are counted and have no effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sapwood_router.routing.policies.base import Choice, Policy, PromptPages
from sapwood_router.routing.worker_view import WorkerView


class Shadowed:
    """Implements ``Policy`` as ``live`` does. All learn of every placement, so that each knows what the workers really hold.

    Args:
        live: Decides.
        shadows: Asked for each decision, by their names; none is ``live``.
        on_shadow: Gets a shadow's name, and whether it chose as ``live`` did.
    """

    def __init__(self, live: Policy, shadows: Mapping[str, Policy], on_shadow: Callable[[str, bool], None]) -> None:
        self.live = live
        self._shadows = shadows
        self._all = (live, *shadows.values())
        self._on_shadow = on_shadow

    def shortlist(self, addresses: Sequence[str], page_size: int, prompt: PromptPages) -> Sequence[str] | None:
        """Shadows are asked about the same workers; so one that has to see all costs as much as if it decided."""
        listed: list[str] = []
        for policy in self._all:
            more = policy.shortlist(addresses, page_size, prompt)
            if more is None:
                return None
            listed += more
        return listed

    def choose(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Choice:
        if not self._shadows:
            return self.live.choose(workers, prompt)
        choice, shadows = self.choices(workers, prompt)
        for name, would in shadows.items():
            self._on_shadow(name, would.address == choice.address)
        return choice

    def choices(self, workers: Sequence[WorkerView], prompt: PromptPages) -> tuple[Choice, dict[str, Choice]]:
        """The choice, and each shadow's by its name. Counts nothing."""
        choice = self.live.choose(workers, prompt)
        return choice, {name: shadow.choose(workers, prompt) for name, shadow in self._shadows.items()}

    def placed(self, address: str, page_size: int, prompt: PromptPages) -> None:
        for policy in self._all:
            policy.placed(address, page_size, prompt)

    def finished(self, address: str, page_size: int, prompt: PromptPages, new_tokens: Sequence[int]) -> None:
        for policy in self._all:
            policy.finished(address, page_size, prompt, new_tokens)

    def failed(self, address: str, page_size: int, prompt: PromptPages) -> None:
        for policy in self._all:
            policy.failed(address, page_size, prompt)

    def explain(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Mapping[str, tuple[int, float]]:
        return self.live.explain(workers, prompt)
