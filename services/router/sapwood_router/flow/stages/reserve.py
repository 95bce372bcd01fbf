"""Takes a place in the queue before the stages begin, so that a refused request costs no tokenization."""

from __future__ import annotations

from sapwood_common.contract.sampling import AS_MANY_AS_FIT
from sapwood_common.errors import NotFoundError, UnavailableError
from sapwood_router.admission.control import AdmissionControl, Place
from sapwood_router.fleet.registry import Registry
from sapwood_router.request.context import ChatPrompt, RequestContext, TextPrompt

_USUAL_TOKENS = 256
"""Tokens that a request without max_tokens is assumed to generate, when its share is counted."""
_MOST_TOKENS = 4096
"""No request is assumed to need more: clients set a huge max_tokens to mean "no limit", and mostly get no more than others."""
CHARACTERS_A_TOKEN = 4
"""A rough mean, for text that is not tokenized yet."""


def reserve(context: RequestContext, registry: Registry, admission: AdmissionControl) -> Place | None:
    """A place for a request; None if its model is not known, or not yet.

    Raises:
        ResourceExhaustedError: It is refused.
        InvalidArgumentError: It names no model and there are several, or one that only backends have.
    """
    try:
        model = registry.resolve(context.model)
    except (NotFoundError, UnavailableError):
        return None
    return admission.reserve(model, context.caller, _cost(context), context.deadline)


def _cost(context: RequestContext) -> int:
    """What the request counts against its tenant's share, in tokens: prompt and answer, both estimated."""
    prompt, tokens = context.prompt, context.sampling.max_tokens
    tokens = _USUAL_TOKENS if tokens == AS_MANY_AS_FIT else min(tokens, _MOST_TOKENS)
    if isinstance(prompt, TextPrompt):
        return tokens + len(prompt.text) // CHARACTERS_A_TOKEN
    if isinstance(prompt, ChatPrompt):
        return tokens + sum(len(turn.content or "") for turn in prompt.turns) // CHARACTERS_A_TOKEN
    return tokens + len(prompt.token_ids)
