"""Stage 2: a worker is chosen."""

from __future__ import annotations

from collections.abc import Collection

from sapwood_common.errors import InvalidArgumentError, UnavailableError
from sapwood_router.fleet.registry import RETRY_AFTER, Registry
from sapwood_router.fleet.worker import Worker, preferred
from sapwood_router.request.context import RequestContext
from sapwood_router.routing.policies.base import Choice, PromptPages
from sapwood_router.routing.shadowed import Shadowed


def select(
    context: RequestContext, prompt: PromptPages, registry: Registry, policy: Shadowed, tried: Collection[str]
) -> tuple[Worker, Choice]:
    """The worker for a request, and why; never one of ``tried``.

    Raises:
        NotFoundError, InvalidArgumentError: No such model, or the prompt is longer than its context.
        UnavailableError: No worker is left.
    """
    model = registry.resolve(context.model)
    context.model = model
    workers = [
        worker for worker in registry.available(model) if worker.address not in tried and worker.breaker.admits()
    ]
    if not workers:
        raise UnavailableError(f"no worker is available for model {model!r}", retry_after=RETRY_AFTER)
    workers = preferred(workers)
    length = len(prompt.token_ids)
    roomy = [worker for worker in workers if worker.model is not None and length <= worker.model.context_length]
    if not roomy:
        longest = max(worker.model.context_length for worker in workers if worker.model is not None)
        raise InvalidArgumentError(
            f"the prompt has {length} tokens, the context holds {longest}", field=context.fields.prompt
        )
    choice = policy.choose([worker.view() for worker in roomy], prompt)
    worker = next(worker for worker in roomy if worker.address == choice.address)
    context.worker, context.reason = choice.address, choice.reason
    return worker, choice
