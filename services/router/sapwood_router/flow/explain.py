"""Why a request would go where: every worker's load, what it holds of the prompt, what it would cost, and the choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import structs

from sapwood_router.fleet.eligibility import Demand
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.disaggregation.decision import Decision, Disaggregation, Part
from sapwood_router.flow.stages.select import of_roles
from sapwood_router.request.context import RequestContext
from sapwood_router.routing.policies.base import Choice, PromptPages
from sapwood_router.routing.policy_book import PolicyBook
from sapwood_router.routing.worker_view import WorkerView


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as the choice sees it.

    Attributes:
        address: Names the worker.
        requests: On it, as a choice counts them; this router's alone if it is out of the choice.
        queued_tokens: Prompt tokens it still has to prefill, counted likewise.
        excluded: Why it is; empty if it is not.
        cached_tokens: How many of the prompt's tokens it is believed to hold.
        cost: In the policy's measure, the least wins; None for policies without one.
    """

    address: str
    requests: int
    queued_tokens: int
    excluded: str
    cached_tokens: int = 0
    cost: float | None = None


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
    prompt = PromptPages(context.token_ids, context.caller.session, context.caller.cache_salt)
    demand = Demand(model, len(context.token_ids), context.fields.prompt)
    decision = disaggregation.decide(demand, prompt, context.sampling.max_tokens, probe=False)
    part = Part.PREFILL if decision.disaggregated else Part.WHOLE
    if decision.disaggregated:
        demand = structs.replace(demand, pages=disaggregation.pages_beside(demand))
    found = of_roles(registry.all(), demand, disaggregation.roles_for(part, decision))
    views = [worker.view() for worker in found.workers]
    policy = policies.of(model)
    scores = policy.explain(views, prompt)
    by_address = {view.address: view for view in views}
    candidates = [
        Candidate(
            worker.address,
            *_load_of(worker, by_address),
            found.excluded.get(worker, ""),
            *scores.get(worker.address, (0, None)),
        )
        for worker in registry.all()
    ]
    choice = policy.live.choose(views, prompt)
    decode_chosen = ""
    if decision.disaggregated:
        first = next(worker for worker in found.workers if worker.address == choice.address)
        demand = structs.replace(demand, pages=(first.model.pages,) if first.model and first.model.pages else ())
        decoding = of_roles(registry.available(model), demand, disaggregation.roles_for(Part.DECODE)).workers
        live = policies.of(model, decode=True).live
        decode_chosen = live.choose([worker.view() for worker in decoding], prompt).address
    return Explanation(
        candidates,
        choice.address,
        choice.reason,
        len(context.token_ids),
        policies.name_of(model),
        policy.would_choose(views, prompt),
        decision,
        decode_chosen,
    )


def _load_of(worker: Worker, views: Mapping[str, WorkerView]) -> tuple[int, int]:
    if (view := views.get(worker.address)) is not None:
        return view.requests, view.queued_tokens
    return worker.in_flight, worker.pending_tokens
