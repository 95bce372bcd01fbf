"""Which policy decides for which model, and which shadows watch it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sapwood_router.routing.policies.base import Choice, CostPart, Itemised, Policy, PromptPages, ShowsPrefixes
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

    def parts(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Mapping[str, Sequence[CostPart]]:
        """What each worker's cost is made of; empty if the policy does not say."""
        return self.live.parts(workers, prompt) if isinstance(self.live, Itemised) else {}


class PolicyBook:
    """The policies of all models. Policies that remember workers' pages are made once, since a worker serves one model.

    Args:
        default: The policy of models that are not named.
        of_models: Policies of those that are.
        decode: The policy by which a disaggregated request's decode worker is chosen; empty: the model's.
        shadows: Asked with each of them.
        make: Makes a policy.
        on_shadow: Gets a shadow's name, and whether it chose as the policy did.

    Attributes:
        reads_events: Whether any of them asks the index that workers' KV events fill.
    """

    def __init__(
        self,
        default: str,
        of_models: Mapping[str, str],
        shadows: Sequence[str],
        make: Callable[[str], Policy],
        on_shadow: Callable[[str, bool], None],
        decode: str = "",
    ) -> None:
        self._default = default
        self._decode = decode
        self._of_models = of_models
        self._shadows = tuple(dict.fromkeys(shadows))
        self._make = make
        self._on_shadow = on_shadow
        made = {name: make(name) for name in {default, *of_models.values(), *self._shadows, *filter(None, (decode,))}}
        self._remembering = {name: policy for name, policy in made.items() if policy.remembers}
        self.reads_events = any(policy.reads_events for policy in made.values())
        self._books: dict[tuple[str, bool], Shadowed] = {}

    def name_of(self, model: str) -> str:
        """The name of the policy that decides for a model."""
        return self._of_models.get(model, self._default)

    def of(self, model: str, *, decode: bool = False) -> Shadowed:
        """The policy of a model that workers serve; always the same.

        Args:
            model: Its name.
            decode: Whether it is to choose decode workers: one that takes turns takes others among these.
        """
        found = self._books.get((model, decode))
        if found is None:
            live = (decode and self._decode) or self.name_of(model)
            shadows: dict[str, Policy] = {name: self._get(name) for name in self._shadows if name != live}
            found = self._books[model, decode] = Shadowed(self._get(live), shadows, self._on_shadow)
        return found

    def reset(self, address: str, num_pages: int) -> None:
        """The worker (re)started, or is gone: it holds nothing and has room for ``num_pages`` pages."""
        for policy in self._remembering.values():
            policy.reset(address, num_pages)

    def drained(self, address: str, heirs: Sequence[str]) -> None:
        """The worker gets nothing new; ``heirs`` serve the same model."""
        for policy in self._remembering.values():
            policy.drained(address, heirs)

    def latest(self, most: int) -> list[tuple[str, Sequence[bytes]]]:
        """The latest prompts that policies remember; see :class:`~sapwood_router.routing.policies.base.ShowsPrefixes`."""
        found: list[tuple[str, Sequence[bytes]]] = []
        for policy in self._remembering.values():
            if isinstance(policy, ShowsPrefixes):
                found += policy.latest(most)
        return found

    def _get(self, name: str) -> Policy:
        return self._remembering.get(name) or self._make(name)
