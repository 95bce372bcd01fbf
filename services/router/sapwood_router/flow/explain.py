"""Why a request would go where: every worker's load, what it holds of the prompt, what it would cost, and the choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sapwood_common.errors import InvalidArgumentError, UnavailableError
from sapwood_router.fleet.registry import RETRY_AFTER, Registry
from sapwood_router.fleet.worker import Worker, preferred
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
        cached_tokens: Of the prompt, tokens it is believed to hold.
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
    """A choice and all that it was made from; ``shadows`` are what other policies would have chosen, by their names."""

    candidates: list[Candidate]
    chosen: str
    reason: str
    prompt_tokens: int
    policy: str
    shadows: Mapping[str, Choice]


def explain(context: RequestContext, registry: Registry, policies: PolicyBook) -> Explanation:
    """Makes the choice for a prepared request without placing it (a policy that takes turns takes one).

    Raises:
        NotFoundError: No such model.
        UnavailableError: No worker can be chosen.
        InvalidArgumentError: The prompt is longer than any context.
    """
    model = registry.resolve(context.model)
    prompt = PromptPages(context.token_ids, context.caller.session, context.caller.cache_salt)
    excluded = _exclusions(context, model, registry.all())
    views = [worker.view() for worker, why in excluded.items() if not why]
    policy = policies.of(model)
    scores = policy.explain(views, prompt)
    by_address = {view.address: view for view in views}
    candidates = [
        Candidate(worker.address, *_load_of(worker, by_address), why, *scores.get(worker.address, (0, None)))
        for worker, why in excluded.items()
    ]
    choice = policy.live.choose(views, prompt)
    return Explanation(
        candidates,
        choice.address,
        choice.reason,
        len(context.token_ids),
        policies.name_of(model),
        policy.would_choose(views, prompt),
    )


def _load_of(worker: Worker, views: Mapping[str, WorkerView]) -> tuple[int, int]:
    if (view := views.get(worker.address)) is not None:
        return view.requests, view.queued_tokens
    return worker.in_flight, worker.pending_tokens


def _exclusions(context: RequestContext, model: str, workers: Iterable[Worker]) -> dict[Worker, str]:
    """Why each worker is out of the choice; empty if it is not. As in the pipeline's ``select``: see there for what is raised.

    Where all are full they are what the request would choose from as soon as one has room.
    """
    excluded = {worker: _excluded(worker, model) for worker in workers}
    able = [worker for worker, why in excluded.items() if not why]
    if not able:
        raise UnavailableError(f"no worker is available for model {model!r}", retry_after=RETRY_AFTER)
    likelier = preferred(able)
    excluded |= {worker: _passed_over(worker) for worker in able if worker not in likelier}
    able = likelier
    length, contexts = len(context.token_ids), {w: w.model.context_length for w in able if w.model is not None}
    if length > max(contexts.values()):
        raise InvalidArgumentError(
            f"the prompt has {length} tokens, the context holds {max(contexts.values())}", field=context.fields.prompt
        )
    return excluded | {w: f"its context holds {most} tokens" for w, most in contexts.items() if most < length}


def _passed_over(worker: Worker) -> str:
    if not worker.room:
        return "has as many requests as it is given"
    return f"has been at one step for {worker.step_seconds:.0f} s"


def _excluded(worker: Worker, model: str) -> str:
    if worker.model is not None and worker.model.model != model:
        return f"serves {worker.model.model}"
    if not worker.available or worker.model is None:
        return worker.problem or "not available"
    if worker.draining:
        return "drained by an operator"
    if worker.leaving:
        return "no longer named by any source"
    if not worker.breaker.admits():
        return f"circuit breaker {worker.breaker.state.value}"
    return ""
