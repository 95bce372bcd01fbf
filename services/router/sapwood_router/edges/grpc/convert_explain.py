"""Explanations of choices as messages."""

from __future__ import annotations

from sapwood.v1 import router_pb2
from sapwood_router.flow.explain import Explanation


def to_explanation(explanation: Explanation) -> router_pb2.ExplainRouteResponse:
    """A choice and what it was made from, as a message."""
    response = router_pb2.ExplainRouteResponse(
        chosen=explanation.chosen,
        reason=explanation.reason,
        prompt_tokens=explanation.prompt_tokens,
        policy=explanation.policy,
    )
    for name, choice in explanation.shadows.items():
        response.shadows.add(policy=name, chosen=choice.address, reason=choice.reason)
    for candidate in explanation.candidates:
        response.candidates.add(
            address=candidate.address,
            excluded=candidate.excluded,
            requests=candidate.requests,
            queued_tokens=candidate.queued_tokens,
            cached_tokens=candidate.cached_tokens,
            cost=candidate.cost,
        )
    return response
