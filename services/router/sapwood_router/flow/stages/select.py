"""Stage 2: a worker is chosen."""

from __future__ import annotations

from collections.abc import Collection

from sapwood_router.fleet.eligibility import Demand, eligible
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.worker import Worker
from sapwood_router.request.context import RequestContext
from sapwood_router.routing.policies.base import Choice, PromptPages
from sapwood_router.routing.shadowed import Shadowed


def select(
    context: RequestContext, prompt: PromptPages, registry: Registry, policy: Shadowed, tried: Collection[str]
) -> tuple[Worker, Choice]:
    """The worker for a generation, and why; never one of ``tried``.

    Raises:
        NotFoundError, InvalidArgumentError: No such model, or the prompt is longer than its context.
        UnavailableError: No worker is left.
    """
    model = context.model = registry.resolve(context.model)
    demand = Demand(model, len(prompt.token_ids), context.fields.prompt, refused_by=tried)
    worker, choice = choose(demand, prompt, registry, policy)
    context.worker, context.reason = choice.address, choice.reason
    return worker, choice


def choose(demand: Demand, prompt: PromptPages, registry: Registry, policy: Shadowed) -> tuple[Worker, Choice]:
    """The worker for a request, and why.

    Raises:
        InvalidArgumentError, UnavailableError: As :func:`~sapwood_router.fleet.eligibility.eligible`.
    """
    workers = eligible(registry.available(demand.model), demand).workers
    choice = policy.choose([worker.view() for worker in workers], prompt)
    return next(worker for worker in workers if worker.address == choice.address), choice
