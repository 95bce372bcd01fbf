"""Which policy decides for which model, and which shadows watch it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sapwood_router.config import PolicyName
from sapwood_router.policies.base import Policy
from sapwood_router.policies.shadowed import Shadowed


class PolicyBook:
    """The policies of all models. Policies that remember what workers hold are made once: a worker serves one model. The others,
    which take turns or draw, are made for each model.

    Args:
        default: The policy of models that are not named.
        of_models: Policies of those that are.
        shadows: Asked beside each of them.
        make: Makes a policy.
        on_shadow: See :class:`~sapwood_router.policies.shadowed.Shadowed`.
    """

    def __init__(
        self,
        default: PolicyName,
        of_models: Mapping[str, PolicyName],
        shadows: Sequence[PolicyName],
        make: Callable[[PolicyName], Policy],
        on_shadow: Callable[[str, bool], None],
    ) -> None:
        self._default = default
        self._of_models = of_models
        self._shadows = tuple(dict.fromkeys(shadows))
        self._make = make
        self._on_shadow = on_shadow
        self._cache_aware = make("cache_aware") if self.uses("cache_aware") else None
        self._books: dict[str, Shadowed] = {}

    def name_of(self, model: str) -> PolicyName:
        """The name of the policy that decides for a model."""
        return self._of_models.get(model, self._default)

    def uses(self, name: PolicyName) -> bool:
        """Whether a policy decides for some model or watches."""
        return name in (self._default, *self._of_models.values(), *self._shadows)

    def of(self, model: str) -> Shadowed:
        """The policy of a model that workers serve; always the same."""
        found = self._books.get(model)
        if found is None:
            live = self.name_of(model)
            shadows: dict[str, Policy] = {name: self._get(name) for name in self._shadows if name != live}
            found = self._books[model] = Shadowed(self._get(live), shadows, self._on_shadow)
        return found

    def reset(self, address: str, num_pages: int) -> None:
        """The worker (re)started, or is gone: it holds nothing and has room for ``num_pages`` pages."""
        if self._cache_aware is not None:
            self._cache_aware.reset(address, num_pages)

    def drained(self, address: str, heirs: Sequence[str]) -> None:
        """The worker gets nothing new; ``heirs`` serve the same model."""
        if self._cache_aware is not None:
            self._cache_aware.drained(address, heirs)

    def _get(self, name: PolicyName) -> Policy:
        if name == "cache_aware":
            assert self._cache_aware is not None
            return self._cache_aware
        return self._make(name)
