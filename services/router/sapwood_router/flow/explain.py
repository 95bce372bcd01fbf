"""Explains a route: every worker's load, cached tokens of the prompt and cost, and the choice."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from sapwood_common.errors import InvalidArgumentError, UnavailableError
from sapwood_router.fleet.eligibility import Demand, eligible
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.disaggregation.decision import Decision, Disaggregation, Part
from sapwood_router.flow.generation import pages_of
from sapwood_router.flow.select import Route, Seen, Selector
from sapwood_router.request.context import RequestContext
from sapwood_router.routing.policies.base import Choice, CostPart
from sapwood_router.routing.policy_book import PolicyBook


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as the choice sees it.

    Attributes:
        address: Names the worker.
        requests: On it, as a choice counts them; this router's alone if it is out of the choice.
        queued_tokens: Prompt tokens it still has to prefill, counted in the same way.
        excluded: Why it is; empty if it is not.
        cached_tokens: How many of the prompt's tokens it is believed to hold.
        cost: In the policy's measure, the least wins; None for policies without one.
        parts: What the cost is the sum of; empty for policies that do not say.
    """

    address: str
    requests: int
    queued_tokens: int
    excluded: str
    cached_tokens: int = 0
    cost: float | None = None
    parts: Sequence[CostPart] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """A choice and all that it was made from; ``shadows`` are what other policies would have chosen, by their names.

    ``decision`` says whether the prompt would be computed by the chosen worker and ``decode_chosen`` generate.
    """

    candidates: list[Candidate]
    chosen: str
    reason: str
    prompt_tokens: int
    policy: str
    shadows: Mapping[str, Choice]
    decision: Decision
    decode_chosen: str = ""


def explain(
    context: RequestContext, registry: Registry, policies: PolicyBook, disaggregation: Disaggregation
) -> Explanation:
    """Makes the choice for a prepared request without placing it (a policy that takes turns takes one).

    Raises:
        NotFoundError: No such model.
        UnavailableError: No worker can be chosen.
        InvalidArgumentError: The prompt is longer than any context.
    """
    model = registry.resolve(context.model)
    prompt = pages_of(context, context.token_ids, registry)
    demand = Demand(model, len(context.token_ids), context.fields.prompt, lora=context.lora)
    session_at = "" if context.session is None else context.session.worker
    selector, seen, left = Selector(registry, policies, disaggregation), Seen(), context.sampling.max_tokens
    route = selector.begin(demand, prompt, left, session_at, seen)
    decode_chosen = ""
    if route.part is Part.PREFILL:
        fingerprint = b"" if route.worker.model is None else route.worker.model.pages
        with contextlib.suppress(UnavailableError, InvalidArgumentError):
            decode_chosen = selector.decode(demand, prompt, fingerprint, session_at, Seen()).worker.address
        demand = replace(demand, pages=disaggregation.pages_beside(demand))
    scores = policies.of(model).explain(seen.views, prompt)
    parts = policies.of(model).parts(seen.views, prompt)
    return Explanation(
        _candidates(registry, demand, route, seen, scores, parts),
        route.choice.address,
        route.choice.reason,
        len(context.token_ids),
        policies.name_of(model),
        seen.shadows,
        route.decision or disaggregation.decide(demand, prompt, left, probe=False),
        decode_chosen,
    )


def _candidates(
    registry: Registry,
    demand: Demand,
    route: Route,
    seen: Seen,
    scores: Mapping[str, tuple[int, float]],
    parts: Mapping[str, Sequence[CostPart]],
) -> list[Candidate]:
    """Every worker: what the choice saw of it, or why it did not look at it."""
    views = {view.address: view for view in seen.views}
    excluded = eligible(registry.all(), demand).excluded
    candidates = []
    for worker in registry.all():
        view = views.get(worker.address)
        if view is not None:
            tokens, cost = scores.get(worker.address, (0, None))
            sums = parts.get(worker.address, ())
            candidates.append(Candidate(worker.address, view.requests, view.queued_tokens, "", tokens, cost, sums))
            continue
        reason = excluded.get(worker) or _passed_over(worker, route, len(views), demand.lora)
        candidates.append(Candidate(worker.address, worker.in_flight, worker.pending_tokens, reason))
    return candidates


def _passed_over(worker: Worker, route: Route, looked_at: int, lora: str) -> str:
    """Why a worker that could take the request is none of those that the policy looked at."""
    own = worker.model.role if worker.model is not None else None
    chosen = route.worker.model.role if route.worker.model is not None else None
    if own is not None and own is not chosen:
        return f"its role is {own.value}"
    if lora:
        return f"none of the {looked_at} workers that adapter {lora!r} has been placed on, or has been loaded by"
    return f"not among the {looked_at} workers of a large fleet that the policy looks at for this prompt"
