"""Stage 2: chooses a worker. An explanation of a route is this same choice, with its inputs noted."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec.structs import replace

from sapwood_common.errors import InvalidArgumentError, UnavailableError
from sapwood_router.fleet.eligibility import Demand, Eligible, eligible
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.served_model import Role
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.disaggregation.decision import Decision, Disaggregation, Part
from sapwood_router.flow.headroom import drawn
from sapwood_router.routing.policies.base import Choice, PromptPages
from sapwood_router.routing.policy_book import PolicyBook, Shadowed
from sapwood_router.routing.shortlist import MANY
from sapwood_router.routing.worker_view import WorkerView

_RNG = random.Random()


class Seen:
    """What a choice was made from; an explanation shows it. Filled by :func:`choose`.

    Attributes:
        views: The workers that the policy looked at, or could have where the session's own worker was taken.
        shadows: What other policies would have chosen, by their names; nothing is counted of it.
    """

    def __init__(self) -> None:
        self.views: list[WorkerView] = []
        self.shadows: dict[str, Choice] = {}


Narrow = Callable[[Sequence[Worker]], Sequence[Worker]]
"""Of the workers that can take a request, those that are to be preferred; none: all alike."""


class Route(msgspec.Struct, frozen=True):
    """Where a request goes, and why.

    Attributes:
        worker: Who gets it.
        choice: Why this one.
        part: What of the request the worker is asked for.
        decision: Whether the request is disaggregated, and why or why not; None: there was nothing to decide.
    """

    worker: Worker
    choice: Choice
    part: Part = Part.WHOLE
    decision: Decision | None = None


class Selector:
    """The one answer to "which worker": for requests, for further tries of them, and for explanations.

    Args:
        registry: Knows the workers.
        policies: Choose among them.
        disaggregation: Decides which requests are computed by two of them.
    """

    def __init__(self, registry: Registry, policies: PolicyBook, disaggregation: Disaggregation) -> None:
        self._registry = registry
        self._policies = policies
        self._disaggregation = disaggregation

    def begin(
        self,
        demand: Demand,
        prompt: PromptPages,
        left: int,
        session_at: str = "",
        seen: Seen | None = None,
        narrow: Narrow | None = None,
    ) -> Route:
        """The worker that a request begins at, whole or with its prompt.

        Args:
            demand: What the request asks of a worker.
            prompt: Its prompt, with what was generated before.
            left: The most tokens that are still to be generated.
            session_at: The worker that holds the request's session; empty: none does.
            seen: Filled with what the choice was made from. Then nothing is asked of a worker: no costs count as being measured.
            narrow: Says which workers are to be preferred; None: nobody does.

        Raises:
            InvalidArgumentError, UnavailableError: As :func:`~sapwood_router.fleet.eligibility.eligible`.
        """
        whole = self._policies.of(demand.model)
        if not self._disaggregation.concerns(demand.model):
            return Route(*choose(demand, prompt, self._registry, whole, (), session_at, seen, narrow))
        decision = self._disaggregation.decide(demand, prompt, left, probe=seen is None)
        if decision.disaggregated:
            beside = replace(demand, pages=self._disaggregation.pages_beside(demand))
            roles = self._disaggregation.roles_for(Part.PREFILL)
            with contextlib.suppress(UnavailableError, InvalidArgumentError):
                chosen = choose(beside, prompt, self._registry, whole, roles, session_at, seen, narrow)
                return Route(*chosen, Part.PREFILL, decision)
        roles = self._disaggregation.roles_for(Part.WHOLE, decision)
        chosen = choose(demand, prompt, self._registry, whole, roles, session_at, seen, narrow)
        return Route(*chosen, Part.WHOLE, decision)

    def first_workers(
        self, demand: Demand, prompt: PromptPages, *, others: bool = False
    ) -> tuple[Sequence[Worker], bool]:
        """The workers that a request may begin at, and whether these are only some of a large fleet: those that the policy looks
        at, or ``others`` that are drawn. Raises as :meth:`begin`."""
        concerned = self._disaggregation.concerns(demand.model)
        roles = self._disaggregation.roles_for(Part.PREFILL) if concerned else ()
        if others:
            return drawn_workers(demand, self._registry, roles), True
        return candidates(demand, prompt, self._registry, self._policies.of(demand.model), roles)

    def decode(
        self,
        demand: Demand,
        prompt: PromptPages,
        fingerprint: bytes,
        session_at: str = "",
        seen: Seen | None = None,
    ) -> Route:
        """The worker that generates for a prompt whose pages another worker has computed. Raises as :meth:`begin`.

        Args:
            demand: As for :meth:`begin`.
            prompt: The prompt.
            fingerprint: What the pages hold; empty: they are lost, and any worker may go on.
            session_at: As for :meth:`begin`.
            seen: As for :meth:`begin`.
        """
        policy = self._policies.of(demand.model, decode=True)
        roles = self._disaggregation.roles_for(Part.DECODE)
        demand = replace(demand, pages=(fingerprint,) if fingerprint else ())
        return Route(*choose(demand, prompt, self._registry, policy, roles, session_at, seen), Part.DECODE)


def choose(
    demand: Demand,
    prompt: PromptPages,
    registry: Registry,
    policy: Shadowed,
    roles: Sequence[Role] = (),
    session_at: str = "",
    seen: Seen | None = None,
    narrow: Narrow | None = None,
) -> tuple[Worker, Choice]:
    """The worker for a request, and why: ``session_at`` if it can be chosen, else the policy's.

    Args:
        demand: What the request asks of a worker.
        prompt: Its prompt.
        registry: Knows the workers.
        policy: Chooses among those that can be asked.
        roles: Roles in order of preference: workers of the next role are asked only if none of the first can take the request.
            Empty: workers of any role.
        session_at: The worker that holds the request's session; empty: none does.
        seen: Filled with what the choice was made from.
        narrow: Says which workers are to be preferred; None: nobody does.

    Raises:
        InvalidArgumentError, UnavailableError: As :func:`~sapwood_router.fleet.eligibility.eligible`.
    """
    workers, listed = candidates(demand, prompt, registry, policy, roles, session_at)
    if narrow is not None:
        preferred = narrow(workers)
        if not preferred and listed:
            preferred = narrow(drawn_workers(demand, registry, roles))
        workers = preferred or workers
    if seen is not None:
        seen.views = [worker.view() for worker in workers]
        seen.shadows = {}
    if session_at and any(worker.address == session_at for worker in workers):
        choice = Choice(session_at, "session")
    elif seen is not None:
        choice, seen.shadows = policy.choices(seen.views, prompt)
    else:
        choice = policy.choose([worker.view() for worker in workers], prompt)
    return next(worker for worker in workers if worker.address == choice.address), choice


def candidates(
    demand: Demand,
    prompt: PromptPages,
    registry: Registry,
    policy: Shadowed,
    roles: Sequence[Role] = (),
    session_at: str = "",
) -> tuple[Sequence[Worker], bool]:
    """The workers that a request may go to, and whether these are only those of a large fleet that the policy listed. Arguments
    and errors are those of :func:`choose`."""
    available = registry.available(demand.model)
    if demand.lora:
        return with_lora(available, demand, registry, roles, session_at), False
    many = len(available) > MANY
    listed = _shortlist(demand, prompt, registry, policy, roles, session_at) if many else None
    return (of_roles(available, demand, roles).workers, False) if listed is None else (listed, True)


def drawn_workers(demand: Demand, registry: Registry, roles: Sequence[Role]) -> Sequence[Worker]:
    """Of a large fleet some that are drawn of those that a request may go to. Raises as :func:`choose`."""
    return drawn(of_roles(registry.available(demand.model), demand, roles).workers, _RNG)


def with_lora(
    available: Sequence[Worker], demand: Demand, registry: Registry, roles: Sequence[Role], session_at: str = ""
) -> list[Worker]:
    """The workers to choose from for a request with an adapter: of those that are to have it, the ones that have loaded it, else
    all of them, else any worker. The session's own worker is among them if it has loaded the adapter.

    Raises:
        InvalidArgumentError, UnavailableError: As :func:`~sapwood_router.fleet.eligibility.eligible`.
    """
    places = registry.loras.holders(demand.model, demand.lora)
    lora = registry.loras.find(demand.model, demand.lora)
    loaded = frozenset[str]() if lora is None else lora.workers
    named = {*places, session_at} if session_at in loaded else {*places}
    groups = [{*named & loaded}, named]
    for group in groups:
        chosen = [worker for worker in available if worker.address in group]
        if not chosen:
            continue
        try:
            found = of_roles(chosen, demand, roles).workers
        except (InvalidArgumentError, UnavailableError):
            continue
        if any(worker.room for worker in found):
            return found
    return of_roles(available, demand, roles).workers


def of_roles(workers: Iterable[Worker], demand: Demand, roles: Sequence[Role]) -> Eligible:
    """The workers to choose from: those with the first role in ``roles`` for which some worker can take the request; without
    ``roles``, of any role.

    Raises:
        InvalidArgumentError, UnavailableError: As :func:`~sapwood_router.fleet.eligibility.eligible`.
    """
    if not roles:
        return eligible(workers, demand)
    workers = tuple(workers)
    role_of = {each: each.model.role for each in workers if each.model is not None and each.model.model == demand.model}
    present = set(role_of.values())
    wanted = [role for role in roles if role in present] if len(present) > 1 else []
    for role in wanted:
        others = {worker: f"its role is {own.value}" for worker, own in role_of.items() if own is not role}
        try:
            found = eligible((worker for worker in workers if worker not in others), demand)
        except (InvalidArgumentError, UnavailableError):
            if role is wanted[-1]:
                raise
            continue
        return Eligible(found.workers, {**found.excluded, **others})
    return eligible(workers, demand)


def _shortlist(
    demand: Demand, prompt: PromptPages, registry: Registry, policy: Shadowed, roles: Sequence[Role], session_at: str
) -> list[Worker] | None:
    """Of a large fleet the workers that can take the request at once, among those that the policy lists and the session's own.

    None: there is none, so all workers have to be looked at.
    """
    model = demand.model
    if demand.relayed or (roles and registry.has_roles(model)):
        return None
    [page_size, *others] = registry.page_sizes(model) or (0,)
    if others or not page_size:
        return None
    named = policy.shortlist(registry.addresses(model), page_size, prompt)
    if named is None:
        return None
    listed = (registry.find(address) for address in dict.fromkeys((session_at, *named)))
    try:
        found = eligible([worker for worker in listed if worker is not None], demand).workers
    except (InvalidArgumentError, UnavailableError):
        return None  # others may; if none can, the error should name what all of them lack
    return found if found[0].room else None  # ``eligible`` names workers without room only if none has any
