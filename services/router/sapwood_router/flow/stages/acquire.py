"""Stage 3: the request becomes part of its worker's load, before anything is awaited: the next choice sees it."""

from __future__ import annotations

from sapwood_router.fleet.circuit_breaker import Permit
from sapwood_router.fleet.worker import Lease, Worker
from sapwood_router.routing.policies.base import Choice, PromptPages
from sapwood_router.routing.shadowed import Shadowed


def acquire(
    worker: Worker, choice: Choice, prompt: PromptPages, policy: Shadowed, tenant: str = "", *, hands_off: bool = False
) -> tuple[Lease, Permit]:
    """Counts the request on the worker and tells the policy of the placement. The caller releases the lease, and ends
    the permit of the worker's breaker.

    Args:
        worker: Who was chosen.
        choice: Why.
        prompt: The request's.
        policy: Is told.
        tenant: Whose request it is.
        hands_off: Whether the worker only computes the prompt.
    """
    assert worker.model is not None
    permit = worker.breaker.begin()
    policy.placed(worker.address, worker.model.page_size, prompt)
    lacking = max(1, len(prompt.token_ids) - choice.cached_tokens)
    return worker.lease(lacking, tenant, hands_off=hands_off), permit
