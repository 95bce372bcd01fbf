"""What the running requests do in a step: decode, or compute more of their known tokens. O(running)."""

from __future__ import annotations

from typing import NamedTuple

from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.running.lanes import Lanes
from sapwood_worker.core.scheduler.running.retraction import Retraction
from sapwood_worker.core.scheduler.running.running_batch import RunningBatch


class RunningPlan(NamedTuple):
    """Running requests by rank: those that decode one token; those with one prompt token left, or back in the batch with only one
    token to compute; those with more left, of which some may have been retracted meanwhile.
    """

    decodes: list[Request]
    last_tokens: list[Request]
    unfinished: list[Request]


def plan_running(
    running: RunningBatch, retraction: Retraction, step: int, lanes: Lanes, *, in_flight: bool
) -> RunningPlan | None:
    """Gives each running request pages for its known tokens, retracting the last in rank if need be.

    Args:
        running: The batch. Mutated.
        retraction: Makes room. It takes the last by rank, which is none of those that are in the step so far.
        step: The number of the step being planned.
        lanes: How steps in flight share the requests.
        in_flight: Whether another step is in flight.

    Returns:
        None if a request would have to be retracted that the step in flight may compute.
    """
    decodes: list[Request] = []
    last_tokens: list[Request] = []
    unfinished: list[Request] = []
    shares = lanes.shares(len(running.requests))
    most = -(-len(running.requests) // shares)
    for request in tuple(running.requests):
        known = len(request.token_ids) + request.unknown
        left = known - request.planned
        if left <= 0 or request.over or request.slot < 0:
            continue
        decoding = left == 1 and request.planned >= request.prompt_length and not request.enters
        if lanes.holds_back(request, step, shares) or (decoding and len(decodes) == most):
            continue
        if request.unknown and (request.hands_off or known >= request.max_length):
            continue  # the token that is in flight is the request's last
        while (known > request.capacity or request.planned >= request.reach) and not running.make_room(request, known):
            if in_flight:
                return None
            retraction.for_pages(step)
            if request.slot < 0:
                break
        else:
            if left > 1:
                unfinished.append(request)
            elif decoding:
                decodes.append(request)
            else:
                last_tokens.append(request)
    return RunningPlan(decodes, last_tokens, unfinished)
