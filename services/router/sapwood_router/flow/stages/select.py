"""Stage 2: chooses a worker."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from sapwood_common.errors import InvalidArgumentError, UnavailableError
from sapwood_router.fleet.eligibility import Demand, Eligible, eligible
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.served_model import Role
from sapwood_router.fleet.worker import Worker
from sapwood_router.request.context import RequestContext
from sapwood_router.routing.policies.base import Choice, PromptPages
from sapwood_router.routing.shadowed import Shadowed
from sapwood_router.routing.shortlist import MANY


def select(
    context: RequestContext,
    prompt: PromptPages,
    registry: Registry,
    policy: Shadowed,
    tried: Collection[str],
    roles: Sequence[Role] = (),
    pages: Collection[bytes] = (),
) -> tuple[Worker, Choice]:
    """The worker for a generation, and why; never one of ``tried``.

    Args:
        context: The request; ``worker`` and ``reason`` are filled.
        prompt: Its tokens.
        registry: Knows the workers.
        policy: Chooses.
        tried: Addresses of workers that refused it.
        roles: Roles in order of preference: workers of the next role are asked only if none of the first can take the request.
            Empty: workers of any role.
        pages: As of :class:`Demand`.

    Raises:
        NotFoundError, InvalidArgumentError: No such model, or the prompt is longer than its context.
        UnavailableError: No worker is left.
    """
    model = context.model = registry.resolve(context.model)
    demand = Demand(model, len(prompt.token_ids), context.fields.prompt, refused_by=tried, pages=pages)
    at = "" if context.session is None else context.session.worker
    worker, choice = choose(demand, prompt, registry, policy, roles, at)
    context.worker, context.reason = choice.address, choice.reason
    return worker, choice


def choose(
    demand: Demand,
    prompt: PromptPages,
    registry: Registry,
    policy: Shadowed,
    roles: Sequence[Role] = (),
    session_at: str = "",
) -> tuple[Worker, Choice]:
    """The worker for a request, and why: ``session_at`` if it can be chosen, else the policy's; ``roles`` as for :func:`select`.

    Raises:
        InvalidArgumentError, UnavailableError: As :func:`~sapwood_router.fleet.eligibility.eligible`.
    """
    available = registry.available(demand.model)
    many = len(available) > MANY
    workers = _shortlist(demand, prompt, registry, policy, roles, session_at) if many else None
    if workers is None:
        workers = of_roles(available, demand, roles).workers
    if session_at and any(worker.address == session_at for worker in workers):
        choice = Choice(session_at, "session")
    else:
        choice = policy.choose([worker.view() for worker in workers], prompt)
    return next(worker for worker in workers if worker.address == choice.address), choice


def of_roles(workers: Iterable[Worker], demand: Demand, roles: Sequence[Role]) -> Eligible:
    """The workers to choose from: those of the first role in ``roles`` of which a worker can take the request; without
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
